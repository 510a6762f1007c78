"""fp32 arithmetic with a true fused multiply-add, in numpy, plus the two functions the canon builds from it.

numpy has no fma. Here ``a * b`` is exact in fp64, the sum is rounded *to odd* in fp64, and an odd-rounded fp64 value rounds to
fp32 exactly as the infinitely precise one would (Boldo and Melquiond 2008). So these functions give the CPU kernels' bits.
"""

import numpy as np
from numpy.typing import NDArray

from relay.kernels import canon

F32 = NDArray[np.float32]

_EXP2 = tuple(np.float32(c) for c in canon.EXP2_COEFFICIENTS)
_LOG2E = np.float32(canon.LOG2E)


@np.errstate(over="ignore", invalid="ignore")
def fma(a: F32 | np.float32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """round(a * b + c) with one rounding, arrays broadcast."""
    product = np.multiply(a, b, dtype=np.float64)
    addend = c.astype(np.float64)
    total = np.atleast_1d(product + addend)
    # the error of the sum (Knuth's two-sum), only its sign is used
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    inexact_even = ((error > 0) | (error < 0)) & ((bits & 1) == 0)
    odd = (bits + np.where(inexact_even, toward, 0)).view(np.float64)
    return odd.astype(np.float32).reshape(np.broadcast_shapes(a.shape, b.shape, c.shape))


def exp2(x: F32) -> F32:
    """2^x: nearest integer by exponent bits, the rest by a polynomial; exactly 0 below -126, as 2^127 above 127."""
    clamped = np.minimum(x, np.float32(canon.EXP2_MAX))
    n = np.rint(np.maximum(clamped, np.float32(canon.EXP2_MIN)))
    f = clamped - n
    p = np.full_like(f, _EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        p = fma(p, f, coefficient)
    scaled = (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
    return np.where(x < np.float32(canon.EXP2_MIN), np.float32(0), scaled)


@np.errstate(over="ignore")  # of -gate * log2(e), which exp2 clamps
def silu_mul(gate: F32, up: F32) -> F32:
    """silu(gate) * up."""
    denominator: F32 = np.float32(1) + exp2((-gate) * _LOG2E)
    return (gate / denominator) * up


def fold_lanes(lanes: F32) -> F32:
    """Sum the last axis of 16 partial sums by halves: j += j + 8, then 4, 2, 1. [..., 16] → [...]"""
    width = canon.LANES // 2
    while width:
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        width //= 2
    return lanes[..., 0]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; lane j sums the squares of i ≡ j (mod 16). [..., n] → [..., n]"""
    n = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-n // canon.LANES) * canon.LANES), np.float32)
    padded[..., :n] = x
    lanes = np.zeros((*x.shape[:-1], canon.LANES), np.float32)
    for start in range(0, padded.shape[-1], canon.LANES):
        group = padded[..., start : start + canon.LANES]
        lanes = fma(group, group, lanes)
    mean = fold_lanes(lanes) / np.float32(n)
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    scaled: F32 = (x * scale[..., None]) * weight
    return scaled


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotary embedding: first half of each head with second half. x [rows, heads, dim], cos and sin [rows, dim / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([fma(a, c, -(b * s)), fma(b, c, a * s)], axis=-1)


def round_bfloat16(x: F32) -> NDArray[np.uint16]:
    """Bit patterns of ``x`` rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet = bits | np.uint32(0x00400000)
    return (np.where(np.isnan(x), quiet, rounded) >> np.uint32(16)).astype(np.uint16)


def widen_bfloat16(bits: NDArray[np.uint16]) -> F32:
    """The fp32 values of bfloat16 bit patterns; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
