"""The constants of the canon (docs/decisions/0003-canon.md), each in one place. Changing one changes ``CANON_VERSION``.

``parts`` goes into the numerics id, so two processes whose constants differ never mix their KV or resume each other's
sequences. Sizes that touch no order of additions (block size, batch limits, threads, panel width) are not here.
"""

from typing import Final

from relay.protocol.block_hash import UNIT_TOKENS

CANON_VERSION: Final = 1

LANES: Final = 16  # partial sums of a norm and of a softmax tile; keys of one transposed K unit
TILE: Final = 64  # keys of a softmax tile, at absolute multiples of 64
SPLIT: Final = 256  # keys of a softmax split, at absolute multiples of 256
MAX_START: Final = -1e30  # running maximum before the first key

LOG2E: Final = float.fromhex("0x1.715476p+0")  # log2(e) rounded to fp32, for silu
LOG2E_64: Final = float.fromhex("0x1.71547652b82fep+0")  # attention: c = fp32(scale * LOG2E_64), the product in fp64

# 2^f on [-0.5, 0.5]: fp32 coefficients of f^0 .. f^6, fitted for the least relative error with the constant held at 1;
# evaluated by fma in Horner order. Error of the polynomial 3e-9, of the fp32 evaluation below 1.1 half-ulps.
EXP2_COEFFICIENTS: Final = tuple(
    float.fromhex(text)
    for text in (
        "0x1p+0",
        "0x1.62e43p-1",
        "0x1.ebfbdcp-3",
        "0x1.c6af7ap-5",
        "0x1.3b2dd2p-7",
        "0x1.5f094ap-10",
        "0x1.417abap-13",
    )
)
EXP2_MIN: Final = -126.0  # below: exactly 0
EXP2_MAX: Final = 127.0  # above: as 127, so that the result stays finite

GREEDY_BELOW: Final = 1e-5  # temperatures under this take the highest logit (``SamplingParams.greedy``)
WEIGHT_BITS: Final = 40  # sampling weights are floor(2^40 * exp(l - max)); the fp64 polynomials are in sampler_math.py


def parts() -> dict[str, str]:
    """Version and constants as the numerics id takes them."""
    return {
        "canon": str(CANON_VERSION),
        "lanes": str(LANES),
        "tile": str(TILE),
        "split": str(SPLIT),
        "unit": str(UNIT_TOKENS),
        "max_start": repr(MAX_START),
        "log2e": f"{LOG2E.hex()} {LOG2E_64.hex()}",
        "exp2": " ".join(value.hex() for value in (*EXP2_COEFFICIENTS, EXP2_MIN, EXP2_MAX)),
        "sampling": f"{GREEDY_BELOW!r} {WEIGHT_BITS}",
    }
