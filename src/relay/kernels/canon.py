"""The constants of the canon (docs/decisions/0003-canon.md), each in one place. Changing one changes ``CANON_VERSION``."""

from typing import Final

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
