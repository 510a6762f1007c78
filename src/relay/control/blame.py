"""Who may have killed an engine: what speaks against a request, and what is done about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relay.control.contract import RequestFailure
from relay.control.placement import Dispatcher
from relay.control.requests import Choice, Request
from relay.control.state import ClusterState
from relay.control.transitions import ChoiceState
from relay.errors import WeightsLostError
from relay.protocol.messages import GATEWAY_LOST_STATUS, ComputedRow, EngineExited, Heartbeat

if TYPE_CHECKING:
    from relay.control.workers import Worker

CRASH_SIGNALS = frozenset({4, 6, 7, 8, 11})  # ILL, ABRT, BUS, FPE, SEGV: the engine did it to itself
STEPS_IN_FLIGHT = 2  # of an engine, at most
IDLE_PHASES = ("starting", "loading", "ready")  # no step is in flight
NO_CRASH_STATUSES = frozenset({None, 0, GATEWAY_LOST_STATUS, WeightsLostError.exit_code})


def exit_text(message: EngineExited) -> str:
    if message.hung_ms:
        return f"no progress in a step for {message.hung_ms} ms"
    return "engine exited with " + (
        f"signal {message.signal}" if message.signal is not None else f"status {message.status}"
    )


def crashed(message: EngineExited) -> bool:
    """The engine ended by its own fault, and not because somebody killed or stopped it for no fault of its own."""
    if message.hung_ms:
        return True
    if message.signal is not None:
        return message.signal in CRASH_SIGNALS
    return message.status not in NO_CRASH_STATUSES


def _coming_there(request: Request, row: ComputedRow) -> list[Choice]:
    """The choices of ``request`` that will show whether ``row`` was what its engine fell to.

    One that was stopped there cannot: the others may come to the same place.
    """
    choice = request.choices[row.choice] if 0 <= row.choice < len(request.choices) else None
    if choice is None or _is_past(choice, row.end):
        return []
    if choice.state is not ChoiceState.ENDED:
        return [choice]
    return [each for each in request.choices if each.state is not ChoiceState.ENDED and not _is_past(each, row.end)]


def _is_past(choice: Choice, end: int) -> bool:
    """An attempt has come past that place, with a token to show for it: it was not this."""
    return choice.start > 0 and choice.num_tokens > end


class Blame:
    """Counts crashes and hangs against the requests whose rows the engine was computing, and ends who is certainly guilty."""

    def __init__(self, state: ClusterState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    def accuse(self, worker: Worker, rows: Iterable[ComputedRow], alone: bool, how: str, now_ns: int) -> None:
        """The engine of ``worker`` failed (``how``) while it computed ``rows``. To be called before anything is reopened."""
        if worker.blamed:
            return
        worker.blamed = True
        by_request: dict[int, list[ComputedRow]] = {}
        for row in rows:
            by_request.setdefault(row.request, []).append(row)
        for number, named in by_request.items():
            request = self._state.requests.get(number)
            if request is not None:
                self._count(request, worker, named, alone, how, now_ns)

    def _count(
        self, request: Request, worker: Worker, rows: list[ComputedRow], alone: bool, how: str, now_ns: int
    ) -> None:
        max_blames = self._state.config.retry.max_blames
        suspicion = request.suspicion
        blamed = [(choice, row.end) for row in rows for choice in _coming_there(request, row)]
        for choice, end in blamed:
            choice.troubled = True
            suspicion.ends[choice.index] = max(suspicion.ends.get(choice.index, 0), end)
            self._state.story.tell(now_ns, request.id, choice.index, f"blamed: {worker.id} {how}")
        if not blamed:
            return
        self._state.counters["blames"] += 1
        # Beside others it never comes to the last one: that would be a guess.
        suspicion.blames = min(suspicion.blames + 1, max_blames if alone else max_blames - 1)
        if suspicion.blames >= max_blames:
            text = f"{max_blames} engines crashed or hung while computing this request (the last, alone: {how})"
            self._dispatcher.fail(request, RequestFailure(500, "quarantined", text), now_ns)

    # --- what nobody has explained yet ------------------------------------------------------------------------------

    def heard(self, worker: Worker, beat: Heartbeat) -> None:
        """The engine of ``worker`` lives: what that says about steps that may hang."""
        if beat.manifest or worker.long_step:
            self.long_step(worker, beat.manifest)
        for left, over in ((worker.watched, worker.unwatch), (worker.lingering, worker.unlinger)):
            for request, step in list(left.items()):
                if step is None:
                    left[request] = beat.step
                if beat.phase in IDLE_PHASES or (step is not None and beat.step >= step + STEPS_IN_FLIGHT):
                    over(request)
                    self._state.changed = True

    def long_step(self, worker: Worker, rows: Iterable[ComputedRow]) -> None:
        """The step of ``worker`` with ``rows`` takes long: it may hang, which counts as a loss until it ends.

        An attempt may end before that, because its KV does not come; the next must not hang engine after engine meanwhile.
        """
        for request in worker.long_step:
            request.suspicion.unexplained -= 1
            self._state.changed = True
        requests = self._state.requests
        worker.long_step = list({requests[row.request]: None for row in rows if row.request in requests})
        for request in worker.long_step:
            request.suspicion.unexplained += 1
            if request in worker.lingering:
                worker.unlinger(request)  # it counts for more now

    def await_report(self, worker: Worker) -> None:
        """``worker`` was lost and its agent or its launcher may still say why: until then that counts against all it had,
        and all of which a step may have been left there.
        """
        had = [attempt.choice.request for attempt in worker.live]
        worker.unexplained = list(dict.fromkeys([*had, *worker.long_step, *worker.watched, *worker.lingering]))
        for request in worker.unexplained:
            request.suspicion.unexplained += 1

    def rejoined(self, worker: Worker) -> None:
        """The engine of ``worker`` was only out of sight: a step of what it had may run, or hang, there still."""
        for request in worker.unexplained:
            worker.watch(request)
        self.explained(worker)

    def explained(self, worker: Worker) -> None:
        """Why ``worker`` was lost is known, or will not be known any more."""
        if worker.unexplained:
            self._state.changed = True
        for request in worker.unexplained:
            request.suspicion.unexplained -= 1
        worker.unexplained = []
