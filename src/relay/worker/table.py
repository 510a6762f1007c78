"""All that a worker holds, found by key, choice, transfer or slot."""

from collections.abc import Callable

from relay.engine.step import StepPlan
from relay.ids import SequenceKey
from relay.worker.held import Held
from relay.worker.status_page import ManifestRow

MAX_ENDED = 4096  # attempts that are over, remembered


class HeldTable:
    """At most one attempt of a choice is held at a time. ``by_key``: by the scheduler's key; ``attempt``: by the owner's name."""

    def __init__(self) -> None:
        self.by_key: dict[SequenceKey, Held] = {}
        self.by_transfer: dict[int, Held] = {}
        self.by_slot: dict[int, Held] = {}  # P's sequences with rows in steps
        self._attempts: dict[tuple[int, int], SequenceKey] = {}
        self._ended: dict[tuple[int, int], int] = {}  # (request, choice) → newest attempt that is over here

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, held: Held) -> None:
        key = held.key
        self.by_key[key] = held
        self._attempts[held.name.request, held.name.choice] = key
        if held.transfer is not None:
            self.by_transfer[held.transfer] = held

    def remove(self, held: Held) -> None:
        key = held.key
        del self.by_key[key]
        name = held.name
        del self._attempts[name.request, name.choice]
        self.is_now_over(name)
        self.end_transfer(held)
        if held.slot is not None and self.by_slot.get(held.slot) is held:
            del self.by_slot[held.slot]

    def rename(self, held: Held, name: SequenceKey, gateway: int) -> None:
        """``held`` has a new owner, which calls it ``name``. No other sequence of that choice may be held."""
        other = self._attempts.pop((held.name.request, held.name.choice))
        assert other == held.key
        held.name, held.gateway = name, gateway
        assert (name.request, name.choice) not in self._attempts
        self._attempts[name.request, name.choice] = held.key

    def end_transfer(self, held: Held) -> None:
        """The transfer is over; the sequence stays."""
        if held.transfer is not None:
            self.by_transfer.pop(held.transfer, None)
            held.transfer = None

    def attempt(self, request: int, choice: int) -> Held | None:
        """The attempt held of a choice."""
        key = self._attempts.get((request, choice))
        return None if key is None else self.by_key[key]

    def is_now_over(self, name: SequenceKey) -> None:
        """``name`` was answered for good: it ended, was refused, or never had to begin."""
        newest = max(name.attempt, self._ended.pop((name.request, name.choice), 0))
        self._ended[name.request, name.choice] = newest
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def is_old(self, key: SequenceKey) -> bool:
        """``key`` or a later attempt is held, or was answered for good not long ago: an order for it is old, or comes again."""
        held = self.attempt(key.request, key.choice)
        newest = held.name.attempt if held is not None else 0
        return max(newest, self._ended.get((key.request, key.choice), 0)) >= key.attempt

    def manifest(self, plan: StepPlan, key_of_slot: Callable[[int], SequenceKey]) -> list[ManifestRow]:
        """Whose rows ``plan`` holds. All of them are held: what has ended is not planned."""
        by_key = self.by_key
        keys = [key_of_slot(row.slot) for row in plan.rows]
        return [ManifestRow(*by_key[key].name, row.start + row.count) for key, row in zip(keys, plan.rows, strict=True)]

    def check(self) -> None:
        """Assert that the indexes agree."""
        assert len(self._attempts) == len(self.by_key)
        for held in self.by_key.values():
            assert self.attempt(held.name.request, held.name.choice) is held, f"{held.name} is not found by its name"
        for held in [*self.by_transfer.values(), *self.by_slot.values()]:
            assert self.by_key.get(held.key) is held, f"{held.key} is indexed and not held"
