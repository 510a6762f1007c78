"""Bugs in blame, in what is not known yet, and in leaving on purpose."""

from typing import Any

from relay.control.blame import Blame
from relay.control.leaving import Leaving
from relay.control.membership import Membership
from relay.control.router import Placement, Router
from relay.control.transitions import ChoiceState
from relay.control.workers import Worker
from relay.sim.planted.mutant import Mutant, nothing


def _crashes_alone(original: Any) -> Any:
    """Engines that hang are replaced, and nobody is blamed."""

    def accuse(blame: Blame, worker: Worker, rows: Any, alone: bool, how: str, now_ns: int) -> None:
        if not how.startswith("no progress"):
            original(blame, worker, rows, alone, how, now_ns)

    return accuse


def _word_kept_back(original: Any) -> Any:
    """Who has an engine killed for a hang does not tell why."""

    def fence(membership: Membership, worker: Worker, now_ns: int, hung: Any = None) -> None:
        original(membership, worker, now_ns)

    return fence


def _anywhere(original: Any) -> Any:
    """Each choice of a request goes where it is best for itself."""

    def together(router: Router, choice: Any, placement: Placement) -> Placement:
        return placement

    return together


def _ended_are_innocent(original: Any) -> Any:
    """A row of a choice that was stopped meanwhile blames nobody."""

    def accuse(blame: Blame, worker: Worker, rows: Any, alone: bool, how: str, now_ns: int) -> None:
        requests, ended = blame._state.requests, ChoiceState.ENDED
        rows = [row for row in rows if row.request in requests]
        rows = [row for row in rows if requests[row.request].choices[row.choice].state is not ended]
        original(blame, worker, rows, alone, how, now_ns)

    return accuse


def _away_at_once(original: Any) -> Any:
    """A worker that is ordered to leave is told so before its streams have gone."""

    def tell_when_empty(leaving: Leaving, worker: Worker) -> None:
        if not worker.refuses:
            worker.refuses = True
            leaving._tell(worker)

    return tell_when_empty


def _two_at_once(original: Any) -> Any:
    """The next worker of a rolling restart does not wait until the one before it is back."""

    def following(leaving: Leaving, worker: Worker, now_ns: int) -> bool:
        leaving.order(worker, now_ns, stay_out=False)
        return True

    return following


TABLE = (
    Mutant("hangs are never blamed", "I11", Blame, "accuse", _crashes_alone),
    Mutant("a hang is told to no other gateway", "I11", Membership, "_fence", _word_kept_back),
    Mutant("a loss not explained counts for nothing", "I11", Blame, "await_report", nothing),
    Mutant("choices of one request go anywhere", "I11", Router, "_together", _anywhere),
    Mutant("crashes of stopped choices count for nothing", "I11", Blame, "accuse", _ended_are_innocent),
    Mutant("a worker is sent away with its streams", "I17", Leaving, "_tell_when_empty", _away_at_once),
    Mutant("a rolling restart takes two at once", "I17", Leaving, "_next", _two_at_once),
)
