"""Which tokens and heads of one layer have come; pure.

Runs of tokens that have the same heads, as frames give them: a layer has a handful, however long the prompt is, so that a frame of
32,768 tokens costs what one of 16 does.
"""

from relay.kernels.kv_frames import Heads

Runs = tuple[tuple[int, int], ...]
"""((end, heads), …) with ascending ends: tokens before ``end``, from the run before on, have the heads of this bit mask. Neighbours
differ."""


def mask_of(heads: Heads) -> int:
    return ((1 << heads[1]) - 1) << heads[0]


def nothing(tokens: int) -> Runs:
    """Of ``tokens`` tokens."""
    return ((tokens, 0),)


def with_range(runs: Runs, first: int, stop: int, heads: int) -> Runs:
    """``runs`` and the heads of the mask ``heads`` of tokens ``first``..``stop - 1``, a range within them."""
    found: list[tuple[int, int]] = []
    start = 0
    for end, has in runs:
        for until, part in ((min(end, first), has), (min(end, stop), has | heads), (end, has)):
            if start < until:
                if found and found[-1][1] == part:
                    found.pop()
                found.append((until, part))
                start = until
    return tuple(found)
