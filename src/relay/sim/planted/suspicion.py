"""Bugs in hedges, disagreement, budgets and breakers."""

from typing import Any

from relay.control import stream
from relay.control.attempts import Attempt
from relay.control.breaker import Breaker, BreakerState
from relay.control.budget import TokenBucket
from relay.control.hedging import Hedger
from relay.control.placement import Dispatcher
from relay.control.router import Router
from relay.control.stream import TokenPath
from relay.sim.planted.mutant import Mutant, nothing


def _loser_runs_on(original: Any) -> Any:
    """Of two attempts, the one that is closed is not cancelled."""

    def close(dispatcher: Dispatcher, attempt: Attempt, now_ns: int, cause: str) -> None:
        kept = dispatcher._cancel
        if len(attempt.choice.attempts) > 1:
            dispatcher._cancel = nothing(kept)  # type: ignore[method-assign]
        original(dispatcher, attempt, now_ns, cause)
        dispatcher.__dict__.pop("_cancel", None)

    return close


def _no_difference(original: Any) -> Any:
    return lambda choice, entry: None


def _tokens_alone(original: Any) -> Any:
    """Logprobs are not compared."""

    def first_difference(choice: Any, entry: Any) -> Any:
        kept, entry.logprobs = entry.logprobs, None
        found = original(choice, entry)
        entry.logprobs = kept
        return found

    return first_difference


def _committed_decides(original: Any) -> Any:
    """Who disagrees with the client's tokens is wrong, whoever else agrees with him."""

    def disagree(path: TokenPath, attempt: Attempt, worker: Any, position: int, now_ns: int) -> None:
        path._state.counters["token_disagreements"] += 1
        path._dispatcher.reopen(attempt, now_ns, "disagreement")

    return disagree


def _free(original: Any) -> Any:
    """Hedges cost nothing."""
    return property(lambda bucket: 1 << 20)


def _hedge_where_it_is(original: Any) -> Any:
    """A hedge may use the worker that is doubted."""

    def choose_hedge(router: Router, attempt: Attempt, now_ns: int) -> Any:
        return router.choose(attempt.choice, now_ns)

    return choose_hedge


def _never_half_open(original: Any) -> Any:
    def at(breaker: Breaker, now_ns: int) -> BreakerState:
        return BreakerState.OPEN if breaker._opened_ns is not None else original(breaker, now_ns)

    return at


TABLE = (
    Mutant("the losing attempt is not cancelled", "I8", Dispatcher, "close", _loser_runs_on),
    Mutant("disagreement ignored", "I4", stream, "first_difference", _no_difference),
    Mutant("logprobs are not compared", "I4", stream, "first_difference", _tokens_alone),
    Mutant("disagreement silently resolved", "I4", TokenPath, "_disagree", _committed_decides),
    Mutant("hedge budget ignored", "I10", TokenBucket, "tokens", _free),
    Mutant("a hedge on the doubted worker", "I6", Router, "choose_hedge", _hedge_where_it_is),
    Mutant("no hedges", "detection", Hedger, "_hedge", nothing),
    Mutant("a breaker never half-opens", "I12", Breaker, "at", _never_half_open),
)
