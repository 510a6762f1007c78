"""The failure detector: silence, start-up deadlines and answers that never come, with doubt about the gateway's own stalls."""

from relay.config import MILLISECOND, SECOND
from relay.control.membership import Membership
from relay.control.placement import Dispatcher
from relay.control.state import LIVE, ClusterState
from relay.control.transitions import AttemptState, WorkerState
from relay.control.workers import Worker


class Detector:
    """Looks at everything once a tick. Ends of processes and connections are events and do not wait for it."""

    def __init__(self, state: ClusterState, membership: Membership, dispatcher: Dispatcher) -> None:
        self._state = state
        self._membership = membership
        self._dispatcher = dispatcher
        self._last_tick_ns = 0  # or the start, before the first tick

    def started(self, now_ns: int) -> None:
        """Ticks begin; a first one that is late is judged like any other."""
        self._last_tick_ns = now_ns

    def tick(self, now_ns: int) -> None:
        self._forgive_own_stall(now_ns)
        self._silence(now_ns)
        self._answers(now_ns)

    def _forgive_own_stall(self, now_ns: int) -> None:
        """A late tick means that we slept: what was unheard in that time says nothing about others."""
        config = self._state.config
        last, self._last_tick_ns = self._last_tick_ns, now_ns
        late_ns = now_ns - last - int(config.tick_s * SECOND)
        if late_ns > int(config.detector.own_stall_s * SECOND):
            self._state.counters["own_stalls"] += 1
        if (
            late_ns > int(config.tick_s * SECOND) // 2
        ):  # also what is too short to be worth counting may be just too much
            if self._state.no_worker_since_ns is not None:
                self._state.no_worker_since_ns += late_ns
            for worker in self._state.workers.values():
                worker.heard_ns += late_ns
                worker.progress_ns += late_ns
                if worker.state is WorkerState.STARTING:
                    worker.changed_ns += late_ns
                if worker.frozen_since_ns:
                    worker.frozen_since_ns += late_ns
            for request in self._state.requests.values():
                for choice in request.choices:
                    for attempt in choice.attempts:
                        attempt.changed_ns += late_ns

    def _silence(self, now_ns: int) -> None:
        detector = self._state.config.detector
        beating = [worker for worker in self._state.workers.values() if worker.state in LIVE]
        dead_ns = int(detector.dead_after_s * SECOND)
        suspect_ns = int(detector.suspect_after_s * SECOND)
        quiet = [worker for worker in beating if now_ns - worker.heard_ns >= suspect_ns]
        # Half of several peers silent at once: more likely our network or machine than all of them. Wait once more. Those count
        # that are merely suspect: the first of them to be overdue must not pay for having been heard a moment earlier.
        doubtful = len(quiet) > 1 and 2 * len(quiet) >= len(beating)
        for worker in beating:
            silent_ns = now_ns - worker.heard_ns
            worker.suspect = silent_ns >= suspect_ns
            worker.slow = self._is_slow(worker)
            if silent_ns >= (2 * dead_ns if doubtful else dead_ns):
                self._membership.lose(worker, f"silent for {silent_ns / SECOND:.1f} s", now_ns, fence=True)
        for worker in self._state.workers.values():
            if worker.state is WorkerState.STARTING and now_ns - worker.changed_ns >= int(
                detector.start_deadline_s * SECOND
            ):
                self._membership.lose(
                    worker, f"not ready {detector.start_deadline_s:g} s after its start", now_ns, fence=True
                )

    def _is_slow(self, worker: Worker) -> bool:
        """Its present step is far older than its steps usually get, and not yet old enough for a hang."""
        beat, hedge = worker.beat, self._state.config.hedge
        if beat is None or beat.phase != "stepping":
            return False
        age_ns = beat.phase_age_ms * MILLISECOND
        return age_ns >= max(int(hedge.slow_step_s * SECOND), hedge.slow_factor * worker.step_ns)

    def _answers(self, now_ns: int) -> None:
        detector = self._state.config.detector
        answer_ns = int(detector.answer_deadline_s * SECOND)
        handoff_ns = int(detector.handoff_deadline_s * SECOND)
        late = [
            attempt
            for request in self._state.requests.values()
            for choice in request.choices
            for attempt in choice.attempts
            if (attempt.state is AttemptState.RESERVING and now_ns - attempt.changed_ns >= answer_ns)
            or (attempt.state is AttemptState.HANDOFF and now_ns - attempt.changed_ns >= handoff_ns)
        ]
        for attempt in late:
            if attempt.state in (AttemptState.RESERVING, AttemptState.HANDOFF):
                if attempt.state is AttemptState.HANDOFF:
                    self._dispatcher.transfer_failed(attempt, now_ns)
                else:
                    self._state.breakers.workers[attempt.decode.id].failed(now_ns)
                self._dispatcher.reopen(attempt, now_ns, f"no answer in state {attempt.state.value}")
