"""top-k and top-p on the device: which tokens of a row may be drawn, exactly as ``relay.kernels.sampler`` orders and counts them.

Logits have 16 bits, so a row has at most 65,536 distinct values. ``count_kernel`` counts them by a 16-bit key that orders as the
values do (atomic integer additions: no order). ``limit_kernel`` walks the keys from the largest down, twice: first the tokens
left by min-p and top-k and the sum of their integer weights, then the smallest prefix whose weights reach the nucleus. What is
left is a key (all tokens above it may be drawn) and, among equals, the highest id that may: ties go to lower ids. Everything is
fp64 operation by operation, or integer.
"""

import torch
import triton
import triton.language as tl

from relay.kernels import sampler_math as sm
from relay.kernels.canon import WEIGHT_BITS
from relay.kernels.cuda.launch import INTERPRETED, launch_options, pdl_enabled, pdl_start

KEYS = 65536
_STRIDE = 2048  # keys or tokens a step of the walk; with 16 warps nothing spills
E0, E1, E2, E3, E4, E5, E6, E7, E8 = (tl.constexpr(value) for value in sm.EXP_COEFFICIENTS)
LOG2_E = tl.constexpr(sm.LOG2_E)
LN2_HIGH = tl.constexpr(sm.LN2_HIGH)
LN2_LOW = tl.constexpr(sm.LN2_LOW)
CUTOFF = tl.constexpr(sm.WEIGHT_CUTOFF)
EXPONENT = tl.constexpr(1023 + WEIGHT_BITS)
ROUNDER = tl.constexpr(
    6755399441055744.0
)  # 1.5 * 2^52: adding and subtracting it rounds to the nearest integer, ties to even
NO_LIMIT = tl.constexpr(1 << 40)


