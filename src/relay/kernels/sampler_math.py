"""The sampler's arithmetic: IEEE fp64, each operation rounded by itself, so that numpy, C and a GPU give equal bits.

Nothing here calls a library transcendental, and every loop is elementwise; the C twin is ``cpu/sampler_math.h``.
"""

import numpy as np
from numpy.typing import NDArray

from relay.kernels.canon import WEIGHT_BITS

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 32 significant bits: k * LN2_HIGH is exact for |k| < 2^21
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LOG2_E = float.fromhex("0x1.71547652b82fep+0")

# exp(r) = 1 + r + r^2 * P(r) on |r| <= ln(2)/2. Minimax of degree 8 in r, relative error of the polynomial 3.1e-16.
EXP_COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.000000000000dp-1",
        "0x1.5555555550733p-3",
        "0x1.555555554ee7ap-5",
        "0x1.11111125dacdcp-7",
        "0x1.6c16c18a16170p-10",
        "0x1.a0198cb6ad9c4p-13",
        "0x1.a0198a126a502p-16",
        "0x1.72e9dc0be9bc0p-19",
        "0x1.28bbe03bcab68p-22",
    )
)

# log(m) = 2s + s * z * P(z), s = (m - 1) / (m + 1), z = s^2, m in [sqrt(1/2), sqrt(2)). Minimax of degree 5 in z,
# relative error of the polynomial 1.9e-16.
LOG_COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.555555555395cp-1",
        "0x1.999999a295dc2p-2",
        "0x1.249241761121ap-2",
        "0x1.c722790eac73cp-3",
        "0x1.732c0457edf8ep-3",
        "0x1.5879231ea1088p-3",
    )
)

SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
ONE_BITS = 0x3FF0000000000000
MANTISSA_BITS = 0x000FFFFFFFFFFFFF

WEIGHT_CUTOFF = -30.0  # below it floor(2^40 * exp(x)) is 0 (from -27.73 on); keeps k small
MAX_GUMBEL = 22.88  # over -log(-log(1 - 2^-33)) = 22.874


def log(x: F64) -> F64:
    """Natural logarithm of positive normal numbers, within 4 ulp. [n] → [n]"""
    shifted = x.view(np.uint64) + np.uint64(ONE_BITS - SQRT_HALF_BITS)
    exponent = (shifted >> np.uint64(52)).astype(np.float64) - 1023.0
    mantissa = ((shifted & np.uint64(MANTISSA_BITS)) + np.uint64(SQRT_HALF_BITS)).view(np.float64)
    f = mantissa - 1.0
    s = f / (mantissa + 1.0)
    z = s * s
    p = np.full_like(z, LOG_COEFFICIENTS[-1])
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        p = p * z + coefficient
    tail = s * (z * p) + exponent * LN2_LOW
    return exponent * LN2_HIGH + (2.0 * s + tail)


def log_of(x: float) -> float:
    """``log`` of one number."""
    return float(log(np.array([x], np.float64))[0])


def weights(x: F64) -> I64:
    """floor(2^40 * exp(x)) for x ≤ 0 (-inf included), exp within 2 ulp. Integers, so sums have no order. [n] → [n]"""
    x = np.maximum(x, WEIGHT_CUTOFF)
    k = np.rint(x * LOG2_E)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = np.full_like(r, EXP_COEFFICIENTS[-1])
    for coefficient in EXP_COEFFICIENTS[-2::-1]:
        p = p * r + coefficient
    p = 1.0 + (r + (r * r) * p)
    scale = ((k.astype(np.int64) + (1023 + WEIGHT_BITS)) << 52).view(np.float64)
    return np.floor(p * scale).astype(np.int64)


_BLOCK = 8192  # words computed at a time: their arrays stay in the second-level cache


def philox_words(token_ids: I64, position: int, choice: int, seed: int) -> U64:
    """Word 0 of Philox4x32-10 (Salmon et al. 2011) with key = seed (low word first), counter = (id, position, choice, 0).

    Returned as uint64 holding 32 bits. [n] → [n]
    """
    words = np.empty(len(token_ids), np.uint64)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    for start in range(0, len(words), _BLOCK):
        ids = token_ids[start : start + _BLOCK].astype(np.uint64)
        words[start : start + _BLOCK] = philox4x32((ids, np.uint64(position), np.uint64(choice), np.uint64(0)), key)[0]
    return words


def philox4x32(
    counter: tuple[U64 | np.uint64, U64 | np.uint64, U64 | np.uint64, U64 | np.uint64], key: tuple[int, int]
) -> tuple[U64, U64, U64, U64]:
    """The ten rounds on 32-bit words held in uint64; arrays are broadcast. Returns the four words."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (c.copy() for c in np.broadcast_arrays(*(np.atleast_1d(c).astype(np.uint64) for c in counter)))
    left, right = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(10):
        np.multiply(c0, np.uint64(0xD2511F53), out=left)
        np.multiply(c2, np.uint64(0xCD9E8D57), out=right)
        np.right_shift(right, shift, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.bitwise_and(right, mask, out=c1)
        np.right_shift(left, shift, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(left, mask, out=c3)
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(words: U64) -> F64:
    """Standard Gumbel noise -log(-log u), u = (word + 0.5) / 2^32; always finite. [n] → [n]"""
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return -log(-log(u))
