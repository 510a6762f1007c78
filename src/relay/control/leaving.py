"""Workers that leave on purpose: drained, their sequences moved to others at a token boundary, then restarted or kept out."""

from collections.abc import Callable, Iterable

from relay.control.commands import CancelTimer, CloseWorker, SendToAgent, SendToEngine, StopWorker
from relay.control.placement import Dispatcher
from relay.control.state import ClusterState
from relay.control.transitions import WorkerState, WorkerTrigger
from relay.control.workers import Worker
from relay.protocol.messages import Drain


class Leaving:
    """Drains and rolling restarts. Nothing that a worker holds is ended for it: what has nowhere to go finishes where it is.

    There are two kinds of drain. An engine that was told (SIGTERM) refuses what is new by itself, and hands back what it has not
    finished in its drain time-out. One that was ordered here is the gateway's alone until the worker is empty: streams that only
    this worker can continue exactly have all their time, and may even come back to it.
    """

    def __init__(self, state: ClusterState, dispatcher: Dispatcher, launch: Callable[[Worker, int], None]) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._launch = launch
        self._old_incarnation: int | None = None  # of the first in ``state.rollout``, once it was told

    # --- orders ---------------------------------------------------------------------------------------------------

    def order(self, worker: Worker, now_ns: int, *, stay_out: bool) -> str:
        """Drain ``worker``; it comes back unless it shall ``stay_out``. Returns why not, or an empty string. Idempotent."""
        if self._state.stopped:
            return "the server is shutting down"
        if stay_out and not any(other is not worker for other in self._state.ready_workers()):
            return f"no worker but {worker.id} is ready: nobody would serve"
        worker.stay_out = stay_out
        if worker.state is WorkerState.READY:
            self._begin(worker, now_ns)
        elif worker.state is WorkerState.STOPPED and not stay_out:
            if worker.gave_up:
                return f"{worker.id} cannot be started ({worker.last_cause})"
            self._launch(worker, now_ns)
        elif stay_out and worker.state in (WorkerState.STARTING, WorkerState.LOST):
            worker.move(WorkerTrigger.STOP, now_ns)
            self._state.commands += [CloseWorker(worker.key), StopWorker(worker.key, kill=True)]
            self._state.commands += [CancelTimer((kind, worker.id)) for kind in ("fence", "reap", "launch")]
        return ""

    def told(self, worker: Worker, now_ns: int, *, stay_out: bool) -> None:
        """Another gateway was ordered to drain ``worker``, and starts it again unless it shall ``stay_out``."""
        worker.stay_out = stay_out
        if worker.state is WorkerState.READY:
            self._begin(worker, now_ns)

    def roll(self, workers: Iterable[Worker]) -> str:
        """Restart ``workers`` one after another, each when all others serve. Returns why not, or an empty string."""
        state = self._state
        if state.rollout:
            return f"a rolling restart is under way, {len(state.rollout)} workers are left"
        state.rollout = [worker.id for worker in workers if worker.state is not WorkerState.STOPPED]
        state.rollout_problem = ""
        self._old_incarnation = None
        return ""

    # --- progress -------------------------------------------------------------------------------------------------

    def said(self, worker: Worker, now_ns: int) -> None:
        """The engine drains by itself: somebody sent it SIGTERM, or we told it."""
        worker.refuses = True
        if worker.state is WorkerState.READY:
            self._begin(worker, now_ns)

    def tick(self, now_ns: int) -> None:
        for worker in self._state.workers.values():
            if worker.state is WorkerState.DRAINING:
                self._dispatcher.relocate(worker, now_ns)
                self._tell_when_empty(worker)
        while self._state.rollout and self._next(self._state.workers[self._state.rollout[0]], now_ns):
            del self._state.rollout[0]
            self._old_incarnation = None

    def _begin(self, worker: Worker, now_ns: int) -> None:
        worker.move(WorkerTrigger.DRAIN, now_ns)
        if worker.refuses:
            self._tell(worker)
        self._dispatcher.relocate(worker, now_ns)
        self._tell_when_empty(worker)

    def _tell_when_empty(self, worker: Worker) -> None:
        """Send an ordered worker away once nothing needs it. The streams of the only one there is wait for its next life."""
        if worker.refuses:
            return
        others = [other for other in self._state.workers.values() if other is not worker]
        if any(other.state is not WorkerState.STOPPED for other in others):
            numerics = worker.numerics_id
            elsewhere = any(o.state is WorkerState.READY and o.numerics_id == numerics for o in others)
            if worker.live or (not elsewhere and any(choice.numerics_id == numerics for choice in self._state.queue)):
                return
        worker.refuses = True
        self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        self._state.commands += [SendToEngine(worker.key, Drain()), SendToAgent(worker.key, Drain())]

    def _next(self, worker: Worker, now_ns: int) -> bool:
        """Whether the first worker of the rolling restart is done; begins with it when it may."""
        state = self._state
        if worker.state is WorkerState.STOPPED:
            return True
        if self._old_incarnation is None:
            others = [other for other in state.workers.values() if other is not worker]
            if any(other.state not in (WorkerState.READY, WorkerState.STOPPED) for other in others):
                return False
            self._old_incarnation = worker.incarnation
            self.order(worker, now_ns, stay_out=False)
            return False
        if worker.failures >= state.config.restart.crash_loop_failures:
            state.rollout_problem = f"{worker.id} does not come back ({worker.last_cause}); the others were left alone"
            state.rollout = [worker.id]
            return True
        return worker.state is WorkerState.READY and worker.incarnation > self._old_incarnation
