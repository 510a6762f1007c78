"""The asyncio shell of the gateway's core: sockets, timers and launchers. Implements ``contract.Gateway``."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from relay.clock import Clock, MonotonicClock
from relay.control.commands import (
    AcceptConnection,
    CancelTimer,
    CloseWorker,
    ClusterReady,
    Command,
    Deliver,
    Ended,
    Fail,
    LaunchWorker,
    LeaveRefused,
    Quiesced,
    Refuse,
    RejectConnection,
    SendToAgent,
    SendToEngine,
    SetTimer,
    StopWorker,
    WorkerGaveUp,
)
from relay.control.connection import Connection
from relay.control.contract import ModelInfo, Submission, SubmissionRefused, TokenSink
from relay.control.core import GatewayCore
from relay.control.events import (
    ChoiceFinished,
    ConnectionLost,
    DrainRequested,
    Event,
    LauncherExited,
    LeaveOrdered,
    ProcessName,
    RequestCancelled,
    RequestSubmitted,
    Started,
    StopRequested,
    TimerFired,
    TimerKey,
    WorkerConnected,
    WorkerMessage,
    WorkerStarted,
)
from relay.control.launcher import WorkerLauncher
from relay.control.record import GatewayRecorder
from relay.ids import WorkerKey, first_id
from relay.protocol.messages import PROTOCOL_MAX, EngineExited, Hello, Message, Rejected, Welcome
from relay.record.recorder import decide

MAX_STRANGERS = 256  # connections that have not said who they are
logger = logging.getLogger("relay.gateway")


class _Subscriber:
    """A request's sink, and the choices that want nothing more."""

    __slots__ = ("finished", "sink")

    def __init__(self, sink: TokenSink) -> None:
        self.sink = sink
        self.finished: set[int] = set()


