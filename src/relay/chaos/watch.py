"""What every worker is doing, read off the messages that pass through the proxy. Pure: messages in, moments out.

A *choice* here is (gateway's request number, choice index). The seed in its sampling parameters says which client request it is:
every request of a run has a seed of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from relay.protocol.messages import Accept, Message, Prefill, Reserve, Run, SequenceFailed, TokenEntry, Tokens, Work

ChoiceKey = tuple[int, int]


@dataclass(slots=True)
class Placement:
    """The latest attempt at one choice."""

    key: ChoiceKey
    seed: int
    num_prompt: int
    attempt: int
    holders: set[str]
    moment: str
    first_position: int  # tokens committed when this attempt was ordered
    tokens: int  # tokens reported so far, earlier attempts' included
    transfer: int = 0
    kv_frames: int = 0
    source: str = ""  # P, if it is not the worker that will decode


@dataclass(slots=True)
class Seen:
    """Something just happened to ``placement`` at ``worker``; it is told before the bytes that show it are passed on."""

    placement: Placement
    worker: str


@dataclass(slots=True)
class Order:
    """The gateway ordered attempt ``attempt`` of a choice."""

    key: ChoiceKey
    seed: int
    attempt: int
    num_tokens: int  # prompt and committed tokens


@dataclass(slots=True)
class Watch:
    """``on_seen`` and ``on_order`` are called synchronously from ``to_worker``, ``from_worker`` and ``kv_frame``."""

    on_seen: Callable[[Seen], None] = lambda seen: None
    on_order: Callable[[Order], None] = lambda order: None
    on_token: Callable[[Placement, TokenEntry], None] = lambda placement, entry: None
    placements: dict[ChoiceKey, Placement] = field(default_factory=dict)
    _by_transfer: dict[int, ChoiceKey] = field(default_factory=dict)

    def held_by(self, worker: str) -> list[Placement]:
        """Choices that lose something if ``worker`` ends now."""
        return [placement for placement in self.placements.values() if worker in placement.holders]

    def to_worker(self, worker: str, message: Message) -> None:
        """The gateway tells ``worker`` something."""
        match message:
            case Run(work):
                self._order(worker, work, "prefill", 0)
            case Reserve(work, transfer):
                self._order(worker, work, "reserved", transfer)
            case Prefill(work):
                placement = self.placements.get((work.request, work.choice))
                if placement is not None and placement.attempt == work.attempt:
                    placement.holders.add(worker)
                    placement.source = worker
                    self._move(placement, "prefill", worker)

    def from_worker(self, worker: str, message: Message) -> None:
        """``worker`` tells the gateway something."""
        match message:
            case Accept(request, choice, attempt):
                placement = self._current(request, choice, attempt)
                if placement is not None and placement.moment == "reserved":
                    self._move(placement, "accepted", worker)
            case Tokens(entries):
                for entry in entries:
                    self._tokens(worker, entry)
            case SequenceFailed(request, choice, attempt):
                placement = self._current(request, choice, attempt)
                if placement is not None:
                    placement.holders.clear()

    def kv_frame(self, transfer: int, *, handoff: bool) -> Placement | None:
        """A KV or HANDOFF frame of ``transfer`` is about to pass; the choice it belongs to, if it is still the latest attempt."""
        placement = self.placements.get(self._by_transfer.get(transfer, (0, 0)))
        if placement is None or placement.transfer != transfer:
            return None
        placement.kv_frames += not handoff
        if placement.moment in ("accepted", "prefill", "streaming"):
            self._move(placement, "handed_off" if handoff else "streaming", "")
        return placement

    def ended(self, seed: int) -> None:
        """The client has the end of its request: nothing of it is at stake any more."""
        for key in [key for key, placement in self.placements.items() if placement.seed == seed]:
            self._by_transfer.pop(self.placements.pop(key).transfer, None)

    def _order(self, worker: str, work: Work, moment: str, transfer: int) -> None:
        key = (work.request, work.choice)
        old = self.placements.get(key)
        if old is not None and old.attempt > work.attempt:
            return
        committed = len(work.token_ids) - work.num_prompt
        placement = Placement(
            key, work.params.seed, work.num_prompt, work.attempt, {worker}, moment, committed, committed, transfer
        )
        for other in self._same_choice(placement):
            del self.placements[other.key]  # another gateway took it over
        self.placements[key] = placement
        if transfer:
            self._by_transfer[transfer] = key
        self.on_order(Order(key, work.params.seed, work.attempt, len(work.token_ids)))
        self.on_seen(Seen(placement, worker))

    def _same_choice(self, placement: Placement) -> list[Placement]:
        return [
            other
            for other in self.placements.values()
            if other.seed == placement.seed and other.key[1] == placement.key[1]
        ]

    def _tokens(self, worker: str, entry: TokenEntry) -> None:
        placement = self._current(entry.request, entry.choice, entry.attempt)
        if placement is None:
            return
        placement.tokens = max(placement.tokens, entry.position + len(entry.token_ids))
        self.on_token(placement, entry)
        if entry.finish is not None:
            placement.holders = {worker}
            self._move(placement, "last_token", worker)
        elif worker != placement.source:
            placement.holders = {worker}
            self._move(placement, "decoding", worker)

    def _current(self, request: int, choice: int, attempt: int) -> Placement | None:
        placement = self.placements.get((request, choice))
        return placement if placement is not None and placement.attempt == attempt else None

    def _move(self, placement: Placement, moment: str, worker: str) -> None:
        placement.moment = moment
        self.on_seen(Seen(placement, worker))
