"""One simulated cluster from its seed to its end: warm, chaos, heal, liveness bound, probes, quiesce and leak check."""

from collections import Counter
from collections.abc import Callable

from relay.config import SECOND
from relay.control import commands as c
from relay.control import events as e
from relay.control.contract import Submission
from relay.control.transitions import WorkerState
from relay.ids import WorkerKey
from relay.protocol.messages import EngineExited
from relay.sim import plan, poison
from relay.sim import swarm as drawing
from relay.sim.checkers import AUDIT_NS, Checkers
from relay.sim.clients import Client, Expectation, Oracles
from relay.sim.coverage import Struck
from relay.sim.director import Director
from relay.sim.disturbances import Disturbances
from relay.sim.engine import Ended, EngineProcess
from relay.sim.faults import inject
from relay.sim.gateway import GatewayNode
from relay.sim.judge import judge
from relay.sim.kernel import Kernel, Violation
from relay.sim.network import Network, Side
from relay.sim.outages import unread
from relay.sim.plan import Planned
from relay.sim.supervisor import Supervisor
from relay.sim.swarm import FAULTS, HARMLESS, MS, Swarm
from relay.sim.tape import Tape
from relay.sim.worker import WorkerNode
from relay.sim.workload import Workload
from relay.worker.events import Event as WorkerEvent
from relay.worker.events import OrderReceived

WARM_NS = 30 * SECOND
LIVENESS_NS = 90 * SECOND
QUIESCE_NS = 20 * SECOND
PROBES = 3
MAX_CALLS = 400_000  # of one run: more means that something goes in circles
NUMERICS = "numerics-1"
NEXT_NUMERICS = "numerics-2"