@triton.jit
def key_of(x):
    """Order-preserving 16-bit key of bf16 or fp16 values (both zeros alike); int32."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)


@triton.jit
def value_of(key, TYPE: tl.constexpr):
    """The inverse of ``key_of`` for values of TYPE, as fp64."""
    bits = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key)
    return bits.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32).to(tl.float64)


@triton.jit
def weight_of(x):
    """``sampler_math.weights``: floor(2^40 * exp(x)) of x <= 0; int64."""
    x = tl.where(x < CUTOFF, x * 0.0 + CUTOFF, x)
    k = (x * LOG2_E + ROUNDER) - ROUNDER
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = r * 0.0 + E8
    p = p * r + E7
    p = p * r + E6
    p = p * r + E5
    p = p * r + E4
    p = p * r + E3
    p = p * r + E2
    p = p * r + E1
    p = p * r + E0
    p = 1.0 + (r + (r * r) * p)
    scale = ((k.to(tl.int64) + EXPONENT) << 52).to(tl.float64, bitcast=True)
    return (p * scale).to(tl.int64)


@triton.jit
def count_kernel(logits, counts, slots, top_ks, top_ps, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Add chunk program_id(1) of row program_id(0) to the row's counts [65536], if the row has a limit."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(top_ks + slot) > 0) | (tl.load(top_ps + slot) < 1.0):
        x = tl.load(logits + row * vocab + v, mask=v < vocab, other=0.0)
        tl.atomic_add(counts + row * 65536 + key_of(x), 1, mask=v < vocab)


@triton.jit
def _kept(counts, row, first, seen, top, temperature, floor, k, STRIDE: tl.constexpr, TYPE: tl.constexpr):
    """Keys 65535 - first - i: (key, tokens left by min-p and top-k, their weight each, tokens left by min-p alone)."""
    key = 65535 - first - tl.arange(0, STRIDE)
    x = value_of(key, TYPE)
    scaled = x / temperature
    number = tl.load(counts + row * 65536 + key).to(tl.int64)
    number = tl.where((scaled >= floor) & (scaled > float("-inf")), number, 0)
    before = seen + tl.cumsum(number, 0) - number
    room = tl.where(k > before, k - before, 0)
    kept = tl.where(number < room, number, room)
    return key, kept, weight_of(tl.where(number > 0, scaled - top, 0.0)), number


@triton.jit
def limit_kernel(
    logits, counts, tops, slots, temperatures, log_min_ps, top_ks, top_ps, limits, vocab, CHUNKS,
    COUNT: tl.constexpr, STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """limits[row] = (key, highest id among tokens of that key); (-1, vocab) where the row has no limit. Clears the counts."""
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    tl.store(limits + row * 2, -1)
    tl.store(limits + row * 2 + 1, vocab)
    if (top_k > 0) | (top_p < 1.0):
        if temperature >= 1e-5:
            c = tl.arange(0, COUNT)
            raw_top = tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
            top = raw_top.to(tl.float64) / temperature
            floor = top + tl.load(log_min_ps + slot)
            k = tl.where(top_k > 0, top_k.to(tl.int64), NO_LIMIT)
            seen = tl.zeros([], tl.int64)
            total = tl.zeros([], tl.int64)
            for first in range(0, 65536, STRIDE):
                key, kept, weight, number = _kept(
                    counts, row, first, seen, top, temperature, floor, k, STRIDE, logits.dtype.element_ty
                )
                seen += tl.sum(number, 0)
                total += tl.sum(kept * weight, 0)
            wanted = top_p * total.to(tl.float64)
            needed = wanted.to(tl.int64)
            needed = tl.where(needed.to(tl.float64) < wanted, needed + 1, needed)
            needed = tl.minimum(tl.maximum(needed, 1), total)
            limited = seen > k
            seen = tl.zeros([], tl.int64)
            summed = tl.zeros([], tl.int64)
            last_key = tl.full([], -1, tl.int32)
            admitted = tl.zeros([], tl.int64)
            equals = tl.zeros([], tl.int64)
            found = tl.zeros([], tl.int32)
            for first in range(0, 65536, STRIDE):
                key, kept, weight, number = _kept(
                    counts, row, first, seen, top, temperature, floor, k, STRIDE, logits.dtype.element_ty
                )
                mass = kept * weight
                before = summed + tl.cumsum(mass, 0) - mass
                # the boundary: the first key whose tokens reach the nucleus, or (top_p = 1) the last that top-k leaves
                reaches = (kept > 0) & (before < needed) & (before + mass >= needed)
                at = tl.max(tl.where(reaches, key, -1), 0)
                lowest = tl.min(tl.where(kept > 0, key, 65536), 0)
                at = tl.where(top_p < 1.0, at, tl.where(lowest < 65536, lowest, -1))
                here = (at >= 0) & ((found == 0) | (top_p >= 1.0))
                mine = key == at
                kept_here = tl.sum(tl.where(mine, kept, 0), 0)
                weight_here = tl.maximum(tl.sum(tl.where(mine, weight, 0), 0), 1)
                short = needed - tl.sum(tl.where(mine, before, 0), 0)
                part = tl.where(top_p < 1.0, tl.minimum((short + weight_here - 1) // weight_here, kept_here), kept_here)
                last_key = tl.where(here, at, last_key)
                admitted = tl.where(here, part, admitted)
                equals = tl.where(here, tl.sum(tl.where(mine, number, 0), 0), equals)
                found = tl.where(here, 1, found)
                seen += tl.sum(number, 0)
                summed += tl.sum(mass, 0)
            if limited | (top_p < 1.0):
                tl.store(limits + row * 2, last_key)
                if admitted < equals:
                    met = tl.zeros([], tl.int64)
                    for start in range(0, vocab, STRIDE):
                        v = start + tl.arange(0, STRIDE)
                        x = tl.load(logits + row * vocab + v, mask=v < vocab, other=0.0)
                        equal = ((key_of(x) == last_key) & (v < vocab)).to(tl.int64)
                        rank = met + tl.cumsum(equal, 0)
                        cut = tl.max(tl.where((equal > 0) & (rank == admitted), v, -1), 0)
                        if cut >= 0:
                            tl.store(limits + row * 2 + 1, cut)
                        met += tl.sum(equal, 0)
        for first in range(0, 65536, STRIDE):
            key = first + tl.arange(0, STRIDE)
            tl.store(counts + row * 65536 + key, tl.zeros([STRIDE], tl.int32))


def find_limits(
    logits: torch.Tensor,
    tops: torch.Tensor,
    slots: torch.Tensor,
    parameters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    counts: torch.Tensor,
    limits: torch.Tensor,
) -> None:
    """Fill ``limits`` int32 [rows, 2] for 16-bit ``logits`` [rows, vocab].

    ``parameters`` by slot: temperatures, log_min_ps, top_ks (int32), top_ps (fp64). ``counts`` int32 [rows, 65536] is zero before
    and after.
    """
    rows, vocab = logits.shape
    temperatures, log_min_ps, top_ks, top_ps = parameters
    pdl = pdl_enabled()
    options = launch_options(pdl)
    count_kernel[(rows, triton.cdiv(vocab, _STRIDE))](
        logits, counts, slots, top_ks, top_ps, vocab, CHUNK=_STRIDE, PDL=pdl, **options
    )
    chunks = tops.shape[1]
    limit_kernel[(rows,)](
        logits,
        counts,
        tops,
        slots,
        temperatures,
        log_min_ps,
        top_ks,
        top_ps,
        limits,
        vocab,
        chunks,
        COUNT=triton.next_power_of_2(chunks),
        STRIDE=_STRIDE,
        PDL=pdl,
        **({} if INTERPRETED else {"num_warps": 16}),
        **options,
    )
