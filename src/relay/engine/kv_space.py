"""The KV blocks of all sequences of one engine: block pool and prefix cache together.

Never gives a sequence its last token from the cache: the logits after it have to be computed.
"""

from collections.abc import Iterable

from relay.engine.block_pool import BlockPool, BlockState
from relay.engine.limits import SchedulerLimits
from relay.engine.prefix_cache import PrefixCache
from relay.engine.sequence import Sequence
from relay.protocol.block_hash import UNIT_TOKENS

MIN_COPY_SHARE = 8  # copy a part of a block when it saves computing at least 1/8 of the block's tokens


class KvSpace:
    """Gives blocks to sequences, shares equal prefixes, and knows what can be copied."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._block_size = limits.block_size
        self._units = limits.block_size // UNIT_TOKENS  # in a block
        self.cache = PrefixCache()
        self.pool = BlockPool(limits.num_blocks, self.cache.forget)
        self._tails: dict[bytes, Sequence] = {}  # hash before a partly filled block → a running sequence that has it

    def cached_block(self, sequence: Sequence, index: int) -> int | None:
        """The published block equal to block ``index`` of the sequence's tokens, which must be full."""
        start = index * self._block_size
        return self.cache.lookup(
            sequence.unit_hash(index * self._units - 1),
            sequence.unit_hash((index + 1) * self._units - 1),
            sequence.token_ids[start : start + self._block_size],
        )

    def match(self, sequence: Sequence, limit: int) -> list[int]:
        """Published blocks that hold the sequence's first tokens, at most ``limit`` of them."""
        blocks: list[int] = []
        for index in range(limit // self._block_size):
            block = self.cached_block(sequence, index)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def cost(self, matched: list[int], num_blocks: int) -> int:
        """By how much ``seat`` with these arguments lowers ``pool.available``."""
        state = self.pool.state
        return num_blocks - len(matched) + sum(state(block) is BlockState.CACHED for block in matched)

    def seat(self, sequence: Sequence, matched: list[int], num_blocks: int) -> None:
        """Give a sequence without blocks ``num_blocks``: the matched ones shared, the rest fresh. ``cost`` must be available."""
        for block in matched:
            self.pool.acquire(block)
        sequence.blocks = matched + [self.pool.allocate() for _ in range(num_blocks - len(matched))]
        sequence.capacity = num_blocks * self._block_size
        sequence.num_published = len(matched)

    def grow(self, sequence: Sequence) -> int:
        """One more block at the end."""
        block = self.pool.allocate()
        sequence.blocks.append(block)
        sequence.capacity += self._block_size
        return block

    def adopt(self, sequence: Sequence, index: int, block: int, after_step: int) -> None:
        """Replace the sequence's own block ``index``, not yet computed, by a published one."""
        self.pool.acquire(block)
        self.pool.release((sequence.blocks[index],), after_step)
        sequence.blocks[index] = block

    def own_tokens(self, sequence: Sequence, start: int, count: int) -> int:
        """How many of positions start..start+count-1 come before a published block, which must not be written.

        Less than ``count`` only where a rolled back sequence has adopted blocks ahead of what it has computed.
        """
        size = self._block_size
        for index in range(start // size, -(-(start + count) // size)):
            if sequence.blocks[index] in self.cache:
                return index * size - start
        return count

    def free(self, sequence: Sequence, after_step: int) -> None:
        """Take all blocks away, the end of the sequence to be evicted first."""
        if sequence.tail_key is not None:
            if self._tails.get(sequence.tail_key) is sequence:
                del self._tails[sequence.tail_key]
            sequence.tail_key = None
        self.pool.release(reversed(sequence.blocks), after_step)
        sequence.blocks = []
        sequence.capacity = sequence.num_published = 0

    def publish(self, sequence: Sequence) -> None:
        """Name the blocks that ``num_computed`` has completed since the last call."""
        size, units = self._block_size, self._units
        for index in range(sequence.num_published, sequence.num_computed // size):
            block = sequence.blocks[index]
            first = index * units
            hashes = tuple([sequence.unit_hash(unit) for unit in range(first, first + units)])
            token_ids = sequence.token_ids[index * size : (index + 1) * size]
            if block not in self.cache and self.cache.publish(block, sequence.unit_hash(first - 1), hashes, token_ids):
                self.pool.publish(block)
            sequence.num_published = index + 1

    def list_tail(self, sequence: Sequence) -> None:
        """The sequence's prompt is computed: its partly filled last block may be copied while it runs."""
        full = sequence.num_computed // self._block_size
        if sequence.num_computed % self._block_size:
            sequence.tail_key = sequence.unit_hash(full * self._units - 1)
            self._tails[sequence.tail_key] = sequence

    def copy_source(self, sequence: Sequence, position: int, limit: int) -> tuple[int, int] | None:
        """(block, n): a block whose first n tokens are those at ``position`` (a block's start), n ≤ limit - position.

        None if there is none, or too little to pay for the copy.
        """
        size = self._block_size
        index = position // size
        first = index * self._units
        parent = sequence.unit_hash(first - 1)
        wanted = sequence.token_ids[position : position + size]
        num_hashes = len(wanted) // UNIT_TOKENS
        hashes = [sequence.unit_hash(unit) for unit in range(first, first + num_hashes)]
        source, count = self.cache.lookup_start(parent, hashes, wanted[: num_hashes * UNIT_TOKENS]) or (-1, 0)
        other = self._tails.get(parent)
        if other is not None and other is not sequence:
            tokens = other.token_ids[position : min(position + size, other.num_computed)]
            common = 0
            for mine, its in zip(wanted, tokens, strict=False):
                if mine != its:
                    break
                common += 1
            if common > count:
                source, count = other.blocks[index], common
        count = min(count, limit - position)
        return (source, count) if count * MIN_COPY_SHARE >= size else None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert I8 and I9 over ``sequences``, all that there are."""
        holders: dict[int, int] = {}
        for sequence in sequences:
            assert sequence.capacity == len(sequence.blocks) * self._block_size
            assert sequence.num_published <= len(sequence.blocks)
            for block in sequence.blocks:
                holders[block] = holders.get(block, 0) + 1
            if sequence.tail_key is not None:
                assert sequence.blocks, "a sequence without blocks lists a tail"
        self.pool.check(holders)
        self.cache.check()
        for key, sequence in self._tails.items():
            assert sequence.tail_key == key, "a listed tail is not its sequence's"
            assert sequence.blocks, "a listed tail has no blocks"
