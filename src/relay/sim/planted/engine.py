"""Bugs in the scheduler, the block pool and the prefix cache."""

from typing import Any

from relay.engine.block_pool import BlockPool
from relay.engine.kv_space import KvSpace
from relay.engine.prefix_cache import PrefixCache
from relay.engine.scheduler import Scheduler
from relay.sim.planted.mutant import Mutant


def _release_twice(original: Any) -> Any:
    def release(pool: BlockPool, blocks: Any, after_step: int = 0) -> None:
        listed = list(blocks)
        original(pool, listed, after_step)
        shared = [block for block in listed if pool.references(block)]
        original(pool, shared[:1], after_step)

    return release


def _no_quarantine(original: Any) -> Any:
    return lambda pool, blocks, after_step=0: original(pool, blocks, 0)


def _publish_early(original: Any) -> Any:
    """Blocks are named when they are planned, not when they are computed."""

    def publish(space: KvSpace, sequence: Any) -> None:
        computed = sequence.num_computed
        sequence.num_computed = max(computed, min(sequence.capacity, len(sequence.token_ids)))
        original(space, sequence)
        sequence.num_computed = computed

    return publish


def _whole_prompt_cached(original: Any) -> Any:
    """A reservation counts one block more as cached than it is."""

    def match(space: KvSpace, sequence: Any, limit: int) -> list[int]:
        found: list[int] = original(space, sequence, limit)
        return found + found[-1:] if found and (len(found) + 1) * space._block_size <= limit else found

    return match


def _activate_forgets(original: Any) -> Any:
    """D does not report the first token, so it is lost when P's report is."""

    def activate(scheduler: Scheduler, key: Any, first_token: Any) -> Any:
        first_token.token_id = (first_token.token_id + 1) % 8
        return original(scheduler, key, first_token)

    return activate


def _youngest_forgotten(original: Any) -> Any:
    """A preempted sequence is not queued again."""

    def preempt(scheduler: Scheduler, sequence: Any) -> None:
        original(scheduler, sequence)
        scheduler._roster.waiting.remove(sequence)

    return preempt


def _last_token_from_cache(original: Any) -> Any:
    """Salt and numerics id do not separate prefixes: only the tokens of a block name it."""

    def lookup(cache: Any, parent: bytes, unit_hash: bytes, token_ids: Any) -> int | None:
        for block, known in cache._blocks.items():
            if known.token_ids == token_ids:
                return int(block)
        return None

    return lookup


def _no_rollback(original: Any) -> Any:
    """After a step that raised, the rest goes on as if it had been computed."""

    def roll_back(scheduler: Scheduler, flight: Any, error: str, blamed: Any) -> Any:
        for row, sequence in zip(flight.rows, flight.sequences, strict=True):
            sequence.num_computed = max(sequence.num_computed, min(sequence.num_planned, row.start + row.count))
        return original(scheduler, flight, error, blamed)

    return roll_back


def _copies_too_much(original: Any) -> Any:
    """One token more of a partly equal block is taken over than is equal."""

    def copy_source(space: KvSpace, sequence: Any, position: int, limit: int) -> Any:
        found = original(space, sequence, position, limit)
        return (found[0], min(found[1] + 1, limit - position)) if found is not None else None

    return copy_source


def _never_evicted(original: Any) -> Any:
    """A block that is given away keeps its name."""
    return lambda cache, block: None


def _adopts_unheld(original: Any) -> Any:
    """A block that came meanwhile is used, and may be given to others nevertheless."""

    def adopt(space: KvSpace, sequence: Any, index: int, block: int, after_step: int) -> None:
        space.pool.release((sequence.blocks[index],), after_step)
        sequence.blocks[index] = block

    return adopt


TABLE = (
    Mutant("adopted blocks are not held", "I9", KvSpace, "adopt", _adopts_unheld),
    Mutant("blocks named by their tokens alone", "I1", PrefixCache, "lookup", _last_token_from_cache),
    Mutant("evicted blocks keep their names", "I1", PrefixCache, "forget", _never_evicted),
    Mutant("one token too many copied", "I1", KvSpace, "copy_source", _copies_too_much),
    Mutant("one block too many from the cache", "I1", KvSpace, "match", _whole_prompt_cached),
    Mutant("handed-off token replaced", "I1", Scheduler, "activate", _activate_forgets),
    Mutant("a failed step counts as computed", "I1", Scheduler, "_roll_back", _no_rollback),
    Mutant("preempted sequences are forgotten", "I5", Scheduler, "_preempt", _youngest_forgotten),
    Mutant("blocks return under a step in flight", "I7", BlockPool, "release", _no_quarantine),
    Mutant("blocks published before computed", "I9", KvSpace, "publish", _publish_early),
    Mutant("shared block released twice", "I9", BlockPool, "release", _release_twice),
)
