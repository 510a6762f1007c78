"""A simulated engine: the production worker core, scheduler, runner and step executor in a shell without sockets and threads.

The shell follows ``worker/engine_shell.py``: events wait in an inbox, a turn handles them all and then lets the core plan.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler, SchedulerLimits
from relay.ids import WorkerKey
from relay.protocol.messages import GatewayToEngine, Hello, Message, Role, Welcome
from relay.sim.backend import LAYERS, LAYOUT, POISON, PROGRAM, EngineCrash, EngineHang, HashBackend
from relay.sim.gateway_links import SimGatewayLinks
from relay.sim.kernel import Kernel
from relay.sim.kv_link import SimTransport
from relay.sim.network import Network
from relay.sim.process import Process
from relay.sim.seldom import watch_engine
from relay.sim.swarm import Swarm
from relay.transfer.contract import Identity, ReceiveCompleted
from relay.worker.commands import (
    AbortTransfer,
    CloseGateway,
    Command,
    Exit,
    ForgetUnsent,
    OpenReceive,
    OpenSend,
    SendHandoff,
    SendToGateway,
    SetTimer,
    StartStep,
)
from relay.worker.core import WorkerCore
from relay.worker.events import (
    DrainRequested,
    Event,
    GatewayConnected,
    GatewayLost,
    OrderReceived,
    StepFinished,
    TimerFired,
)
from relay.worker.status_page import StatusPage
from relay.worker.step_thread import StepThread
from relay.worker.transfer_commands import carry_out

LOOP_NS = 20_000  # from an event to the turn that handles it
TICK_NS = 250_000_000
MODEL_DIGEST = "hash-model"


@dataclass(frozen=True, slots=True)
class Ended:
    """Told to ``observe`` when the process is gone."""

    status: int | None
    signal: int | None


class EngineProcess(Process):
    """``exited(status, signal)`` is called once, when it ends; ``observe(engine, event)`` after every event, and at the end."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        swarm: Swarm,
        key: WorkerKey,
        role: Role,
        numerics: str,
        exited: Callable[[int | None, int | None], None],
        observe: "Callable[[EngineProcess, Event | Ended], None]",
    ) -> None:
        super().__init__(kernel)
        self.key = key
        self._name = f"engine {key.worker} {key.incarnation}"  # of its stream of choices
        self.role = role
        self.numerics = numerics
        self.slow = 1
        self.fail_rows = 0  # the next step with at least so many rows raises; 0: none
        self.page = StatusPage.open("")
        self.page.set_phase("ready", kernel.now_ns)
        self._network = network
        self._swarm = swarm
        self._exited = exited
        self._observe = observe
        self.poisoned = False  # a poison request crashed it
        self.hung = False  # a poison request keeps its step from ending
        limits: SchedulerLimits = swarm.scheduler
        self.backend = HashBackend(numerics, self._trouble)
        self.backend.allocate_kv(limits.num_blocks, limits.block_size, "float32")
        self.runner = Runner(self.backend, PROGRAM, limits)
        self.scheduler = Scheduler(limits, numerics)
        self.core = WorkerCore(swarm.worker, self.scheduler, self.runner.kv_digests)
        watch_engine(kernel, self.scheduler, self.core)
        identity = Identity(key.worker, key.incarnation, MODEL_DIGEST, numerics, LAYOUT)
        self.transport = SimTransport(
            network, identity, self.backend, self.post, swarm.transfer, self, self.guard, swarm.kv_parts
        )
        self._steps = StepThread(self.runner, self.transport, LAYERS, self.page, self.post, self)
        self._queue: deque[StartStep] = deque()
        self._stepping = False
        self.inbox: deque[Event] = deque()
        self.begun: dict[tuple[int, int, int], None] = {}  # attempts that it was ever told of, for checkers
        self._turn_due = False
        self._timers: dict[str, int] = {}
        self._links = SimGatewayLinks(
            network,
            self,
            key.worker,
            "engine",
            swarm.gateways,
            GatewayToEngine,
            self._hello,
            self._welcomed,
            self._ordered,
            self._gateway_lost,
        )
        self.after(TICK_NS, self._tick)

    def now_ns(self) -> int:
        """This process's clock."""
        return self.kernel.now_ns

    @property
    def busy(self) -> bool:
        """It holds or computes something."""
        core = self.core
        if len(core.held) or len(core.orphans) or self.transport.open_transfers():
            return True
        return self.scheduler.has_work()

    # --- the gateway ----------------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        limits = self._swarm.scheduler
        return Hello(
            process="engine",
            worker=self.key.worker,
            incarnation=self.key.incarnation,
            pid=2,
            role=self.role,
            kv_addresses=self.transport.addresses,
            model_digest=MODEL_DIGEST,
            numerics_id=self.numerics,
            kv_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            orphans=self.core.orphans.keys(),
        )

    def _welcomed(self, connection: int, welcome: Welcome) -> None:
        self.post(GatewayConnected(connection, welcome.gateway, welcome.epoch))

    def _ordered(self, connection: int, message: Message) -> None:
        self.post(OrderReceived(connection, message))  # type: ignore[arg-type] # the decoder's union

    def _gateway_lost(self, connection: int, reason: str) -> None:
        self.post(GatewayLost(connection, reason))

    def sigterm(self) -> None:
        self.run(self.post, DrainRequested())

    # --- the loop -------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        self.inbox.append(event)
        if not self._turn_due:
            self._turn_due = True
            self.after(LOOP_NS, self.turn)

    def turn(self) -> None:
        self._turn_due = False
        while self.alive and self.inbox:
            event = self.inbox.popleft()
            self.kernel.events += 1
            if isinstance(event, ReceiveCompleted):
                self._observe(self, event)  # before the blocks may change
            self._carry_out(self.core.handle(event, self.now_ns()))
            if self.alive and not isinstance(event, ReceiveCompleted):
                self._observe(self, event)
        if self.alive:
            self._carry_out(self.core.advance(self.now_ns()))
            if self.core.draining:
                self.page.set_draining()

    def _tick(self) -> None:
        self.kernel.events += 1
        self.transport.tick(self.now_ns())
        self.after(TICK_NS, self._tick)

    def _timer(self, name: str, at_ns: int) -> None:
        if self._timers.get(name) == at_ns:
            del self._timers[name]
            self.post(TimerFired(name))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SendToGateway(gateway, message):
                    self._links.send(gateway, message)
                case CloseGateway(gateway):
                    self._links.close(gateway)
                case StartStep():
                    self._queue.append(command)
                    self._begin_step()
                case OpenSend() | ForgetUnsent() | SendHandoff() | OpenReceive() | AbortTransfer():
                    carry_out(self.transport, command)
                case SetTimer(name, at_ns):
                    self._timers[name] = at_ns
                    self.kernel.at(at_ns, self.run, self._timer, name, at_ns)
                case Exit(status, _):
                    self.end(status, None)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Start the oldest step. Its arithmetic happens at once or at the end of its time: both orders of every race occur."""
        if self._stepping or not self._queue:
            return
        self._stepping = True
        step = self._queue.popleft()
        self.page.begin_step(step.manifest, self.now_ns())
        cost_ns = self._swarm.step_ns + self._swarm.token_ns * sum([row.count for row in step.plan.rows])
        duration_ns = cost_ns * self.slow
        with self.kernel.tape.within(self._name):
            late = self.kernel.tape.below(2, "step computes late")
        if late:
            self.after(duration_ns, self._finish_step, step, None)
        else:
            event = self._execute(step)
            if event is not None:
                self.after(duration_ns, self._finish_step, step, event)

    def _execute(self, step: StartStep) -> StepFinished | None:
        try:
            return StepFinished(self._steps.execute(step))
        except EngineCrash:
            self.poisoned = True
            self.end(None, 11)
            return None
        except EngineHang:
            self.hung = True
            return None

    def _finish_step(self, step: StartStep, event: StepFinished | None) -> None:
        if event is None:
            event = self._execute(step)
            if event is None:
                return
        self.page.finish_step()
        self._stepping = False
        if not self._queue:
            self.page.set_phase("ready", self.now_ns())
        self.post(event)
        self._begin_step()

    def _trouble(self, token_ids: list[int], rows: int) -> None:
        if POISON in token_ids:
            raise EngineHang if self._swarm.poison_hangs else EngineCrash
        if self.fail_rows and rows >= self.fail_rows:
            self.kernel.sometimes("a step of several rows raised" if rows > 1 else "a step of one row raised")
            self.fail_rows = 0
            raise RuntimeError("injected")

    # --- the end --------------------------------------------------------------------------------------------------

    def end(self, status: int | None, signal: int | None) -> None:
        """The process is gone; the kernel closes its sockets."""
        if not self.alive:
            return
        self._observe(self, Ended(status, signal))
        self.die()
        self.transport.close()
        for kind in ("engine", "kv"):
            for side in self._network.connections_of(self.key.worker, kind):
                side.close()
        self._exited(status, signal)
