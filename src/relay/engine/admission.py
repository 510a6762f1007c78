"""Whether one more sequence may take blocks: its present tokens and everybody's expected growth must fit."""

from relay.engine.kv_space import KvSpace
from relay.engine.limits import SchedulerLimits
from relay.engine.roster import Roster
from relay.engine.sequence import Sequence


def admit(sequence: Sequence, matched: list[int], roster: Roster, space: KvSpace, limits: SchedulerLimits) -> bool:
    """Give the sequence blocks for its present tokens, ``matched`` of them from the prefix cache; False if it has to wait.

    Each seated sequence keeps a claim on the blocks it is expected to need beyond those it has, so that one accepted is
    one that fits. A sequence alone is admitted without regard to growth: nothing else would make room for it.
    """
    length = len(sequence.token_ids)
    num_blocks = limits.blocks_for(length)
    target = limits.blocks_for(max(length, min(sequence.stop_at, length + limits.growth_tokens)))
    needed = space.cost(matched, num_blocks)
    others = roster.seated()
    if others:
        needed += target - num_blocks + sum([max(0, other.target_blocks - len(other.blocks)) for other in others])
    if needed > space.pool.available:
        return False
    space.seat(sequence, matched, num_blocks)
    sequence.target_blocks = target
    return True
