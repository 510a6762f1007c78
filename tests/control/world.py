"""A small world around ``GatewayCore``: fake workers, clients and a clock, driven step by step by a source of choices."""

from collections import defaultdict, deque
from collections.abc import Callable

from fake_worker import FakeWorker, oracle

from relay.control import commands as c
from relay.control import events as e
from relay.control.contract import ModelInfo, RequestFailure, Submission
from relay.control.core import GatewayCore
from relay.control.invariants import violations
from relay.control_config import ControlConfig
from relay.ids import SequenceKey, WorkerKey
from relay.protocol.messages import Drained, EngineExited, Heartbeat, Message, SequenceFailed, Work
from relay.protocol.sampling import SamplingParams

MODEL = ModelInfo("fake", "digest", "numerics", 1000, 512, 0, (0,))
MS = 1_000_000


class Client:
    """Checks one request's stream against the oracle as it arrives."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, str] = {}
        self.failure: RequestFailure | None = None
        self.ended = False
        self.cancelled = False
        self.stopped: set[int] = set()

    def deliver(self, delivery) -> None:
        choice = delivery.choice
        assert not self.ended, "tokens after the end"
        assert choice not in self.finished, "tokens after the finish"
        assert choice not in self.stopped, "tokens after a stop string"
        assert delivery.position == len(self.tokens[choice]), "a gap or a repetition"
        self.tokens[choice] += delivery.token_ids
        expected = oracle(self.submission.token_ids, self.submission.params, choice)
        assert self.tokens[choice] == expected[: len(self.tokens[choice])], "other tokens than the oracle's"
        if delivery.finish:
            assert self.tokens[choice] == expected, "finished early"
            self.finished[choice] = delivery.finish


class World:
    """Network order is free between connections and FIFO within one; everything is decided by ``pick(n) -> 0..n-1``."""

    def __init__(
        self, pick: Callable[[int], int], slots, config: ControlConfig | None = None, kv_blocks: int = 64
    ) -> None:
        self.pick = pick
        self.core = GatewayCore(config or ControlConfig(), MODEL, slots)
        self.roles = dict(slots)
        self.kv_blocks = kv_blocks
        self.now_ns = 0
        self.workers: dict[WorkerKey, FakeWorker] = {}
        self.to_engine: dict[WorkerKey, deque[Message]] = defaultdict(deque)
        self.accepted: set[tuple[WorkerKey, str]] = set()
        self.closed: set[WorkerKey] = set()
        self.endings: dict[WorkerKey, list[e.Event]] = {}
        self.handoffs: list[tuple[WorkerKey, WorkerKey, SequenceKey, int]] = []
        self.timers: dict[e.TimerKey, int] = {}
        self.clients: dict[int, Client] = {}
        self.gave_up: list[c.WorkerGaveUp] = []
        self.history: deque[e.WorkerMessage] = deque(maxlen=50)
        self.next_request = 1
        self.numerics = "numerics"  # of what starts from now on
        self.silent: set[WorkerKey] = set()
        self.crash_on: Callable[[Work], bool] | None = None
        self.handle(e.Started())

    # --- the gateway ----------------------------------------------------------------------------------------------

    def handle(self, event) -> list:
        commands = self.core.handle(event, self.now_ns)
        for command in commands:
            self._execute(command)
        problems = violations(self.core.state)
        assert not problems, problems
        return commands

    def _execute(self, command) -> None:
        match command:
            case c.LaunchWorker(worker, role):
                fake = FakeWorker(worker, role, kv_blocks=self.kv_blocks, numerics=self.numerics)
                self.workers[worker] = fake
                fake.pending_hellos = ["agent", "engine"]
            case c.StopWorker(worker):
                self.kill(worker, 9)
            case c.CloseWorker(worker):
                self.closed.add(worker)
            case c.AcceptConnection(_, worker, process):
                self.accepted.add((worker, process))
            case c.SendToEngine(worker, message):
                assert worker not in self.closed, "sent to a fenced worker"
                self.to_engine[worker].append(message)
            case c.SetTimer(key, at_ns):
                self.timers[key] = at_ns
            case c.CancelTimer(key):
                self.timers.pop(key, None)
            case c.Deliver(request, delivery):
                self.clients[request].deliver(delivery)
            case c.Fail(request, failure):
                client = self.clients[request]
                assert not client.ended, "ended twice"
                client.ended, client.failure = True, failure
            case c.Ended(request):
                client = self.clients[request]
                assert not client.ended, "ended twice"
                client.ended = True
            case c.WorkerGaveUp():
                self.gave_up.append(command)

    # --- clients --------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: list[int], max_tokens: int = 8, n: int = 1, seed: int = 1, min_tokens: int = 0, **kwargs
    ) -> RequestFailure | None:
        submission = Submission(
            prompt, SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, seed=seed), n, **kwargs
        )
        request = self.next_request
        self.next_request += 1
        self.clients[request] = Client(submission)
        for command in self.handle(e.RequestSubmitted(request, submission)):
            if isinstance(command, c.Refuse):
                del self.clients[request]
                return command.failure
        return None

    def cancel(self, request: int) -> None:
        self.clients[request].cancelled = True
        self.handle(e.RequestCancelled(request))

    def stop_choice(self, request: int, choice: int) -> None:
        self.clients[request].stopped.add(choice)
        self.handle(e.ChoiceFinished(request, choice))

    # --- faults ---------------------------------------------------------------------------------------------------

    def kill(self, key: WorkerKey, signal: int, engine_first: bool = True) -> None:
        """The processes die; what they said before stays on its way."""
        worker = self.workers.get(key)
        if worker is None or not worker.alive:
            return
        worker.alive = False
        manifest = worker.manifest(self.crash_on or bool)
        worker.sequences.clear()
        worker.prefills.clear()
        self.handoffs = [h for h in self.handoffs if key not in h[:2]]
        for other in self.workers.values():  # a peer of a broken transfer says so
            if other.alive and other.key != key:
                for order in [o for o in other.prefills.values() if o.target == key.worker]:
                    work = order.work
                    del other.prefills[SequenceKey(work.request, work.choice, work.attempt)]
                    other.out.append(SequenceFailed(work.request, work.choice, work.attempt, "target lost", True))
        agent: list[e.Event] = [e.ConnectionLost(key, "agent", "EOF")]
        if signal != 9:
            agent.insert(0, e.WorkerMessage(key, EngineExited(None, signal, *manifest)))
        if self.pick(2):  # its agent is told before the kernel has closed anything
            agent.insert(0, e.WorkerMessage(key, Heartbeat(0, "ready", 0, "X")))
            engine_first = False
        engine: list[e.Event] = [e.ConnectionLost(key, "engine", "EOF")]
        self.endings[key] = (engine + agent if engine_first else agent + engine) + [e.LauncherExited(key, None, signal)]

    # --- one step -------------------------------------------------------------------------------------------------

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        """Everything that could happen now."""
        found: list[tuple[str, Callable[[], None]]] = []
        for key, worker in self.workers.items():
            if worker.alive and worker.pending_hellos:
                found.append(("hello", lambda w=worker: self._hello(w)))
            if worker.out:
                found.append(("speak", lambda w=worker: self._speak(w)))
            if worker.alive and self.to_engine[key]:
                found.append(("hear", lambda k=key: self._hear(k)))
            if worker.alive and any(s.runnable for s in worker.sequences.values()):
                found.append(("step", lambda w=worker: self._step(w)))
            if worker.alive and worker.draining and not worker.sequences and not worker.prefills and not worker.out:
                found.append(("leave", lambda w=worker: self._leave(w)))
            if worker.alive and worker.prefills:
                found.append(("prefill", lambda w=worker: self._prefill(w)))
            if key in self.endings and not worker.out:
                found.append(("end", lambda k=key: self._end(k)))
        if self.handoffs:
            found.append(("handoff", self._handoff))
        return found

    def run(self, steps: int) -> None:
        """``steps`` random actions; time moves when nothing else can."""
        for _ in range(steps):
            actions = self.actions()
            if not actions:
                self.advance()
                continue
            actions[self.pick(len(actions))][1]()

    def settle(self, limit: int = 20000) -> None:
        """No new faults: run until every client's request ended."""
        for _ in range(limit):
            if all(client.ended or client.cancelled for client in self.clients.values()) and not self.actions():
                return
            actions = self.actions()
            if actions:
                actions[self.pick(len(actions))][1]()
            else:
                self.advance()
        open_requests = [r for r, client in self.clients.items() if not (client.ended or client.cancelled)]
        raise AssertionError(f"not settled: {open_requests}: {[self.core.story(r) for r in open_requests[:2]]}")

    def advance(self, until_ns: int | None = None) -> None:
        """Fire the next timer (or all up to a time), with heartbeats of living workers before it."""
        while self.timers:
            key = min(self.timers, key=lambda k: self.timers[k])
            at_ns = self.timers[key]
            if until_ns is not None and at_ns > until_ns:
                break
            del self.timers[key]
            self.now_ns = max(self.now_ns, at_ns)
            for worker in list(self.workers.values()):
                if worker.alive and worker.key not in self.silent and (worker.key, "agent") in self.accepted:
                    self.handle(e.WorkerMessage(worker.key, Heartbeat(0, "ready", 0, "S")))
            self.handle(e.TimerFired(key))
            if until_ns is None:
                return
        if until_ns is not None:
            self.now_ns = max(self.now_ns, until_ns)

    def _hello(self, worker: FakeWorker) -> None:
        process = worker.pending_hellos.pop(self.pick(len(worker.pending_hellos)))
        self.handle(e.WorkerConnected(1, worker.hello(process)))

    def _speak(self, worker: FakeWorker) -> None:
        event = e.WorkerMessage(worker.key, worker.out.pop(0))
        self.history.append(event)
        self.handle(event)

    def _hear(self, key: WorkerKey) -> None:
        worker = self.workers[key]
        worker.receive(self.to_engine[key].popleft())
        if self.crash_on is not None and any(self.crash_on(work) for work, _ in worker.works()):
            self.kill(key, 11)

    def _step(self, worker: FakeWorker) -> None:
        worker.step()

    def _prefill(self, worker: FakeWorker) -> None:
        keys = list(worker.prefills)
        key = keys[self.pick(len(keys))]
        order = worker.prefill(key)
        target = WorkerKey(order.target, order.target_incarnation)
        if self.workers[target].alive:
            self.handoffs.append((worker.key, target, key, order.transfer))
        else:
            worker.out.append(SequenceFailed(key.request, key.choice, key.attempt, "target lost", True))

    def _handoff(self) -> None:
        _, target, key, transfer = self.handoffs.pop(self.pick(len(self.handoffs)))
        self.workers[target].handoff(key, transfer)

    def _leave(self, worker: FakeWorker) -> None:
        """A drained worker ends by itself."""
        worker.out.append(Drained())
        worker.alive = False
        key = worker.key
        self.endings[key] = [
            e.ConnectionLost(key, "engine", "EOF"),
            e.WorkerMessage(key, EngineExited(status=0)),
            e.ConnectionLost(key, "agent", "EOF"),
            e.LauncherExited(key, status=0),
        ]

    def _end(self, key: WorkerKey) -> None:
        events = self.endings[key]
        event = events.pop(0)
        if not events:
            del self.endings[key]
        self.handle(event)

    def ready(self) -> "World":
        """Until all workers are ready."""
        for _ in range(100):
            hellos = [action for name, action in self.actions() if name == "hello"]
            if not hellos:
                return self
            hellos[0]()
        raise AssertionError("not ready")

    def alive(self) -> list[WorkerKey]:
        return [key for key, worker in self.workers.items() if worker.alive]
