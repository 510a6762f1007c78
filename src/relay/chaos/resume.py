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
    attempt: int  # the one that was harmed
    num_tokens: int = 0  # prompt and committed tokens that the next attempt began with
    position: int = -1  # of the first token of a later attempt
    resumed_s: float = 0.0


@dataclass(slots=True)
class Resumes:
    """Fed by the watch and by the clients. ``finished``: every wait that ended."""

    waiting: dict[ChoiceKey, Harm] = field(default_factory=dict)
    finished: list[Harm] = field(default_factory=list)
    detections: dict[str, list[float]] = field(default_factory=dict)  # seconds, by kind
    _by_seed: dict[tuple[int, int], ChoiceKey] = field(default_factory=dict)

    def harmed(self, kind: str, moment: str, placement: Placement, now_s: float) -> None:
        """``placement`` has lost its worker; one that waits already goes on waiting from its first fault."""
        if placement.key in self.waiting:
            return
        seed, choice = placement.seed, placement.key[1]
        self.waiting[placement.key] = Harm(kind, moment, now_s, seed, choice, placement.attempt)
        self._by_seed[(seed, choice)] = placement.key

    def ordered(self, order: Order) -> None:
        harm = self.waiting.get(order.key)
        if harm is not None and order.attempt > harm.attempt:
            harm.num_tokens = order.num_tokens

    def reported(self, placement: Placement, entry: TokenEntry) -> None:
        """A worker sent tokens: of a later attempt, their position is what the client waits for."""
        harm = self.waiting.get(placement.key)
        if harm is not None and placement.attempt > harm.attempt and harm.position < 0:
            harm.position = entry.position

    def arrived(self, seed: int, choice: int, count: int, now_s: float) -> None:
        """The client of ``seed`` has ``count`` tokens of ``choice`` now."""
        key = self._by_seed.get((seed, choice))
        harm = self.waiting.get(key) if key is not None else None
        if harm is not None and 0 <= harm.position < count:
            harm.resumed_s = now_s
            self._end(harm)

    def ended(self, seed: int) -> None:
        """The client has its end: whatever still waits had all its tokens before the fault."""
        for harm in [harm for harm in self.waiting.values() if harm.seed == seed]:
            self._end(harm)

    def _end(self, harm: Harm) -> None:
        del self.waiting[self._by_seed.pop((harm.seed, harm.choice))]
        if harm.resumed_s:
            self.finished.append(harm)
