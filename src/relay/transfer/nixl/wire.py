"""``nixl://host:port``: hellos and control frames over TCP, KV by one-sided writes of NIXL agents.

The first connection of a pair is an ordinary stream. Behind each other stands an agent process at either end: the engine
shares a ring with its own process as it does with a peer over shared memory, and the two processes move the records
(``bridge.py``). D's ring is the staging area that the peer may write. The block pool is registered with nobody: its bytes come
out of the ring, checked, by the same copy as ever. Where a process or a connection ends, all of them end, and the area waits
in quarantine until the process was waited for (``staging.py``).
"""

import contextlib
import ipaddress
import threading
from collections.abc import Callable
from functools import partial

from relay.errors import UsageError
from relay.extras import install_hint
from relay.transfer.channel import Channel, ChannelClosed
from relay.transfer.frame import FrameError
from relay.transfer.nixl.agent import installed
from relay.transfer.nixl.child import Role
from relay.transfer.nixl.memory import StagingMemory
from relay.transfer.nixl.process import JOIN_TIMEOUT_S, AgentProcess, ChildProcess, Launch
from relay.transfer.nixl.talk import Failed, Joined, Lane, Offer, hear, say
from relay.transfer.ring import DEFAULT_RING_BYTES, check_capacity
from relay.transfer.shm import Ring, RingReceiver, RingSender
from relay.transfer.stream import StreamChannel
from relay.transfer.wire import TcpWire, dial_tcp

CONNECTIONS = 2
MISSING = f"--transport nixl needs the optional extra: {install_hint('nixl')}"


def require_installed() -> None:
    """Raises UsageError where the extra is missing."""
    if installed() is None:
        raise UsageError(MISSING)


class NixlStream(StreamChannel):
    """A TCP connection whose end is the end of the agent process behind it."""

    def __init__(self, stream: StreamChannel) -> None:
        super().__init__(stream.socket, stream.peer, "nixl")
        self._lock = threading.Lock()
        self._process: AgentProcess | None = None
        self._over = False

    def attach(self, process: AgentProcess) -> None:
        with self._lock:
            self._process = process
            over = self._over
        if over:
            process.kill()

    def close(self) -> None:
        with self._lock:
            self._over = True
            process, self._process = self._process, None
        super().close()
        if process is not None:
            process.kill()


class NixlSender(RingSender):
    """P's end: its ring is emptied by its agent process."""

    scheme = "nixl"


class NixlReceiver(RingReceiver):
    """D's end: its ring is the staging area."""

    scheme = "nixl"


class NixlWire:
    """``connections``: one for control frames, the rest for KV. Raises UsageError where NIXL is not installed."""

    scheme = "nixl"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        ring_bytes: int = DEFAULT_RING_BYTES,
        connections: int = CONNECTIONS,
        launch: Launch | None = None,
    ) -> None:
        """``launch`` starts agent processes in place of those of NIXL, for tests."""
        if launch is None:
            require_installed()
        check_capacity(ring_bytes)
        self.connections = connections
        self._tcp = TcpWire(host, port)
        self.address = self._tcp.address.replace("tcp://", "nixl://", 1)
        self._ring_bytes = ring_bytes
        self._launch = launch or partial(_launch_child, loopback=_is_loopback(host))
        self.memory = StagingMemory(ring_bytes)

    def reaches(self, address: str) -> bool:
        return address.startswith("nixl://")

    def dial(self, address: str) -> StreamChannel:
        return NixlStream(dial_tcp(address))

    def accept(self) -> StreamChannel | None:
        stream = self._tcp.accept()
        return None if stream is None else NixlStream(stream)

    def upgrade(self, stream: StreamChannel, *, dialled: bool, lane: int = 0) -> Channel:
        if dialled:
            ring_bytes = self._ring_bytes if lane else 0
            say(stream, Lane(ring_bytes))
        else:
            ring_bytes = hear(stream, Lane).ring_bytes
        if not ring_bytes:
            return stream
        assert isinstance(stream, NixlStream)
        stream.set_timeout(JOIN_TIMEOUT_S)
        try:
            if ring_bytes != self._ring_bytes:
                raise FrameError(f"ring of {ring_bytes} bytes at P, {self._ring_bytes} at D")
            return self._join(stream, "source" if dialled else "target")
        except (ChannelClosed, FrameError) as error:
            with contextlib.suppress(ChannelClosed):  # the peer may be why
                say(stream, Failed(str(error)))
            raise

    def close(self) -> None:
        self._tcp.close()

    def _join(self, stream: NixlStream, role: Role) -> Channel:
        """Both ends start their processes at once, exchange what they offer, and go on when both agents know each other.

        Raises ChannelClosed, FrameError; the process has been told to end then, and the caller closes the stream.
        """
        ring, agent_gone = self.memory.lend()

        def ended() -> None:
            agent_gone()
            stream.close()

        try:
            process = self._launch(role, ring, ended)
        except OSError as error:
            agent_gone()
            raise ChannelClosed(f"no NIXL agent process: {error}") from error
        stream.attach(process)
        try:
            say(stream, process.offer())
            process.join(hear(stream, Offer))
            say(stream, Joined())
            hear(stream, Joined)
            return NixlSender(stream, ring) if role == "source" else NixlReceiver(stream, ring)
        except OSError as error:  # closed by another thread in between
            raise ChannelClosed(f"{stream.peer}: {error}") from error


def _launch_child(role: Role, ring: Ring, ended: Callable[[], None], *, loopback: bool) -> AgentProcess:
    return ChildProcess(role, ring, ended, loopback)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
