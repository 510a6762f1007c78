"""Slots: the numbers by which plans name running sequences."""

from collections import deque

from relay.ids import SequenceKey


class Slots:
    """``count`` slots. A slot is not given again before the last step in flight when it was given back has finished,

    so ``key`` answers for every row of every step in flight.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._keys: list[SequenceKey | None] = [None] * count
        self._waiting: deque[tuple[int, int]] = deque()  # (step, slot)
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, key: SequenceKey) -> int:
        """A free slot. Raises IndexError if there is none."""
        slot = self._free.pop()
        self._keys[slot] = key
        return slot

    def give_back(self, slot: int, after_step: int) -> None:
        """The slot's sequence has left; steps up to ``after_step`` (0: none) may still hold a row of it."""
        self._released.append(slot)
        if after_step:
            self._waiting.append((after_step, slot))
        else:
            self._free.append(slot)

    def settle(self, step: int) -> None:
        while self._waiting and self._waiting[0][0] <= step:
            self._free.append(self._waiting.popleft()[1])

    def take_released(self) -> list[int]:
        """Slots given back since the last call, for the next plan."""
        released, self._released = self._released, []
        return released

    def key(self, slot: int) -> SequenceKey:
        """The sequence that has, or last had, ``slot``. Raises KeyError if none ever had."""
        key = self._keys[slot]
        if key is None:
            raise KeyError(f"slot {slot} was never taken")
        return key

    def check(self, taken: list[int]) -> None:
        """Assert that ``taken``, the free and the waiting slots are all slots, once each."""
        every = sorted(taken + self._free + [slot for _, slot in self._waiting])
        assert every == list(range(len(self._keys))), f"slots are lost or doubled: {every}"