class World(Disturbances):
    """Owns everything; ``run`` plays it through and raises ``Violation``."""

    def __init__(self, tape: Tape, swarm: Swarm | None = None) -> None:
        """``swarm`` None: drawn from the tape."""
        super().__init__(Kernel(tape), lambda host: self.struck.hosts(host))
        with tape.within("swarm"):
            self.swarm = swarm or drawing.draw(tape)
        self.kernel.begin(self.swarm.clock_ns)
        self.network = Network(self.kernel, self.swarm.latency_ns)
        self.network.split_per_mille = self.swarm.split_per_mille
        self.workers: dict[str, WorkerNode] = {}  # the present incarnation
        self.zombies: list[WorkerNode] = []  # older ones that may still live
        self.clients: dict[int, Client] = {}
        self.faults: Counter[str] = Counter()
        self.num_faults = 0
        self.last_fault_ns = 0
        self.step_errors = 0
        self.wrong_machines = 0  # that compute something else than the oracle: the cores must notice
        self.crashing_starts: Counter[str] = Counter()  # worker → how many of its next starts crash
        self.crashed_starts = 0
        self.num_poison = 0
        self.poison_crashes = 0
        self.numerics = [NUMERICS]
        self.stop_per_mille = 10  # of deliveries after which a stop string matches
        self.phase = "warm"
        self.complete = False
        self._to_submit = 0
        self._open_client: Client | None = None  # one that was still open when last looked for
        self.oracles = Oracles(self.swarm.scheduler.max_model_len)
        with tape.within("workload"):
            self.workload = Workload(tape, self.swarm.scheduler.max_model_len)
        self.checkers = Checkers(self)
        self.struck = Struck(self)
        # workers and requests that a directed fault is meant for
        self.preferred: tuple[list[str], list[int]] = ([], [])
        self.network.damaged = self._damaged
        self.supervisor = Supervisor(self)

    @property
    def gateways(self) -> dict[str, GatewayNode]:
        """The present life of each."""
        return self.supervisor.nodes

    @property
    def gateway(self) -> GatewayNode:
        """The first one that lives (or would)."""
        return next((node for node in self.gateways.values() if node.alive), self.gateways[self.swarm.gateways[0]])

    def story(self, lines: int) -> list[str]:
        """The last ``lines`` lines of what happened and what the gateways decided, oldest first."""
        told = self.kernel.story()
        for host, node in self.gateways.items():
            name = f"{host}, " if len(self.gateways) > 1 else ""
            decided = node.core.state.story.everything()
            told += [(at - self.kernel.origin_ns, f"{name}{text}") for at, text in decided]
        told.sort(key=lambda line: line[0])
        return [f"{at / 1e6:10.3f} ms  {text}" for at, text in told[-lines:]]

    # --- the plot -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The whole run. Raises Violation; any other exception is one of a core and a violation too."""
        self.warm()
        self._chaos()
        self.settle()

    def warm(self) -> None:
        """From nothing to a complete cluster."""
        for node in self.gateways.values():
            node.handle(e.Started())
        self.kernel.after(AUDIT_NS, self._audit)
        self.until(lambda: self.complete, WARM_NS, "the cluster never became complete")
        self.phase = "chaos"

    def _chaos(self) -> None:
        """Requests arrive, faults happen."""
        kernel, swarm = self.kernel, self.swarm
        requests, faults = plan.draw(kernel.tape, swarm)
        self._to_submit = len(requests)
        for planned in requests:
            kernel.after(planned.at_ns, self._arrive, planned)
        for planned in faults:
            kernel.after(planned.at_ns, self._fault, planned)
        end_ns = kernel.now_ns + swarm.chaos_ms * MS
        if kernel.tape.edits.directed is not None:
            director = Director(self, *kernel.tape.edits.directed)
            while kernel.now_ns < end_ns and not director.done and kernel.step():
                director.look()
        self.until(lambda: kernel.now_ns >= end_ns, swarm.chaos_ms * MS + SECOND, "")

    def settle(self) -> None:
        """Everything heals, every request ends, every worker is ready and serves, nothing is left."""
        self._heal()
        self.until(self._all_ended, LIVENESS_NS, "", "I5")
        self.until(self._all_ready, LIVENESS_NS, "", "I12")
        self.phase = "probes"
        for number in range(PROBES):
            with self.kernel.tape.within(f"probe {number + 1}"):
                probe = self.workload.probe()
            self.submit(probe, Expectation(probe=True, faults_before=self.num_faults))
        self.until(self._all_ended, LIVENESS_NS, "", "I5")
        self.phase = "quiesce"
        self.until(self._quiet, QUIESCE_NS, "")
        self.checkers.quiesced()

    def until(self, done: Callable[[], bool], bound_ns: int, text: str, invariant: str = "") -> None:
        """Run events until ``done``; after ``bound_ns`` it is a violation of ``invariant`` (or simply time, without one)."""
        kernel = self.kernel
        limit_ns = kernel.now_ns + bound_ns
        while not done():
            if kernel.now_ns > limit_ns or not kernel.step():
                if text or invariant:
                    raise Violation(invariant or "I12", text or self._unfinished())
                return
            if kernel.calls > MAX_CALLS:
                raise Violation("I10", f"more than {MAX_CALLS} calls: something goes in circles")

    def _unfinished(self) -> str:
        open_requests = [client.request for client in self.clients.values() if client.open]
        states = {worker.id: worker.state.value for worker in self.gateway.core.state.workers.values()}
        stories = [
            line for r in open_requests[:1] for node in self.gateways.values() for line in node.core.story(r)[-5:]
        ]
        return f"after the bound requests {open_requests} are open, workers are {states}; {' | '.join(stories)}"

    def _all_ended(self) -> bool:
        if self._to_submit or (self._open_client is not None and self._open_client.open):
            return False
        self._open_client = next((client for client in self.clients.values() if client.open), None)
        return self._open_client is None

    def _all_ready(self) -> bool:
        workers = [worker for node in self.gateways.values() for worker in node.core.state.workers.values()]
        return all(worker.state is WorkerState.READY for worker in workers)

    def _quiet(self) -> bool:
        if not self._all_ready() or any(key[0] != "tick" for node in self.gateways.values() for key in node.timers):
            return False
        return not any(node.running is not None and node.running.busy for node in self.workers.values())

    def _audit(self) -> None:
        self.checkers.audit()
        self.kernel.after(AUDIT_NS, self._audit)

    # --- clients --------------------------------------------------------------------------------------------------

    def _arrive(self, planned: Planned) -> None:
        self._to_submit -= 1
        poisonous = planned.number <= self.swarm.poison and self.phase == "chaos"
        self.num_poison += poisonous
        with self.kernel.tape.within(planned.name):
            submission = self.workload.submission(self.kernel.now_ns, poisonous)
            alive = [node for node in self.gateways.values() if node.alive]
            node = self.kernel.tape.of(alive, "gateway") if len(alive) > 1 else self.gateway
        node.run(self.submit, submission, Expectation(poison=poisonous, faults_before=self.num_faults), node)

    def submit(self, submission: Submission, expectation: Expectation, node: GatewayNode | None = None) -> Client:
        node = node or self.gateway
        request = self.supervisor.new_request()
        client = Client(request, submission, expectation, self.oracles)
        client.begin(self.numerics)
        client.gateway = node.host
        self.clients[request] = client
        params = submission.params
        self.kernel.tell(
            "request {}{}: {} tokens, n {}, max_tokens {}",
            request,
            " (a probe)" if expectation.probe else "",
            len(submission.token_ids),
            submission.n,
            params.max_tokens,
        )
        node.handle(e.RequestSubmitted(request, submission))
        return client

    def disconnect(self, client: Client) -> None:
        self.struck.request(client.request)
        self.kernel.tell("request {}: client disconnects", client.request)
        client.cancelled = True
        if client.gateway:
            node = self.gateways[client.gateway]
            node.run(node.handle, e.RequestCancelled(client.request))

    def execute(self, node: GatewayNode, command: c.Command) -> None:
        """What a gateway's core wants of clients and of the launcher."""
        match command:
            case c.Deliver(request, delivery):
                client = self.clients[request]
                if client.open and delivery.choice not in client.stopped:
                    client.deliver(delivery)
                    if client.unread is not None:
                        unread(self, client, len(delivery.token_ids))
                    self._maybe_stop(node, client, delivery.choice)
            case c.Refuse(request, failure) if failure.retry_after_s and self.clients[request].returns:
                self.kernel.sometimes("a client that came back was told to wait")
                self.supervisor.send_back(self.clients[request])
            case c.Fail(request, failure) | c.Refuse(request, failure):
                client = self.clients[request]
                self.kernel.tell("request {}: {}{}", request, failure.code, failure.message and f", {failure.message}")
                if client.open:
                    client.end(failure)
                    judge(self, client, failure, refused=isinstance(command, c.Refuse))
            case c.Ended(request):
                if self.clients[request].open:
                    self.clients[request].end(None)
            case c.LaunchWorker(key, role, cause):
                self.supervisor.start_worker(node, key, role, cause)
            case c.StopWorker(key, kill, word):
                self._stop(node, key, kill, word)
            case c.ClusterReady():
                self.complete = True

    def _maybe_stop(self, node: GatewayNode, client: Client, choice: int) -> None:
        """Now and then a stop string matches in the text path."""
        if choice not in client.finished and self.kernel.tape.chance(self.stop_per_mille, "stop string"):
            self.kernel.sometimes("stop string")
            client.stopped[choice] = None
            node.handle(e.ChoiceFinished(client.request, choice))

    # --- workers --------------------------------------------------------------------------------------------------

    def launch(self, key: WorkerKey, role: str, cause: str) -> None:
        old = self.workers.get(key.worker)
        if old is not None and (old.alive or old.running is not None):
            self.zombies.append(old)
        self.kernel.tell("{} starts, incarnation {}{}", key.worker, key.incarnation, cause and f": {cause}")
        self._calm(key.worker)
        crashes = self.crashing_starts[key.worker] > 0
        if crashes:
            self.crashing_starts[key.worker] -= 1
            self.crashed_starts += 1
            self.last_fault_ns = self.kernel.now_ns
        self.workers[key.worker] = WorkerNode(
            self.kernel,
            self.network,
            self.swarm,
            key,
            role,  # type: ignore[arg-type]
            self.numerics[-1],
            self.supervisor.exited,
            self._observe,
            lambda: poison.taken(self),
            start_crashes=crashes,
        )

    def _stop(self, gateway: GatewayNode, key: WorkerKey, kill: bool, word: EngineExited | None) -> None:
        if kill:
            poison.killed(self, gateway, key)
        for node in [*self.workers.values(), *self.zombies]:
            if node.key == key:
                if word is not None:
                    node.last_word = node.last_word or word
                self.kernel.after(MS, node.sigkill if kill else node.sigterm)

    def _observe(self, engine: EngineProcess, event: WorkerEvent | Ended) -> None:
        if type(event) is OrderReceived:
            work = getattr(event.order, "work", None)
            if work is not None:
                engine.begun[work.request, work.choice, work.attempt] = None
        if engine.scheduler.num_preemptions:
            self.kernel.counts["preempted"] = 1
        self.checkers.worker_event(engine, event)

    def engine(self, key: WorkerKey) -> EngineProcess | None:
        """The engine of that incarnation, dead or alive."""
        node = self.workers.get(key.worker)
        if node is None or node.key != key:
            node = next((zombie for zombie in self.zombies if zombie.key == key), None)
        return node.engine if node is not None else None

    def upgrade(self) -> None:
        if len(self.numerics) == 1:
            self.numerics.append(NEXT_NUMERICS)
            for client in self.clients.values():
                if client.open and not client.has_read:
                    client.numerics.append(NEXT_NUMERICS)

    # --- faults ---------------------------------------------------------------------------------------------------

    def _fault(self, planned: Planned) -> None:
        if self.phase == "chaos":
            self.strike(planned.kind, planned.name)

    def strike(self, kind: str, name: str) -> bool:
        """Inject one fault; its choices come from the stream ``name``. False: there was nothing to harm."""
        self.struck.begin()
        with self.kernel.tape.within(name):
            done = inject(self, kind)
        self.struck.end(kind, done)
        if done:
            self.faults[kind] += 1
            if kind not in HARMLESS:
                self.num_faults += 1
                self.last_fault_ns = self.kernel.now_ns
            self.kernel.tell("{}: {}", name, kind)
        return done

    def _damaged(self, kind: str, side: Side) -> None:
        """A KV frame from ``side`` is damaged now."""
        self.struck.at_once(kind, side.host, side.peer.host)

    def prefer_workers(self, nodes: list[WorkerNode]) -> list[WorkerNode]:
        """Those of ``nodes`` that a directed fault is meant for, if there are any."""
        return [node for node in nodes if node.key.worker in self.preferred[0]] or nodes

    def prefer_clients(self, clients: list[Client]) -> list[Client]:
        return [client for client in clients if client.request in self.preferred[1]] or clients

    def _heal(self) -> None:
        self.phase = "heal"
        self.kernel.tell("everything heals")
        self.network.damage_next_kv.clear()
        self.network.forge_next_kv.clear()
        self.network.repeat_next_control.clear()
        for node in self.workers.values():
            if node.running is not None:
                node.running.fail_rows = 0
        self.recover_all()


def fault_counts(world: World) -> dict[str, int]:
    """How often each kind was injected, in the order of ``FAULTS``."""
    return {kind: world.faults[kind] for kind in FAULTS if world.faults[kind]}
