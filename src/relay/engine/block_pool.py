"""Reference-counted KV blocks: which are free, which are held, which are kept for the prefix cache.

Every block is in exactly one of four states, so free + cached + used = total (I9; quarantined blocks count as used):

    FREE ──allocate──▶ USED ──release──▶ QUARANTINED ──settle──▶ FREE | CACHED ──allocate (evicts)──▶ USED
                         ▲───────────────acquire────────┴────────────────┘ acquire

A released block is quarantined while a step is in flight that may still touch it: the block could otherwise be handed to
a transfer whose bytes that step would overwrite.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from enum import IntEnum


class BlockState(IntEnum):
    FREE = 0
    CACHED = 1  # no holder, but the prefix cache knows its content; evicted least recently used first
    USED = 2
    QUARANTINED = 3  # no holder, but a step in flight may touch it


_FREE, _USED = BlockState.FREE, BlockState.USED


class BlockPool:
    """``num_blocks`` blocks named 0..num_blocks-1. ``evicted(block)`` is called when a cached block loses its content."""

    def __init__(self, num_blocks: int, evicted: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._evicted = evicted
        self._references = [0] * num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._published = bytearray(num_blocks)
        self._held_until = [0] * num_blocks  # last step that may touch a quarantined block
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantine: deque[tuple[int, int]] = deque()  # (step, block); stale entries are skipped by state

    @property
    def available(self) -> int:
        """Blocks ``allocate`` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a holder, and quarantined ones."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def state(self, block: int) -> BlockState:
        return self._states[block]

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """A block of unspecified content with one reference. Raises IndexError if ``available`` is 0."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block = self._cached.popitem(last=False)[0]
            self._published[block] = 0
            self._evicted(block)
        else:
            raise IndexError("no block is available")
        self._states[block] = BlockState.USED
        self._references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more holder of a published or held block."""
        state = self._states[block]
        if state is BlockState.FREE:
            raise ValueError(f"block {block} is free and cannot be shared")
        if state is BlockState.CACHED:
            del self._cached[block]
        self._states[block] = BlockState.USED
        self._references[block] += 1

    def release(self, blocks: Iterable[int], after_step: int = 0) -> None:
        """Drop one reference of each block; the first ones become the first to be evicted.

        ``after_step`` is the newest step in flight (0: none): blocks without a holder return after ``settle(after_step)``.
        """
        for block in blocks:
            left = self._references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] = left
            if left:
                continue
            if after_step:
                self._states[block] = BlockState.QUARANTINED
                self._held_until[block] = after_step
                self._quarantine.append((after_step, block))
            else:
                self._return(block)

    def settle(self, step: int) -> None:
        """Step ``step`` and all before it have finished: the blocks that waited for them return."""
        quarantine = self._quarantine
        while quarantine and quarantine[0][0] <= step:
            block = quarantine.popleft()[1]
            if self._states[block] is BlockState.QUARANTINED and self._held_until[block] <= step:
                self._return(block)

    def publish(self, block: int) -> None:
        """The prefix cache knows this held block's content: keep it when its last holder leaves."""
        if self._states[block] is not BlockState.USED:
            raise ValueError(f"block {block} has no holder and cannot be published")
        self._published[block] = 1

    def _return(self, block: int) -> None:
        if self._published[block]:
            self._states[block] = BlockState.CACHED
            self._cached[block] = None
        else:
            self._states[block] = BlockState.FREE
            self._free.append(block)

    def check(self, holders: dict[int, int]) -> None:
        """Assert I8 (every held block has exactly the ``holders`` counted by the caller) and I9."""
        states, published = self._states, self._published
        counted = [0] * self.num_blocks
        for block, count in holders.items():
            counted[block] = count
        if self._references != counted:
            wrong = next(block for block, count in enumerate(counted) if self._references[block] != count)
            raise AssertionError(f"block {wrong}: {self._references[wrong]} references, {counted[wrong]} holders")
        assert [state is _USED for state in states] == [count > 0 for count in counted], (
            "used and referenced blocks differ"
        )
        free, cached = self._free, self._cached
        num_quarantined = states.count(BlockState.QUARANTINED)
        assert len(set(free)) == len(free) == states.count(_FREE), "free list and states differ"
        assert len(cached) == states.count(BlockState.CACHED), "cached list and states differ"
        wrong_free = [block for block in free if published[block] or states[block] is not _FREE]
        assert not wrong_free, f"the free list holds blocks {wrong_free}, which are published or not free"
        assert not [block for block in cached if not published[block]], "a cached block is not published"
        if num_quarantined:
            waiting = {block for _, block in self._quarantine}
            lost = [b for b, s in enumerate(states) if s is BlockState.QUARANTINED and b not in waiting]
            assert not lost, f"quarantined blocks {lost} are lost"
        used = states.count(_USED) + num_quarantined
        assert len(free) + len(cached) + used == self.num_blocks, "free + used + cached is not the total"
