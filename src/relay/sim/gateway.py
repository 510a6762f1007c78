"""The simulated gateway process: the production core in a shell without asyncio. It follows ``control/shell.py``."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relay.control import commands as c
from relay.control import events as e
from relay.control.connection import _INCOMING
from relay.control.contract import ModelInfo
from relay.control.core import GatewayCore
from relay.ids import WorkerKey
from relay.protocol.framing import FrameDecoder, FramingError, encode
from relay.protocol.messages import PROTOCOL_MAX, EngineExited, Heartbeat, Hello, Message, Rejected, Welcome
from relay.sim.backend import VOCAB
from relay.sim.engine import MODEL_DIGEST
from relay.sim.kernel import Kernel
from relay.sim.network import Network, Side
from relay.sim.process import Process
from relay.sim.seldom import watch_gateway
from relay.sim.swarm import Swarm

HOST = "gateway"


class _Connection:
    """As ``control/connection.py``: bytes to messages and back."""

    def __init__(self, gateway: "GatewayNode", side: Side) -> None:
        self._gateway = gateway
        self._side = side
        self.number = side.number
        self.worker: WorkerKey | None = None
        self.process: e.ProcessName = "agent"
        self._decoder = FrameDecoder(_INCOMING)
        self._closed = False
        side.on_data, side.on_close = gateway.guard(self._data), gateway.guard(self._lost)

    def send(self, message: Message) -> None:
        if not self._closed:
            self._side.send(encode(message))

    def close(self) -> None:
        self._closed = True
        if self._side.open:
            self._side.close()
            self._gateway.after(0, self._lost, "closed")

    def _data(self, data: bytes) -> None:
        try:
            messages = self._decoder.feed(data)
        except FramingError as error:
            self._side.close()
            self._lost(str(error))
            return
        for message in messages:
            if self._closed:
                return
            if self.worker is not None:
                self._gateway.handle(e.WorkerMessage(self.worker, message))
            elif isinstance(message, Hello):
                self._gateway.handle(e.WorkerConnected(self.number, message))

    def _lost(self, reason: str) -> None:
        if self._gateway.connections.pop(self.number, None) is not None:
            self._gateway.lost(self, reason)


class GatewayNode(Process):
    """One life of one gateway. ``execute`` gets the commands that concern clients and the launcher.

    ``before`` and ``observe`` bracket every event for the checkers.
    """

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        swarm: Swarm,
        host: str,
        epoch: int,
        execute: "Callable[[GatewayNode, c.Command], None]",
        before: "Callable[[GatewayNode, e.Event], None]",
        observe: "Callable[[GatewayNode, e.Event, list[c.Command]], None]",
    ) -> None:
        super().__init__(kernel)
        self.host = host
        self._network = network
        several = len(swarm.gateways) > 1
        control = replace(
            swarm.control, gateway=host, epoch=epoch, shared_workers=several, was_complete=epoch > len(swarm.gateways)
        )
        model = ModelInfo("hash", MODEL_DIGEST, "", VOCAB, swarm.scheduler.max_model_len, 0, (0,))
        self.core = GatewayCore(control, model, swarm.slots)
        watch_gateway(kernel, self.core)
        self.connections: dict[int, _Connection] = {}
        self._bound: dict[tuple[WorkerKey, str], _Connection] = {}
        self.timers: dict[e.TimerKey, int] = {}
        self.heard_ns: dict[WorkerKey, int] = {}  # last heartbeat that arrived, for checkers
        self.spoke_ns: dict[WorkerKey, int] = {}  # last message of either process
        self.frozen_ns: dict[WorkerKey, int] = {}  # since when heartbeats say that the engine is stopped
        self._pending: deque[c.Command] = deque()
        self._executing = False
        self._execute = execute
        self._before = before
        self._observe = observe
        network.listen(host, host, self._accept_side)

    def kill(self) -> None:
        """SIGKILL: the kernel closes its sockets."""
        self.die()
        self._network.unlisten(self.host)
        for kind in ("agent", "engine"):
            for side in self._network.connections_of(self.host, kind):
                side.close()

    def _accept_side(self, side: Side) -> None:
        connection = _Connection(self, side)
        self.connections[connection.number] = connection

    def handle(self, event: e.Event) -> list[c.Command]:
        """Let the core handle ``event`` and carry out what it wants done."""
        self.kernel.events += 1
        self._before(self, event)
        if type(event) is e.WorkerMessage:
            self.spoke_ns[event.worker] = self.kernel.now_ns
        if type(event) is e.WorkerMessage and type(event.message) is Heartbeat:
            self.heard_ns[event.worker] = self.kernel.now_ns
            if event.message.engine_state == "T":
                self.frozen_ns.setdefault(event.worker, self.kernel.now_ns)
            else:
                self.frozen_ns.pop(event.worker, None)
        commands = self.core.handle(event, self.kernel.now_ns)
        self._observe(self, event, commands)
        self._pending += commands
        if not self._executing:
            self._executing = True
            while self._pending and self.alive:
                self._carry_out(self._pending.popleft())
            self._executing = False
        return commands

    def launcher_exited(
        self, key: WorkerKey, status: int | None, signal: int | None, engine: EngineExited | None
    ) -> None:
        self.run(self.handle, e.LauncherExited(key, status, signal, engine=engine))

    def lost(self, connection: _Connection, reason: str) -> None:
        worker = connection.worker
        if worker is not None:
            if self._bound.get((worker, connection.process)) is not connection:
                return
            del self._bound[worker, connection.process]
            self.handle(e.ConnectionLost(worker, connection.process, reason))

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.SendToEngine(worker, message):
                self._send(worker, "engine", message)
            case c.SendToAgent(worker, message):
                self._send(worker, "agent", message)
            case c.AcceptConnection(number, worker, process):
                connection = self.connections.get(number)
                if connection is None:
                    self.handle(e.ConnectionLost(worker, process, "EOF"))
                    return
                connection.worker, connection.process = worker, process
                self._bound[worker, process] = connection
                config = self.core.state.config
                connection.send(Welcome(protocol=PROTOCOL_MAX, gateway=config.gateway, epoch=config.epoch))
            case c.RejectConnection(number, reason):
                self.kernel.sometimes("hello rejected")
                connection = self.connections.get(number)
                if connection is not None:
                    connection.send(Rejected(reason=reason))
                    connection.close()
            case c.CloseWorker(worker):
                for name in ("agent", "engine"):
                    bound = self._bound.pop((worker, name), None)
                    if bound is not None:
                        bound.close()
            case c.SetTimer(key, at_ns):
                self.timers[key] = at_ns
                self.kernel.at(at_ns, self.run, self._fire, key, at_ns)
            case c.CancelTimer(key):
                self.timers.pop(key, None)
            case _:
                self._execute(self, command)

    def _send(self, worker: WorkerKey, process: str, message: Message) -> None:
        connection = self._bound.get((worker, process))
        if connection is not None:
            connection.send(message)

    def _fire(self, key: e.TimerKey, at_ns: int) -> None:
        if self.timers.get(key) == at_ns:
            del self.timers[key]
            self.handle(e.TimerFired(key))

    def guard(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        return super().guard(handler)
