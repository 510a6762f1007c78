"""The gateway as a pure state machine: ``handle(event, now_ns) -> commands``.

No clock, socket, randomness or environment: the same object runs under asyncio (``shell.py``), under tests and under a simulator.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from relay.config import SECOND
from relay.control import admission, report
from relay.control.commands import Command, Ended, LeaveRefused, Refuse, SetTimer
from relay.control.contract import ModelInfo, RequestFailure
from relay.control.detector import Detector
from relay.control.events import (
    ChoiceFinished,
    ConnectionLost,
    DrainRequested,
    Event,
    LauncherExited,
    LeaveOrdered,
    RequestCancelled,
    RequestSubmitted,
    Started,
    StopRequested,
    TimerFired,
    WorkerConnected,
    WorkerMessage,
    WorkerStarted,
)
from relay.control.hedging import Hedger
from relay.control.membership import Membership
from relay.control.parking import Parking
from relay.control.placement import Dispatcher
from relay.control.requests import Choice, Request
from relay.control.router import Router
from relay.control.state import LIVE, ClusterState
from relay.control.stream import TokenPath, undecided
from relay.control.transitions import ChoiceState, WorkerState
from relay.control.workers import Worker
from relay.control_config import ControlConfig
from relay.protocol.messages import (
    HANDED_BACK,
    Accept,
    CacheChanged,
    Drained,
    EngineExited,
    Heartbeat,
    Load,
    Orphans,
    Role,
    SequenceFailed,
    Tokens,
)
from relay.protocol.messages import (
    Refuse as EngineRefuse,
)

TICK = ("tick", "")


class GatewayCore:
    """Requests, workers and everything that may happen to them.

    ``slots`` are the workers to keep alive: (worker id, role). Events of unknown or fenced origin change nothing. One event costs
    time in proportion to what it carries, never to the number of requests, except ticks and losses of workers.
    """

    def __init__(self, config: ControlConfig, model: ModelInfo, slots: Sequence[tuple[str, Role]]) -> None:
        state = ClusterState(config, model, slots)
        self.state = state
        self._parking = Parking(state)
        router = Router(state, self._parking)
        self._dispatcher = Dispatcher(state, router, self._parking)
        self._membership = Membership(state, self._dispatcher)
        self._tokens = TokenPath(state, self._dispatcher)
        self._detector = Detector(state, self._membership, self._dispatcher)
        self._hedger = Hedger(state, router, self._dispatcher)
        self._tick_ns = int(config.tick_s * SECOND)
        self._events: dict[type, Callable[[Any, int], None]] = {
            WorkerMessage: self._message,
            RequestSubmitted: self._submitted,
            RequestCancelled: self._cancelled,
            ChoiceFinished: self._choice_finished,
            WorkerConnected: self._membership.connected,
            ConnectionLost: self._membership.connection_lost,
            WorkerStarted: self._membership.started,
            LauncherExited: self._membership.launcher_exited,
            TimerFired: self._timer,
            Started: self._started,
            DrainRequested: self._drain,
            StopRequested: self._stop,
            LeaveOrdered: self._leave,
        }
        self._engine: dict[type, Callable[[Worker, Any, int], None]] = {
            Tokens: self._tokens.tokens,
            Accept: self._dispatcher.accepted,
            EngineRefuse: self._refused,
            SequenceFailed: self._sequence_failed,
            Load: self._load,
            CacheChanged: self._cache_changed,
            Orphans: self._orphans,
            Drained: self._drained,
            Heartbeat: self._membership.heartbeat,
        }

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Apply one event; returns the commands to carry out, in order."""
        self._events[type(event)](event, now_ns)
        state = self.state
        if state.changed and len(state.queue):
            self._dispatcher.pump(now_ns)
        commands = state.commands
        if commands:
            state.commands = []
        return commands

    # --- views ----------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """A request sent now would be served."""
        return bool(self.state.ready_workers()) and not self.state.draining and not self.state.stopped

    def health(self, now_ns: int) -> tuple[bool, str]:
        return report.health(self.state, now_ns)

    def status(self, now_ns: int) -> dict[str, object]:
        return report.status(self.state, now_ns)

    def metrics(self, now_ns: int) -> list[tuple[str, dict[str, str], float]]:
        return report.metrics(self.state, now_ns)

    def story(self, request: int) -> list[str]:
        """The last decisions about one request, oldest first."""
        return self.state.story.of(request)

    # --- requests -------------------------------------------------------------------------------------------------

    def _submitted(self, event: RequestSubmitted, now_ns: int) -> None:
        state = self.state
        failure = admission.refusal(state, event.submission)
        if failure is not None:
            state.counters[f"rejected_{failure.code}"] += 1
            state.commands.append(Refuse(event.request, failure))
            return
        request = Request(event.request, event.submission, now_ns)
        state.requests[request.id] = request
        state.counters["requests"] += 1
        state.counters["prompt_tokens"] += len(event.submission.token_ids) * event.submission.n
        if state.config.shared_workers and event.submission.returns:
            wait_ns = int(state.config.adopt_wait_s * SECOND)
            for choice in request.choices:
                choice.not_before_ns = now_ns + wait_ns
            self._orphans_known(request.choices)
        self._dispatcher.submit(request)

    def _cancelled(self, event: RequestCancelled, now_ns: int) -> None:
        request = self.state.requests.get(event.request)
        if request is not None:
            self._dispatcher.fail(request, None, now_ns)
            self.state.commands.append(Ended(request.id))

    def _choice_finished(self, event: ChoiceFinished, now_ns: int) -> None:
        request = self.state.requests.get(event.request)
        if request is None or not 0 <= event.choice < len(request.choices):
            return
        choice = request.choices[event.choice]
        if choice.state is not ChoiceState.ENDED:
            self._dispatcher.stop(choice, now_ns, "stop string")

    # --- messages -------------------------------------------------------------------------------------------------

    def _message(self, event: WorkerMessage, now_ns: int) -> None:
        state = self.state
        message = event.message
        if type(message) is EngineExited:
            fenced = state.workers.get(event.worker.worker)
            if fenced is not None and fenced.incarnation == event.worker.incarnation:
                self._membership.engine_exited(fenced, message, now_ns)
            return
        worker = state.current(event.worker)
        handler = self._engine.get(type(message))
        if worker is None or handler is None:
            state.counters["messages_dropped"] += 1
            return
        worker.heard_ns = now_ns  # an engine that speaks is as alive as an agent that beats
        handler(worker, message, now_ns)

    def _refused(self, worker: Worker, message: EngineRefuse, now_ns: int) -> None:
        self._dispatcher.refused(worker, message, now_ns)
        if message.reason == "draining":
            self._membership.leaving.said(worker, now_ns)

    def _sequence_failed(self, worker: Worker, message: SequenceFailed, now_ns: int) -> None:
        if message.reason == HANDED_BACK:  # perhaps before a heartbeat tells of the drain
            self._membership.leaving.said(worker, now_ns)
        request = self.state.requests.get(message.request)
        if request is not None and 0 <= message.choice < len(request.choices):
            self._parking.gone(request.choices[message.choice], worker, message.attempt)
        self._tokens.failed(worker, message, now_ns)

    def _load(self, worker: Worker, message: Load, now_ns: int) -> None:
        before, worker.load = worker.load, message
        # A report that tells of the refusal itself, or of work of another gateway, is no news of room.
        if worker.full and (before is None or _has_less(message, before)):
            worker.has_news()
            self.state.changed = True

    def _cache_changed(self, worker: Worker, message: CacheChanged, now_ns: int) -> None:
        worker.cache_changed(message)
        self.state.changed = True

    def _orphans(self, worker: Worker, message: Orphans, now_ns: int) -> None:
        worker.orphans = dict.fromkeys(message.keys)
        self.state.changed = True
        if worker.orphans:
            self._orphans_known(self.state.queue)

    def _orphans_known(self, choices: Iterable[Choice]) -> None:
        """Those of ``choices`` that some worker computes already need not wait for that news."""
        held = [worker.orphans for worker in self.state.workers.values()]
        for choice in choices:
            key = (choice.request.submission.resume_key, choice.index)
            if any(key in orphans for orphans in held):
                choice.not_before_ns = 0

    def _drained(self, worker: Worker, message: Drained, now_ns: int) -> None:
        self._membership.leaving.said(worker, now_ns)

    # --- time -----------------------------------------------------------------------------------------------------

    def _started(self, event: Started, now_ns: int) -> None:
        self._detector.started(now_ns)
        for worker in self.state.workers.values():
            # Else an earlier life or another gateway has started it, or it is not wanted.
            if worker.state is WorkerState.STOPPED and not worker.stay_out:
                self._membership.launch(worker, now_ns)
        self.state.commands.append(SetTimer(TICK, now_ns + self._tick_ns))

    def _timer(self, event: TimerFired, now_ns: int) -> None:
        if event.key != TICK:
            kind, worker_id = event.key
            self._membership.timer(kind, self.state.workers[worker_id], now_ns)
            return
        if self.state.stopped:
            return
        self._membership.leaving.tick(now_ns)  # first: what leaves is given nothing by what follows
        self._detector.tick(now_ns)
        self._hedger.tick(now_ns)
        self._deadlines(now_ns)
        self._membership.tick(now_ns)
        for worker in self.state.workers.values():
            worker.pass_time(now_ns)
            worker.stop_expecting_old(now_ns)
        self.state.changed = True
        self.state.commands.append(SetTimer(TICK, now_ns + self._tick_ns))

    def _deadlines(self, now_ns: int) -> None:
        """Requests past their own deadline, and those that waited too long for any worker at all."""
        state = self.state
        admission_config = state.config.admission
        # One that drains serves what it has, and is bounded by its own time-out.
        if any(worker.state in LIVE for worker in state.workers.values()):
            state.no_worker_since_ns = None
        elif state.no_worker_since_ns is None:
            state.no_worker_since_ns = now_ns
        patience_ns = int(admission_config.no_worker_deadline_s * SECOND)
        since = state.no_worker_since_ns
        for request in list(state.requests.values()):
            deadline_ns = request.submission.deadline_ns
            if deadline_ns is not None and now_ns >= deadline_ns:
                text = "the request's deadline passed"
                self._dispatcher.fail(request, RequestFailure(504, "deadline_exceeded", text), now_ns)
            elif since is not None and now_ns - max(since, request.submitted_ns) >= patience_ns:
                text = f"no worker became ready within {admission_config.no_worker_deadline_s:g} s"
                failure = RequestFailure(503, "no_workers", text, admission_config.retry_after_s)
                self._dispatcher.fail(request, failure, now_ns)
            elif self._numerics_gone(request):
                text = "no worker computes with the numerics this stream began with"
                self._dispatcher.fail(request, RequestFailure(503, "numerics_changed", text), now_ns)

            else:
                alone = next((choice for choice in request.choices if self._nobody_decides(choice)), None)
                if alone is not None:
                    self._dispatcher.fail(request, undecided(alone), now_ns)

    def _nobody_decides(self, choice: Choice) -> bool:
        """Workers disagreed about ``choice``, and there is no other one that could say who is right."""
        if not choice.distrusted or choice.state is not ChoiceState.WAITING:
            return False
        return not any(
            self.state.coming(worker) or (worker.state in LIVE and worker.numerics_id == choice.numerics_id)
            for worker in self.state.workers.values()
            if worker.id not in choice.distrusted
        )

    def _numerics_gone(self, request: Request) -> bool:
        """Every worker is ready with other numerics than a waiting choice began with: it can never be continued exactly."""
        pinned = {choice.numerics_id for choice in request.choices if choice.state is ChoiceState.WAITING} - {None}
        if not pinned:
            return False
        workers = self.state.workers.values()
        staying = [worker for worker in workers if worker.state is not WorkerState.STOPPED]
        return bool(staying) and all(
            worker.state is WorkerState.READY and worker.numerics_id not in pinned for worker in staying
        )

    def _drain(self, event: DrainRequested, now_ns: int) -> None:
        self.state.draining = True
        self._dispatcher.check_quiesced()

    def _leave(self, event: LeaveOrdered, now_ns: int) -> None:
        """Refused as a whole, or begun with all of them."""
        state, leaving = self.state, self._membership.leaving
        unknown = [worker for worker in event.workers if worker not in state.workers]
        problem = f"there is no worker {unknown[0]!r}" if unknown else ""
        workers = [state.workers[worker] for worker in event.workers or state.workers] if not problem else []
        if event.rolling and not problem:
            problem = leaving.roll(workers)
        elif not problem:
            for worker in workers:
                if event.told:
                    leaving.told(worker, now_ns, stay_out=event.stay_out)
                else:
                    problem = problem or leaving.order(worker, now_ns, stay_out=event.stay_out)
        if problem:
            state.commands.append(LeaveRefused(problem))

    def _stop(self, event: StopRequested, now_ns: int) -> None:
        state = self.state
        state.draining = state.stopped = True
        for request in list(state.requests.values()):
            failure = RequestFailure(
                503, "shutting_down", "the server is shutting down", state.config.admission.retry_after_s
            )
            self._dispatcher.fail(request, failure, now_ns)
        self._membership.stop_all(now_ns)


def _has_less(load: Load, before: Load) -> bool:
    """Whether something has left the engine between two reports."""
    return load.kv_used < before.kv_used or load.running < before.running or load.waiting < before.waiting
