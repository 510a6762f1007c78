"""A simulated worker: agent and engine on one host; each ends with the other, as in ``worker/agent_loop.py``."""

from collections.abc import Callable

import msgspec

from relay.ids import WorkerKey
from relay.protocol.framing import FrameDecoder, encode
from relay.protocol.messages import Drain, EngineExited, GatewayToAgent, Heartbeat, Hello, Rejected, Role
from relay.sim.engine import Ended, EngineProcess
from relay.sim.kernel import Kernel
from relay.sim.network import Network, Side
from relay.sim.process import Process
from relay.sim.swarm import Swarm
from relay.worker.agent import HEARTBEAT_NS
from relay.worker.agent_loop import KILL_SIGNALS
from relay.worker.events import Event
from relay.worker.status_page import manifest_for
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
        self._last_word: EngineExited | None = None  # left with the launcher
        self.agent = Process(kernel)
        self.engine: EngineProcess | None = None
        self._terminations = 0
        self._step_age = StepAge(dict)
        self._decoder = FrameDecoder(GatewayToAgent)
        self._side: Side | None = None
        network.dial(key.worker, "agent", "gateway", self.agent.guard(self._dialled))
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

    def _dialled(self, result: Side | str) -> None:
        if isinstance(result, str):
            self._gateway_lost(result)
            return
        self._side = result
        result.on_data, result.on_close = self.agent.guard(self._data), self.agent.guard(self._gateway_lost)
        self._send(
            Hello(process="agent", worker=self.key.worker, incarnation=self.key.incarnation, pid=1, role=self.role)
        )
        self._beat()

    def _data(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._kernel.events += 1
            if isinstance(message, Rejected):
                self._gateway_lost(message.reason)
                return
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
            self._send(Heartbeat(step, phase, age_ms, state, *manifest_for(rows, 0)))
        self.agent.after(HEARTBEAT_NS, self._beat)

    def _send(self, message: msgspec.Struct) -> None:
        if self._side is not None:
            self._side.send(encode(message))

    def _gateway_lost(self, reason: str) -> None:
        """Without a gateway the agent kills its engine and ends."""
        if self.running is not None:
            self.running.end(None, 9)
        self._end_agent(1, None)

    def _engine_exited(self, status: int | None, signal: int | None) -> None:
        self.agent.after(EXIT_NS, self._report_engine, status, signal)

    def _report_engine(self, status: int | None, signal: int | None) -> None:
        engine = self.engine
        assert engine is not None
        message = EngineExited(status, signal, *manifest_for(engine.page.manifest(), 0))
        self._send(message)
        if engine.poisoned:
            self._poisoned()
        if message.manifest and signal not in KILL_SIGNALS:
            self._last_word = message
        if signal == 15 and self._terminations:
            status, signal = 0, None
        self._end_agent(status if status is not None else 128 + (signal or 0), None)

    def _end_agent(self, status: int | None, signal: int | None) -> None:
        if not self.agent.alive:
            return
        self.agent.die()
        for side in self._network.connections_of(self.key.worker, "agent"):
            side.close()
        self._kernel.after(EXIT_NS, self._launcher_exited, self.key, status, signal, self._last_word)

    def vanish(self, heard_after_ns: int) -> None:
        """The machine is gone at once; its launcher hears of that later. Its connections were severed before."""
        self.agent.die()
        if self.running is not None:
            self.running.end(None, 9)
        self._kernel.after(heard_after_ns, self._launcher_exited, self.key, None, 9, None)

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