class GatewayShell:
    """Runs on one event loop; every method must be called there.

    ``start`` listens for workers and launches them; ``wait_complete`` returns when all are ready; ``drain`` and ``stop`` end it.
    """

    def __init__(
        self,
        core: GatewayCore,
        launcher: WorkerLauncher,
        clock: Clock | None = None,
        recorder: GatewayRecorder | None = None,
    ) -> None:
        """``recorder`` is attached to ``core`` here and closed by ``close``."""
        self._core = core
        self._recorder = recorder
        if recorder is not None:
            recorder.attach(core)
        self._launcher = launcher
        self._now_ns = (clock or MonotonicClock()).now_ns
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}  # those that are nobody's yet, oldest first
        self._bound: dict[tuple[WorkerKey, ProcessName], Connection] = {}
        self._subscribers: dict[int, _Subscriber] = {}
        self._timers: dict[TimerKey, asyncio.TimerHandle] = {}
        self._pending: deque[Command] = deque()
        self._executing = False
        self._next_connection = 1
        self._next_request = first_id(core.state.config.epoch)
        self._server: asyncio.Server | None = None
        self._complete = asyncio.Event()
        self._quiesced = asyncio.Event()
        self.gave_up: WorkerGaveUp | None = None
        config = core.state.config
        self.gateways: list[dict[str, object]] = [{"id": config.gateway, "epoch": config.epoch, "pid": os.getpid()}]
        self.address = ""  # "tcp://host:port" for workers, after ``listen``
        self._handlers: dict[type, Callable[[Any], None]] = {
            Deliver: self._deliver,
            SendToEngine: self._send_to_engine,
            Ended: lambda command: self._forget(command.request),
            Fail: self._fail,
            Refuse: lambda command: None,  # read by ``submit``
            LeaveRefused: lambda command: None,  # read by ``leave``
            SendToAgent: self._send_to_agent,
            AcceptConnection: self._accept,
            RejectConnection: self._reject,
            CloseWorker: self._close_worker,
            LaunchWorker: self._launch,
            StopWorker: lambda command: self._launcher.stop(command.worker, kill=command.kill, word=command.word),
            SetTimer: self._set_timer,
            CancelTimer: self._cancel_timer,
            WorkerGaveUp: self._worker_gave_up,
            ClusterReady: lambda command: self._complete.set(),
            Quiesced: lambda command: self._quiesced.set(),
        }

    # --- life -----------------------------------------------------------------------------------------------------

    async def listen(self, host: str = "127.0.0.1", port: int = 0, *, listener: socket.socket | None = None) -> str:
        """Open the workers' listener, or take ``listener``; returns its address for their specs."""
        loop = asyncio.get_running_loop()
        if listener is not None:
            self._server = await loop.create_server(self._new_connection, sock=listener)
        else:
            self._server = await loop.create_server(self._new_connection, host, port)
        bound = self._server.sockets[0].getsockname()
        self.address = f"tcp://{bound[0]}:{bound[1]}"
        return self.address

    def start(self) -> None:
        """Launch the workers."""
        self._handle(Started())

    async def wait_complete(self) -> WorkerGaveUp | None:
        """Until every worker is ready once, or one gave up (which is returned)."""
        await self._complete.wait()
        return self.gave_up

    def kv_tokens(self) -> int:
        """Tokens that the smallest KV cache of the workers holds; 0 before any is known."""
        return min((worker.kv_tokens for worker in self._core.state.workers.values()), default=0)

    def limit_context(self, num_tokens: int) -> None:
        """Serve no longer sequences than this."""
        self._core.state.model = replace(self.model, max_model_len=num_tokens)
        if self._recorder is not None:
            self._recorder.happened(self.model, self._now_ns())
            self._recorder.decided([])

    async def drain(self, grace_s: float) -> bool:
        """Take no new requests; wait at most ``grace_s`` for the running ones. True: all ended by themselves."""
        self._handle(DrainRequested())
        try:
            await asyncio.wait_for(self._quiesced.wait(), grace_s)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Fail what still runs and tell every worker to end. The launcher's owner waits for the processes."""
        self._handle(StopRequested())

    async def close(self) -> None:
        """Close listener, connections and timers."""
        if self._server is not None:
            self._server.close()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for connection in list(self._connections.values()):
            connection.abort("gateway closed")
        await asyncio.sleep(0)
        if self._server is not None:
            await self._server.wait_closed()
        if self._recorder is not None:
            self._recorder.close()

    # --- contract.Gateway -----------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        return self._core.state.model

    def submit(self, submission: Submission, sink: TokenSink) -> int:
        request = self._next_request
        self._next_request += 1
        self._subscribers[request] = _Subscriber(sink)
        commands = self._decide(RequestSubmitted(request, submission))
        for command in commands:
            if type(command) is Refuse or (type(command) is Fail and command.request == request):
                del self._subscribers[request]
                self._execute([other for other in commands if other is not command])
                raise SubmissionRefused(command.failure)
        self._execute(commands)
        return request

    def cancel(self, request: int) -> None:
        if self._subscribers.pop(request, None) is not None:
            self._handle(RequestCancelled(request))

    def finish_choice(self, request: int, choice: int) -> None:
        subscriber = self._subscribers.get(request)
        if subscriber is not None and choice not in subscriber.finished:
            subscriber.finished.add(choice)
            self._handle(ChoiceFinished(request, choice))

    def leave(self, workers: Sequence[str], *, stay_out: bool = False, rolling: bool = False) -> str:
        commands = self._decide(LeaveOrdered(tuple(workers), stay_out, rolling))
        self._execute(commands)
        problem = next((command.reason for command in commands if type(command) is LeaveRefused), "")
        if not problem and not rolling:  # what a rolling restart drains comes back by itself, whoever starts it
            self._launcher.leaving(workers, stay_out=stay_out)
        return problem

    def leave_told(self, workers: Sequence[str], *, stay_out: bool) -> None:
        """Another gateway drains ``workers``."""
        self._handle(LeaveOrdered(tuple(workers), stay_out, told=True))

    def ready(self) -> bool:
        return self._core.ready()

    def health(self) -> tuple[bool, str]:
        return self._core.health(self._now_ns())

    def status(self) -> dict[str, object]:
        mine = {"gateway": self._core.state.config.gateway, "gateways": self.gateways}
        return self._core.status(self._now_ns()) | mine

    def metrics(self) -> Sequence[tuple[str, dict[str, str], float]]:
        return self._core.metrics(self._now_ns())

    def story(self, request: int) -> list[str]:
        return self._core.story(request)

    # --- events in ------------------------------------------------------------------------------------------------

    def launcher_exited(
        self,
        worker: WorkerKey,
        status: int | None,
        signal: int | None,
        reason: str = "",
        engine: EngineExited | None = None,
    ) -> None:
        self._handle(LauncherExited(worker, status, signal, reason, engine))

    def worker_started(self, worker: WorkerKey) -> None:
        """The launcher has started this incarnation, perhaps for another gateway."""
        self._handle(WorkerStarted(worker))

    def hello(self, connection: Connection, hello: Hello) -> None:
        self._handle(WorkerConnected(connection.number, hello))

    def message(self, worker: WorkerKey, message: Message) -> None:
        self._execute(self._decide(WorkerMessage(worker, message)))

    def lost(self, connection: Connection, reason: str) -> None:
        self._connections.pop(connection.number, None)
        self._strangers.pop(connection.number, None)
        worker = connection.worker
        if worker is not None:
            if self._bound.get((worker, connection.process)) is not connection:
                return  # closed by us; the same worker may be connected anew
            del self._bound[(worker, connection.process)]
            self._handle(ConnectionLost(worker, connection.process, reason))

    def _new_connection(self) -> Connection:
        connection = Connection(self, self._next_connection)
        self._next_connection += 1
        self._connections[connection.number] = connection
        self._strangers[connection.number] = connection
        if len(self._strangers) > MAX_STRANGERS:  # a worker says who it is at once: the oldest is none
            self._strangers.pop(next(iter(self._strangers))).abort("too many connections that say nothing")
        return connection

    def _handle(self, event: Event) -> None:
        self._execute(self._decide(event))

    def _decide(self, event: Event) -> list[Command]:
        """Let the core handle ``event``."""
        return decide(self._recorder, self._core.handle, event, self._now_ns())

    # --- commands out ---------------------------------------------------------------------------------------------

    def _execute(self, commands: list[Command]) -> None:
        """Carry out ``commands`` in order. Called again from inside (a sink that finishes a choice), it only appends."""
        pending = self._pending
        pending += commands
        if self._executing:
            return
        self._executing = True
        handlers = self._handlers
        try:
            while pending:
                command = pending.popleft()
                handlers[type(command)](command)
        finally:
            self._executing = False

    def _deliver(self, command: Deliver) -> None:
        subscriber = self._subscribers.get(command.request)
        if subscriber is None or command.delivery.choice in subscriber.finished:
            return
        try:
            subscriber.sink.tokens(command.delivery)
        except Exception:  # a sink must not raise; one that does costs its own request only
            logger.exception("request %d: its sink failed", command.request)
            self.cancel(command.request)

    def _fail(self, command: Fail) -> None:
        subscriber = self._subscribers.pop(command.request, None)
        if subscriber is None:
            return
        try:
            subscriber.sink.failed(command.failure)
        except Exception:
            logger.exception("request %d: its sink failed", command.request)

    def _forget(self, request: int) -> None:
        self._subscribers.pop(request, None)

    def _send_to_engine(self, command: SendToEngine) -> None:
        connection = self._bound.get((command.worker, "engine"))
        if connection is not None:
            connection.send(command.message)

    def _send_to_agent(self, command: SendToAgent) -> None:
        connection = self._bound.get((command.worker, "agent"))
        if connection is not None:
            connection.send(command.message)

    def _accept(self, command: AcceptConnection) -> None:
        connection = self._connections.get(command.connection)
        if connection is None:  # it ended within this event; its loss was reported before the core knew it
            self._handle(ConnectionLost(command.worker, command.process, "EOF"))
            return
        connection.bind(command.worker, command.process)
        self._strangers.pop(connection.number, None)
        self._bound[(command.worker, command.process)] = connection
        config = self._core.state.config
        connection.send(Welcome(protocol=PROTOCOL_MAX, gateway=config.gateway, epoch=config.epoch))

    def _reject(self, command: RejectConnection) -> None:
        connection = self._connections.get(command.connection)
        logger.warning("worker refused: %s", command.reason)
        if connection is not None:
            connection.send(Rejected(reason=command.reason))
            connection.close()

    def _close_worker(self, command: CloseWorker) -> None:
        processes: tuple[ProcessName, ProcessName] = ("agent", "engine")
        for process in processes:
            connection = self._bound.pop((command.worker, process), None)
            if connection is not None:
                connection.close()

    def _launch(self, command: LaunchWorker) -> None:
        if command.cause:
            logger.warning("restarting %s (incarnation %d): %s", *command.worker, command.cause)
        else:
            logger.info("starting %s (incarnation %d)", *command.worker)
        self._launcher.start(command.worker, command.role)

    def _worker_gave_up(self, command: WorkerGaveUp) -> None:
        self.gave_up = self.gave_up or command
        self._complete.set()

    def _set_timer(self, command: SetTimer) -> None:
        self._cancel_timer(command)
        delay_s = max(0.0, (command.at_ns - self._now_ns()) / 1e9)
        self._timers[command.key] = asyncio.get_running_loop().call_later(delay_s, self._fire, command.key)

    def _cancel_timer(self, command: SetTimer | CancelTimer) -> None:
        timer = self._timers.pop(command.key, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, key: TimerKey) -> None:
        self._timers.pop(key, None)
        self._handle(TimerFired(key))
