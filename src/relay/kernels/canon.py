"""The constants of the canon (docs/decisions/0003-canon.md): change one and every backend's bits change with it.

``parts`` goes into the numerics id, so two processes whose constants differ never mix their KV or resume each other's
sequences. Sizes that do not touch an order of additions (block size, batch limits, threads, panel width) are not here.
"""

from relay.protocol.block_hash import UNIT_TOKENS

CANON_VERSION = 1

LANES = 16  # partial sums of norms and of the softmax denominator
KEY_TILE = 64  # keys a softmax rescaling covers; tiles start at absolute multiples
KEY_SPLIT = 256  # keys folded into the running result at once
SCORE_FLOOR = -1e30  # running maximum before the first key

GREEDY_BELOW = 1e-5  # temperatures under this take the highest logit
WEIGHT_BITS = 40  # sampling weights are floor(2^40 * exp(l - max))


def parts() -> dict[str, str]:
    """The constants as the numerics id takes them."""
    return {
        "canon": str(CANON_VERSION),
        "lanes": str(LANES),
        "key_tile": str(KEY_TILE),
        "key_split": str(KEY_SPLIT),
        "score_floor": repr(SCORE_FLOOR),
        "unit_tokens": str(UNIT_TOKENS),
        "greedy_below": repr(GREEDY_BELOW),
        "weight_bits": str(WEIGHT_BITS),
    }
