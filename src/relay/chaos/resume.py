"""How long the clients of harmed requests waited: fault → next token, and fault → the gateway's first reaction."""

from dataclasses import dataclass, field

from relay.chaos.watch import ChoiceKey, Order, Placement
from relay.protocol.messages import TokenEntry


@dataclass(slots=True)
class Harm:
    """One choice that lost its worker."""

    kind: str
    moment: str
    at_s: float
    seed: int
    choice: int
    request: int  # the gateway's number of it: another one means that another gateway took it over
    attempt: int  # the one that was harmed
    num_tokens: int = 0  # prompt and committed tokens that the next attempt began with
    position: int = -1  # of the first token of a later attempt
    resumed_s: float = 0.0

    def is_older_than(self, key: ChoiceKey, attempt: int) -> bool:
        return key[0] != self.request or attempt > self.attempt


@dataclass(slots=True)
class Resumes:
    """Fed by the watch and by the clients. ``waiting`` by (seed, choice); ``finished``: every wait that ended."""

    waiting: dict[tuple[int, int], Harm] = field(default_factory=dict)
    finished: list[Harm] = field(default_factory=list)

    def harmed(self, kind: str, moment: str, placement: Placement, now_s: float) -> None:
        """``placement`` has lost its worker; one that waits already goes on waiting from its first fault."""
        request, choice = placement.key
        harm = Harm(kind, moment, now_s, placement.seed, choice, request, placement.attempt)
        self.waiting.setdefault((placement.seed, choice), harm)

    def ordered(self, order: Order) -> None:
        harm = self.waiting.get((order.seed, order.key[1]))
        if harm is not None and harm.is_older_than(order.key, order.attempt):
            harm.num_tokens = order.num_tokens

    def reported(self, placement: Placement, entry: TokenEntry) -> None:
        """A worker sent tokens: of a later attempt, their position is what the client waits for."""
        harm = self.waiting.get((placement.seed, placement.key[1]))
        if harm is not None and harm.is_older_than(placement.key, placement.attempt) and harm.position < 0:
            harm.position = entry.position

    def arrived(self, seed: int, choice: int, count: int, now_s: float) -> None:
        """The client of ``seed`` has ``count`` tokens of ``choice`` now."""
        harm = self.waiting.get((seed, choice))
        if harm is not None and 0 <= harm.position < count:
            harm.resumed_s = now_s
            self._end(harm)

    def ended(self, seed: int) -> None:
        """The client has its end: whatever still waits had all its tokens before the fault."""
        for harm in [harm for harm in self.waiting.values() if harm.seed == seed]:
            self._end(harm)

    def _end(self, harm: Harm) -> None:
        del self.waiting[(harm.seed, harm.choice)]
        if harm.resumed_s:
            self.finished.append(harm)
