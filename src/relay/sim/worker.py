"""A simulated worker: agent and engine on one host; each ends with the other, as in ``worker/agent_loop.py``."""

from collections.abc import Callable

import msgspec

from relay.ids import WorkerKey
from relay.protocol.messages import Drain, EngineExited, GatewayToAgent, Heartbeat, Hello, Message, Role, Welcome
from relay.sim.engine import Ended, EngineProcess
from relay.sim.gateway_links import SimGatewayLinks
from relay.sim.kernel import Kernel
from relay.sim.network import Network
from relay.sim.process import Process
from relay.sim.swarm import Swarm
from relay.worker.agent import HEARTBEAT_NS
from relay.worker.events import Event
from relay.worker.last_word import ended_by_itself
from relay.worker.status_page import manifest_of
from relay.worker.step_age import LONG_STEP_MS, StepAge

EXIT_NS = 1_000_000  # from a process's end to the event that tells of it


class WorkerNode:
    """One incarnation. ``launcher_exited(key, status, signal, last word)`` is called when the agent is gone.

    ``poisoned`` is called when the agent reports an engine that a poison request crashed. One that somebody killed in the moment
    between fell to that.
    """

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        swarm: Swarm,
        key: WorkerKey,
        role: Role,
        numerics: str,
        launcher_exited: Callable[[WorkerKey, int | None, int | None, EngineExited | None], None],
        observe: Callable[[EngineProcess, Event | Ended], None],
        poisoned: Callable[[], None],
        start_crashes: bool = False,
    ) -> None:
        self.key = key
        self.role = role
        self._kernel = kernel
        self._network = network
        self._launcher_exited = launcher_exited
        self._poisoned = poisoned
        self._start_crashes = start_crashes
        self.last_word: EngineExited | None = None  # left with the launcher, by the agent or by a gateway
        self.agent = Process(kernel)
        self.engine: EngineProcess | None = None
        self._terminations = 0
        self._step_age = StepAge(dict)
        self.exit: tuple[int | None, int | None, EngineExited | None] | None = (
            None  # how its agent has ended, as its launcher knows it
        )
        self._hold_ns = swarm.worker.orphan_hold_ns
        self._welcome: dict[int, None] = {}
        self._beating = False
        self._alone_since_ns: int | None = None
        self._links = SimGatewayLinks(
            network,
            self.agent,
            key.worker,
            "agent",
            swarm.gateways,
            GatewayToAgent,
            self._hello,
            self._welcomed,
            self._ordered,
            self._gateway_lost,
        )
        with kernel.tape.within(f"worker {key.worker} {key.incarnation}"):
            load_ns = kernel.tape.below(swarm.load_ms, "load ms") * 1_000_000
        self._boot: Callable[[], EngineProcess] = lambda: EngineProcess(
            kernel, network, swarm, key, role, numerics, self._engine_exited, observe
        )
        self.agent.after(load_ns, self._start_engine)

    @property
    def alive(self) -> bool:
        return self.agent.alive

    @property
    def running(self) -> EngineProcess | None:
        """The engine, if it is alive."""
        return self.engine if self.engine is not None and self.engine.alive else None

    # --- the agent ------------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        if self._start_crashes:
            self._kernel.sometimes("an engine crashed on its start")
            self._send(EngineExited(status=1))
            self._end_agent(1, None)
            return
        self.engine = self._boot()

    def _hello(self) -> Hello:
        key = self.key
        return Hello(process="agent", worker=key.worker, incarnation=key.incarnation, pid=1, role=self.role)

    def _welcomed(self, connection: int, welcome: Welcome) -> None:
        self._welcome[connection] = None
        self._alone_since_ns = None
        if not self._beating:
            self._beating = True
            self._beat()

    def _ordered(self, connection: int, message: Message) -> None:
        if isinstance(message, Drain) and self.engine is not None:
            self.engine.sigterm()

    def _beat(self) -> None:
        self._kernel.events += 1
        engine = self.engine
        if engine is None:
            self._send(Heartbeat(0, "loading", 0, "S"))
        elif engine.alive:
            now_ns, page = self._kernel.now_ns, engine.page
            state = "T" if engine.stopped else "S"
            step, phase, age_ms = page.read(now_ns)
            age_ms = self._step_age.own_ms(step, phase, age_ms, state, now_ns)
            rows = page.manifest() if phase == "stepping" and age_ms >= LONG_STEP_MS else []
            self._send(Heartbeat(step, phase, age_ms, state, *manifest_of(rows)))
        self.agent.after(HEARTBEAT_NS, self._beat)

    def _send(self, message: msgspec.Struct) -> None:
        self._links.send(None, message)

    def _gateway_lost(self, connection: int, reason: str) -> None:
        self._welcome.pop(connection, None)
        if self._welcome or self._alone_since_ns is not None:
            return
        self._alone_since_ns = self._kernel.now_ns
        self.agent.after(self._hold_ns, self._leave_if_alone, self._kernel.now_ns)

    def _leave_if_alone(self, since_ns: int) -> None:
        """Without a gateway for too long the agent kills its engine and ends."""
        if self._alone_since_ns != since_ns:
            return
        if self.running is not None:
            self.running.end(None, 9)
        self._end_agent(1, None)

    def _engine_exited(self, status: int | None, signal: int | None) -> None:
        self.agent.after(EXIT_NS, self._report_engine, status, signal)

    def _report_engine(self, status: int | None, signal: int | None) -> None:
        engine = self.engine
        assert engine is not None
        message = EngineExited(status, signal, *manifest_of(engine.page.manifest()))
        self._send(message)
        if engine.poisoned:
            self._poisoned()
        if ended_by_itself(message):
            self.last_word = message
        if signal == 15 and self._terminations:
            status, signal = 0, None
        self._end_agent(status if status is not None else 128 + (signal or 0), None)

    def _end_agent(self, status: int | None, signal: int | None) -> None:
        if not self.agent.alive:
            return
        self.agent.die()
        self.exit = (status, signal, self.last_word)
        for side in self._network.connections_of(self.key.worker, "agent"):
            side.close()
        self._kernel.after(EXIT_NS, self._launcher_exited, self.key, status, signal, self.last_word)

    def vanish(self, heard_after_ns: int) -> None:
        """The machine is gone at once; its launcher hears of that later. Its connections were severed before."""
        self.agent.die()
        if self.running is not None:
            self.running.end(None, 9)
        self._kernel.after(heard_after_ns, lambda: self._launcher_exited(self.key, None, 9, self.last_word))

    # --- signals --------------------------------------------------------------------------------------------------

    def sigkill(self) -> None:
        """To the whole process group."""
        if self.agent.alive:
            self._end_agent(None, 9)
        if self.running is not None:
            self.running.end(None, 9)

    def sigkill_agent(self) -> None:
        """The engine follows: it asked the kernel to die with its parent."""
        self.sigkill()

    def sigterm(self) -> None:
        self.agent.run(self._on_sigterm)

    def _on_sigterm(self) -> None:
        self._terminations += 1
        engine = self.running
        if self.engine is None:
            self._end_agent(0, None)
        elif engine is not None:
            if self._terminations == 1:
                engine.sigterm()
            else:
                engine.end(None, 9)
