"""Where a directed scenario is played: a world whose requests and faults come from a script instead of from the tape.

What remains with the tape is what nobody directs: load times, when a step computes, tokens. So one scenario runs under many seeds,
and every checker of the world watches it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from relay.config import SECOND
from relay.control.attempts import Attempt
from relay.control.contract import Submission
from relay.control.requests import Choice
from relay.control.transitions import AttemptState, ChoiceState
from relay.control_config import AdmissionConfig, ControlConfig, DetectorConfig, RestartConfig, RetryConfig
from relay.engine.limits import SchedulerLimits
from relay.protocol.messages import Role
from relay.protocol.sampling import SamplingParams
from relay.sim.backend import LATE, POISON
from relay.sim.clients import Client, Expectation
from relay.sim.engine import EngineProcess
from relay.sim.gateway import HOST
from relay.sim.kernel import Violation
from relay.sim.swarm import MS, Swarm
from relay.sim.worker import WorkerNode
from relay.sim.world import World
from relay.transfer.contract import TransferLimits
from relay.worker.core import WorkerConfig
from relay.worker.held import Held, HeldState

STEM = tuple(range(7, 56))  # what prompts begin with, unless a scenario wants them to share nothing


@dataclass(frozen=True, slots=True)
class Scenario:
    """``incident``: what happened there. ``plan``: what is played here. ``play`` raises Violation("scenario", …)."""

    name: str
    incident: str
    plan: str
    swarm: Swarm
    play: Callable[["Stage"], None]

    def run(self, world: World) -> None:
        """From an empty cluster to the leak check."""
        world.warm()
        self.play(Stage(world))
        world.settle()


def cluster(prefill: int, decode: int, **changes: object) -> Swarm:
    """A roomy cluster without drawn faults; ``changes`` replace fields of the swarm."""
    slots: list[tuple[str, Role]] = [(f"prefill-{index}", "prefill") for index in range(prefill)]
    role: Role = "decode" if prefill else "both"
    slots += [(f"{'decode' if prefill else 'worker'}-{index}", role) for index in range(decode)]
    swarm = Swarm(
        slots=tuple(slots),
        control=control(),
        scheduler=scheduler(),
        worker=WorkerConfig(report_interval_ns=10 * MS),
        transfer=TransferLimits(
            min_frame_bytes=64,
            max_frame_bytes=128,
            window_bytes=512,
            probe_ns=100 * MS,
            lease_ns=700 * MS,
            open_lease_ns=3000 * MS,
        ),
        latency_ns=200_000,
        split_per_mille=20,
        step_ns=4 * MS,
        token_ns=50_000,
        load_ms=100,
        faults=(),
        mean_fault_ms=0,
        mean_outage_ms=0,
        mean_arrival_ms=0,
        requests=0,
        chaos_ms=0,
        poison=0,
        clock_ns=1_000_000_000_000,
    )
    return replace(swarm, **changes)  # type: ignore[arg-type]  # fields by name


def scheduler(**changes: int) -> SchedulerLimits:
    """Room for about seven long prompts; ``changes`` replace some limits."""
    limits = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 16,
        "num_blocks": 40,
        "max_model_len": 112,
        "growth_tokens": 8,
        "max_num_waiting": 64,
    }
    return SchedulerLimits(**limits | changes)


def control(**detector: float) -> ControlConfig:
    """Short deadlines; ``detector`` replaces some of them."""
    seconds = {
        "suspect_after_s": 0.4,
        "dead_after_s": 0.9,
        "frozen_after_s": 0.3,
        "own_stall_s": 0.2,
        "answer_deadline_s": 2.0,
        "handoff_deadline_s": 2.0,
    } | detector
    return ControlConfig(
        detector=DetectorConfig(start_deadline_s=5.0, **seconds),
        restart=RestartConfig(
            first_delay_s=0.05, max_delay_s=1.0, stable_after_s=1.0, exit_wait_s=0.5, report_wait_s=0.05
        ),
        retry=RetryConfig(),
        admission=AdmissionConfig(),
        short_prompt_tokens=8,
        tick_s=0.05,
        story_entries=512,
    )


class Stage:
    """What a script may do and see."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kernel = world.kernel
        self._submitted = 0
        world.stop_per_mille = 0

    # --- time -----------------------------------------------------------------------------------------------------

    def wait(self, ms: int) -> None:
        """Let ``ms`` of virtual time pass."""
        end_ns = self.kernel.now_ns + ms * MS
        self.world.until(lambda: self.kernel.now_ns >= end_ns, ms * MS + SECOND, "")

    def until(self, condition: Callable[[], bool], text: str, within_ms: int = 5000) -> None:
        """Go on event by event until ``condition``; that it never comes true is the scenario's violation."""
        self.world.until(condition, within_ms * MS, f"in {within_ms} ms never: {text}", "scenario")

    def require(self, condition: bool, text: str) -> None:
        if not condition:
            raise Violation("scenario", text)

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: int = 40,
        max_tokens: int = 8,
        *,
        salt: int = 0,
        shared: int = 0,
        n: int = 1,
        logprobs: int | None = None,
        poison: bool = False,
        late: int | None = None,
        gateway: str = "",
    ) -> Client:
        """A request of ``prompt`` tokens, of which ``shared`` are those of every other one; ``salt`` makes the rest its own.

        ``poison``: it crashes what computes its prompt, or, with ``late``, what computes the token after that output.
        """
        own = [(11 * salt + 5 * index + salt // 5) % 60 for index in range(prompt - shared)]
        token_ids = [*STEM[:shared], *own, *([POISON] if poison and late is None else [])]
        self.world.num_poison += poison
        params = SamplingParams(max_tokens=max_tokens, seed=salt if late is None else LATE + late, logprobs=logprobs)
        self._submitted += 1
        submission = Submission(token_ids, params, n, resume_key=self._submitted.to_bytes(16, "big"))
        expectation = Expectation(poison=poison, faults_before=self.world.num_faults)
        return self.world.submit(submission, expectation, self.world.gateways[gateway or self.world.gateway.host])

    def disconnect(self, client: Client) -> None:
        if client.open:
            self.world.disconnect(client)

    def choice(self, client: Client, index: int = 0) -> Choice | None:
        request = self.world.gateway.core.state.requests.get(client.request)
        return request.choices[index] if request else None

    def oldest(self, client: Client) -> Attempt | None:
        """The live attempt of its first choice that was opened first."""
        choice = self.choice(client)
        return choice.attempts[0] if choice and choice.attempts else None

    def live(self, client: Client) -> list[Attempt]:
        choice = self.choice(client)
        return list(choice.attempts) if choice else []

    def waits(self, client: Client) -> bool:
        choice = self.choice(client)
        return choice is not None and choice.state is ChoiceState.WAITING

    def in_state(self, client: Client, state: AttemptState) -> bool:
        attempt = self.oldest(client)
        return attempt is not None and attempt.state is state

    def attempts(self, client: Client) -> int:
        """How many there ever were."""
        choice = self.choice(client)
        return choice.num_attempts if choice else 0

    def story(self, client: Client) -> str:
        """The gateway's account of the request."""
        return "\n".join(self.world.gateway.core.story(client.request))

    def prefill_of(self, client: Client) -> str:
        attempt = self.oldest(client)
        return attempt.prefill.id if attempt and attempt.prefill else ""

    def decode_of(self, client: Client) -> str:
        attempt = self.oldest(client)
        return attempt.decode.id if attempt else ""

    def finish(self, *clients: Client, within_ms: int = 20_000) -> None:
        """All of them end, none with a failure."""
        names = ", ".join(str(client.request) for client in clients[:8])
        self.until(lambda: not any(client.open for client in clients), f"requests {names} end", within_ms)
        for client in clients:
            failure = client.failure
            self.require(failure is None, f"request {client.request} failed: {failure and failure.message}")

    # --- workers --------------------------------------------------------------------------------------------------

    def node(self, worker: str) -> WorkerNode:
        return self.world.workers[worker]

    def engine(self, worker: str) -> EngineProcess:
        engine = self.node(worker).running
        if engine is None:
            raise Violation("scenario", f"{worker} has no running engine")
        return engine

    def held(self, worker: str, client: Client) -> Held | None:
        """What ``worker`` holds of the client's first choice."""
        engine = self.node(worker).running
        return engine.core.held.attempt(client.request, 0) if engine else None

    def holds(self, worker: str, client: Client, state: HeldState) -> bool:
        held = self.held(worker, client)
        return held is not None and held.state is state

    def incarnations(self) -> dict[str, int]:
        return {worker.id: worker.incarnation for worker in self.world.gateway.core.state.workers.values()}

    def ready(self, worker: str) -> bool:
        return any(ready.id == worker for ready in self.world.gateway.core.state.ready_workers())

    def counter(self, name: str) -> int:
        """Of the gateway."""
        return self.world.gateway.core.state.counters[name]

    def idle(self, worker: str) -> bool:
        """No sequence, block or transfer is held there."""
        engine = self.engine(worker)
        load = engine.scheduler.load()
        return not (len(engine.core.held) or load.kv_used or load.waiting or engine.transport.open_transfers())

    def all_idle(self) -> bool:
        return all(self.idle(name) for name, node in self.world.workers.items() if node.running is not None)

    # --- faults ---------------------------------------------------------------------------------------------------

    def fault(self, kind: str, host: str) -> None:
        """Count a fault of ``kind`` that the script is about to do to ``host`` ("": to all)."""
        self.world.faults[kind] += 1
        self.world.num_faults += 1
        self.world.harm(host, kind)

    def kill(self, worker: str) -> None:
        self.fault("kill_worker", worker)
        self.node(worker).sigkill()

    def crash(self, worker: str, signal: int = 11) -> None:
        self.fault("crash_engine", worker)
        self.engine(worker).end(None, signal)

    def terminate(self, worker: str) -> None:
        self.fault("drain", worker)
        self.node(worker).sigterm()

    def freeze(self, worker: str, *, engine: bool = True, agent: bool = False) -> Callable[[], None]:
        """SIGSTOP; call what is returned for SIGCONT."""
        node = self.node(worker)
        frozen = [*([self.engine(worker)] if engine else []), *([node.agent] if agent else [])]
        self.fault("freeze_all" if engine and agent else "freeze_engine" if engine else "freeze_agent", worker)
        for process in frozen:
            process.stop()

        def thaw() -> None:
            for process in frozen:
                process.thaw()

        return self._until_healed(thaw, worker)

    def kill_gateway(self, host: str, ms: int = 0) -> None:
        """With all it knows. Its clients come back to another one. With ``ms``, another life of it begins after that time."""
        self.fault("kill_gateway", "")
        self.world.supervisor.kill(self.world.gateways[host])
        if ms:
            start = self._until_healed(lambda: self.world.supervisor.start(host), "")
            self.kernel.after(ms * MS, start)

    def stall_gateway(self, ms: int) -> None:
        self.fault("gateway_stall", "")
        self.world.gateway.stop()
        thaw = self._until_healed(self.world.gateway.thaw, "")
        self.wait(ms)
        thaw()

    def partition(self, *pairs: tuple[str, str]) -> Callable[[], None]:
        """One way each; call what is returned to mend them."""
        for source, target in pairs:
            self.fault("partition", source)
            self.world.harm(target, f"unreachable from {source}")
            self.world.network.block(source, target)

        def mend() -> None:
            for source, target in pairs:
                self.world.network.unblock(source, target)

        return self._until_healed(mend, *dict.fromkeys(host for pair in pairs for host in pair))

    def cut_off(self, *workers: str) -> Callable[[], None]:
        """Neither these workers nor the gateway hear of each other."""
        return self.partition(*[pair for worker in workers for pair in ((worker, HOST), (HOST, worker))])

    def _until_healed(self, undo: Callable[[], None], *hosts: str) -> Callable[[], None]:
        """``undo`` happens once: when the script says so, or at the healing."""
        number = self.world.lasting(undo, hosts)
        return lambda: self.world.recover(number)
