"""The byte proxy between gateways and their workers, and between the workers' engines.

Workers dial it instead of each gateway (``relay serve --worker-address``). It knows who they are by their hellos, and puts itself
between the engines by writing its own address into an engine's hello. What passes is told to a ``Watch`` before it is passed on, so
a fault can strike between a message and its arrival.
"""

import asyncio
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from relay.chaos.kv_tap import KvTap
from relay.chaos.pipe import Connection, End, Injury, Pipe
from relay.chaos.watch import Placement, Watch
from relay.protocol.framing import HEADER_BYTES, FrameDecoder, encode, payload_size
from relay.protocol.messages import (
    AgentToGateway,
    EngineExited,
    EngineToGateway,
    GatewayToAgent,
    GatewayToEngine,
    Hello,
    Load,
    Message,
    Welcome,
)

Link = tuple[str, int]  # (process of a worker, number of the gateway)
CRASH_SIGNALS = frozenset({signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})


@dataclass(slots=True)
class Life:
    """One incarnation of one worker, as its hellos tell of it. A process is held by pidfd: its number may be used again."""

    worker: str
    incarnation: int
    role: str
    pids: dict[str, int] = field(default_factory=dict)
    pidfds: dict[str, int] = field(default_factory=dict)
    gateways: int = 1
    connections: dict[Link, Connection] = field(default_factory=dict)
    welcomed: set[Link] = field(default_factory=set)
    kv_servers: list[asyncio.Server] = field(default_factory=list)
    kv_addresses: dict[str, str] = field(default_factory=dict)  # its own → the one in our hello
    counters: dict[str, float] = field(default_factory=dict)  # as its engine's last report has them
    exit_signal: int | None = None  # of its engine, as its agent has reported it
    ended_s: float = 0.0  # its only gateway's control connection was closed, by whichever side
    given_up_s: float = 0.0  # a gateway closed one after a fault had struck
    draining: bool = False
    hurt: bool = False  # a fault has struck it, and it has not got over it
    struck: tuple[str, float] | None = None  # the first fault (kind, monotonic seconds)

    def __str__(self) -> str:
        state = "hurt" if self.hurt else "ended" if self.ended_s else f"welcomed {sorted(self.welcomed)}"
        return f"{self.worker}.{self.incarnation} {state}"

    @property
    def ready(self) -> bool:
        return len(self.welcomed) == 2 * self.gateways and not self.ended_s

    @property
    def crashed(self) -> bool:
        """Its engine fell to a fault of its own, as its agent says, although nothing was done to it."""
        return self.exit_signal in CRASH_SIGNALS and self.struck is None

    @property
    def kv_ports(self) -> list[int]:
        """That its KV comes in at: ours, and its own behind them."""
        addresses = [address for pair in self.kv_addresses.items() for address in pair]
        return [int(address.rpartition(":")[2]) for address in addresses]

    def hold(self, process: str, pid: int) -> None:
        """Open the process that said hello, unless it has ended and another one got its number."""
        if process in self.pidfds:
            return  # it says hello to every gateway
        self.pids[process] = pid
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (ProcessLookupError, FileNotFoundError):  # it ended in between
            command = b""
        if b"relay.worker" in command:
            self.pidfds[process] = descriptor
        else:
            os.close(descriptor)

    def running(self) -> list[str]:
        """Its processes that have not ended."""
        return [process for process, fd in self.pidfds.items() if not select.select([fd], [], [], 0)[0]]

    def signal(self, process: str, number: signal.Signals) -> bool:
        """False when the process is gone."""
        try:
            signal.pidfd_send_signal(self.pidfds[process], number)
        except (ProcessLookupError, KeyError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class KvFrame:
    """A frame on its way from P to D: the ``number``-th KV frame of its transfer, or the handoff behind them."""

    placement: Placement
    number: int
    handoff: bool
    pipe: Pipe
    target: str


class Proxy:
    """One a run. ``start`` before the gateway; ``close`` after it."""

    def __init__(
        self,
        watch: Watch,
        gateways: list[tuple[str, int]],
        on_ended: Callable[[Life], None],
        past_proxy: Callable[[Life], bool],
    ) -> None:
        """``gateways``: what each listens on for workers.
        ``on_ended``: the first sign that one has given a struck life up. ``past_proxy``: whether KV may reach it by shared memory,
        unseen, rather than through the proxy."""
        self._past_proxy = past_proxy
        self.watch = watch
        self._gateways = gateways
        self._on_ended = on_ended
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.lives: dict[str, Life] = {}  # the latest of each worker
        self.past: list[Life] = []
        self.epochs = [0] * len(gateways)  # of each gateway's latest life, as its welcomes say
        self.kv_injury: Callable[[KvFrame], Injury | None] = lambda frame: None

    async def start(self) -> list[str]:
        """Listen for workers; returns the address they must dial for each gateway."""
        loop = asyncio.get_running_loop()
        for gateway in range(len(self._gateways)):
            accept = partial(self._accept_control, gateway)
            self._servers.append(await loop.create_server(accept, "127.0.0.1", 0))
        return ["tcp://{}:{}".format(*server.sockets[0].getsockname()[:2]) for server in self._servers]

    async def close(self) -> None:
        servers = [server for life in self.all_lives() for server in life.kv_servers]
        for server in [*servers, *self._servers]:
            server.close()
        for life in self.all_lives():
            for connection in life.connections.values():
                connection.reset()
            for pidfd in life.pidfds.values():
                os.close(pidfd)
            life.pidfds.clear()
        for task in self._tasks:
            task.cancel()

    def all_lives(self) -> list[Life]:
        """Of every worker, every incarnation that said hello."""
        return [*self.past, *self.lives.values()]

    def _accept_control(self, gateway: int) -> asyncio.Protocol:
        tap = _ControlTap(self, gateway)
        connection = Connection(tap.up, tap.down, tap.end)
        tap.connection = connection
        return self._accept(connection, self._gateways[gateway])

    def _accept(self, connection: Connection, target: tuple[str, int]) -> asyncio.Protocol:
        task = asyncio.get_running_loop().create_task(_dial(connection, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return connection.dialler

    def hello(self, hello: Hello, connection: Connection, gateway: int) -> Hello:
        """A worker process says who it is; returns the hello to pass on."""
        life = self.lives.get(hello.worker)
        if life is None or life.incarnation < hello.incarnation:
            if life is not None:
                self.past.append(life)
                self._close_kv(life)
            life = Life(hello.worker, hello.incarnation, hello.role, gateways=len(self._gateways))
            self.lives[hello.worker] = life
        if life.incarnation != hello.incarnation:
            return hello  # a late process of an earlier life: the gateway's business
        life.hold(hello.process, hello.pid)
        life.connections[(hello.process, gateway)] = connection
        if hello.process != "engine":
            return hello
        addresses = [self._kv_listener(life, address) for address in hello.kv_addresses if address.startswith("tcp://")]
        if self._past_proxy(life):
            addresses = [*(one for one in hello.kv_addresses if not one.startswith("tcp://")), *addresses]
        return msgspec.structs.replace(hello, kv_addresses=addresses)

    def _kv_listener(self, life: Life, address: str) -> str:
        if address in life.kv_addresses:
            return life.kv_addresses[address]
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        listener = socket.create_server(("127.0.0.1", 0))
        loop = asyncio.get_running_loop()

        def accept() -> asyncio.Protocol:
            tap = KvTap(self._kv_frame, life.worker)
            connection = Connection(tap.up, tap.down, lambda end: None)
            tap.pipe = connection.up
            return self._accept(connection, (host, int(port)))

        async def serve() -> None:
            life.kv_servers.append(await loop.create_server(accept, sock=listener))

        task = loop.create_task(serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        life.kv_addresses[address] = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        return life.kv_addresses[address]

    def _kv_frame(self, transfer: int, handoff: bool, pipe: Pipe, target: str) -> Injury | None:
        placement = self.watch.kv_frame(transfer, handoff=handoff)
        if placement is None:
            return None
        return self.kv_injury(KvFrame(placement, placement.kv_frames, handoff, pipe, target))

    def to_worker(self, life: Life, link: Link, message: Message) -> None:
        process, gateway = link
        if isinstance(message, Welcome):
            life.welcomed.add(link)
            self.epochs[gateway] = max(self.epochs[gateway], message.epoch)
        elif process == "engine":
            self.watch.to_worker(life.worker, message)

    def from_worker(self, life: Life, process: str, message: Message) -> None:
        if isinstance(message, EngineExited):
            life.exit_signal = message.signal
        elif isinstance(message, Load):
            life.counters = message.counters
        elif process == "engine" and self.lives.get(life.worker) is life:
            self.watch.from_worker(life.worker, message)

    def ended(self, life: Life, link: Link, *, by_gateway: bool) -> None:
        """One end of a control connection of ``life`` has closed it: the end of it with one gateway, else it dials again."""
        life.welcomed.discard(link)
        if len(self._gateways) == 1 and not life.ended_s:
            life.ended_s = time.monotonic()
            self._close_kv(life)
        if by_gateway and life.struck is not None and not life.given_up_s:
            life.given_up_s = time.monotonic()
            self._on_ended(life)

    @staticmethod
    def _close_kv(life: Life) -> None:
        for server in life.kv_servers:
            server.close()


class _ControlTap:
    """Reads both directions of one control connection."""

    def __init__(self, proxy: Proxy, gateway: int) -> None:
        self._proxy = proxy
        self._gateway = gateway
        self._first = bytearray()
        self._life: Life | None = None
        self._process = ""  # of the worker
        self._from_worker: FrameDecoder | None = None
        self._to_worker: FrameDecoder | None = None
        self.connection: Connection | None = None

    def up(self, data: bytes) -> tuple[bytes, Injury | None]:
        if self._from_worker is None:
            return self._hello(data), None
        for message in self._from_worker.feed(data):
            if self._life is not None:
                self._proxy.from_worker(self._life, self._process, message)
        return data, None

    def down(self, data: bytes) -> tuple[bytes, Injury | None]:
        if self._to_worker is not None and self._life is not None:
            for message in self._to_worker.feed(data):
                self._proxy.to_worker(self._life, (self._process, self._gateway), message)
        return data, None

    def end(self, end: End) -> None:
        life, link = self._life, (self._process, self._gateway)
        if life is not None and self.connection is not None and life.connections[link] is self.connection:
            self._proxy.ended(life, link, by_gateway=end is self.connection.listener)

    def _hello(self, data: bytes) -> bytes:
        """Nothing is passed on before the hello is whole."""
        self._first += data
        payload = payload_size(self._first)
        if payload is None or len(self._first) < HEADER_BYTES + payload:
            return b""
        size = HEADER_BYTES + payload
        (hello,) = FrameDecoder(AgentToGateway | EngineToGateway).feed(self._first[:size])
        assert isinstance(hello, Hello)
        assert self.connection is not None
        engine = hello.process == "engine"
        self._from_worker = FrameDecoder(EngineToGateway if engine else AgentToGateway)
        self._to_worker = FrameDecoder(GatewayToEngine if engine else GatewayToAgent)
        passed = self._proxy.hello(hello, self.connection, self._gateway)
        life = self._proxy.lives[hello.worker]
        if life.incarnation == hello.incarnation:
            self._life, self._process = life, hello.process
        rest = bytes(self._first[size:])
        self._first.clear()
        return encode(passed) + (self.up(rest)[0] if rest else b"")


async def _dial(connection: Connection, target: tuple[str, int]) -> None:
    """Open the other side. Whoever dialled us learns of a failure as of any lost connection."""
    try:
        await asyncio.get_running_loop().create_connection(lambda: connection.listener, *target)
    except OSError:
        connection.reset()
    else:
        connection.up.flush_early()
