"""I10: what is bounded stays within its bound, and I5: what has a deadline ends by it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relay.config import SECOND
from relay.control.breaker import BreakerState
from relay.control.requests import Choice
from relay.sim.gateway import GatewayNode
from relay.sim.kernel import Violation

if TYPE_CHECKING:
    from relay.sim.world import World

TICKS = 4  # how many ticks late a deadline may be noticed
FREE_ATTEMPTS = 24  # of a choice without a new token; the most that 500 seeds needed was 9


class AttemptRate:
    """A choice without a new token is tried ever more seldom: from a handful of attempts on, its delays have grown to their bound.

    What workers were killed under and what failed is not counted: that has bounds of its own.
    """

    def __init__(self) -> None:
        self._since: dict[Choice, tuple[int, int, int]] = {}  # (tokens, attempts that count, when) at the newest token

    def audit(self, gateways: Iterable[GatewayNode], now_ns: int) -> None:
        since: dict[Choice, tuple[int, int, int]] = {}
        for gateway in gateways:
            most_s = gateway.core.state.config.retry.max_backoff_s
            for choice in [choice for request in gateway.core.state.requests.values() for choice in request.choices]:
                num_tokens = len(choice.committed)
                attempts = choice.num_attempts - choice.losses - choice.failures
                before = self._since.get(choice)
                if before is None or before[0] != num_tokens:
                    before = (num_tokens, attempts, now_ns)
                since[choice] = before
                grown, elapsed_s = attempts - before[1], (now_ns - before[2]) / SECOND
                if grown > FREE_ATTEMPTS + 2 * elapsed_s / most_s:  # two kinds of refusal, each with a delay
                    raise Violation("I10", f"{choice} had {grown} attempts in {elapsed_s:.3f} s, and no new token")
        self._since = since


def within_budget(node: GatewayNode) -> None:
    """Hedges compute no more than their share of what was asked for. After every event of the gateway: one comparison."""
    state = node.core.state
    counters, config = state.counters, state.config.hedge
    spent = counters["hedge_tokens"]
    if spent and spent * 1000 > config.budget_per_mille * (counters["tokens"] + counters["prompt_tokens"]):
        raise Violation("I10", f"hedges have computed {spent} tokens, more than {config.budget_per_mille} per mille")


def bounded(world: "World") -> None:
    """Everything with a bound that is not checked where it is touched."""
    for gateway in world.gateways.values():
        if gateway.alive:
            _deadlines(world, gateway)
            _breakers(world, gateway)
    for node in world.workers.values():
        if node.running is not None:
            for sender in node.running.transport.senders():
                window = sender.limits.window_bytes
                if sender.in_flight_bytes > window:
                    text = f"{sender.in_flight_bytes} bytes of a transfer are on their way, the window is {window}"
                    raise Violation("I10", f"{node.key.worker}: {text}")


def _deadlines(world: "World", gateway: GatewayNode) -> None:
    """No request outlives its own deadline."""
    state = gateway.core.state
    now_ns, slack_ns = world.kernel.now_ns, int(TICKS * state.config.tick_s * SECOND)
    if gateway.stopped or now_ns - gateway.awake_since_ns < slack_ns:
        return
    for request in state.requests.values():
        deadline_ns = request.submission.deadline_ns
        if deadline_ns is not None and now_ns > max(deadline_ns, request.submitted_ns) + slack_ns:
            raise Violation(
                "I5", f"request {request.id} lives {(now_ns - deadline_ns) / SECOND:.1f} s past its deadline"
            )


def _breakers(world: "World", gateway: GatewayNode) -> None:
    """An open breaker gives its worker or link another chance."""
    state = gateway.core.state
    now_ns, most_s = world.kernel.now_ns, state.config.breaker.max_open_s
    named = [*state.breakers.workers.items(), *state.breakers.links.items()]
    for name, breaker in named:
        since_ns = breaker.opened_ns
        if (
            since_ns is not None
            and now_ns - since_ns > int(most_s * SECOND)
            and breaker.at(now_ns) is BreakerState.OPEN
        ):
            raise Violation("I12", f"the breaker of {name} is open for {(now_ns - since_ns) / SECOND:.1f} s")
