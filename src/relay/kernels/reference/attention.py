"""Causal attention in the canon's tiles and splits (docs/decisions/0003-canon.md, "Attention (CPU)").

All rows of one sequence go through each tile together under a mask. That is exact: an invisible key has p = 0 and adds
nothing, and a tile or split without a visible key is an identity.
"""

import numpy as np
from numpy.typing import NDArray

from relay.kernels import canon
from relay.kernels.reference.arithmetic import F32, exp2, fma, fold_lanes
from relay.kernels.reference.products import Products

_START = np.float32(canon.MAX_START)


def attend(q: F32, k: F32, v: F32, positions: NDArray[np.int32], scale: float, products: Products) -> F32:
    """Attention of ``q`` [rows, heads, dim] at ``positions`` [rows] over keys 0.. of ``k``, ``v`` [tokens, kv_heads, dim].

    Row r sees keys 0..positions[r]; query head i reads KV head i // (heads / kv_heads). Returns [rows, heads, dim].
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    c = np.float32(np.float64(scale) * canon.LOG2E_64)
    state = _identity(grouped)
    for start in range(0, int(positions.max()) + 1, canon.SPLIT):
        state = _fold(state, _split(grouped, k, v, positions, start, c, products), c)
    _, total, acc = state
    out: F32 = acc / total[..., None] + np.float32(0)  # no zero keeps the sign an invisible key gave it
    return out.reshape(rows, heads, dim)


State = tuple[F32, F32, F32]  # running maximum [r, h, g], sum [r, h, g], accumulator [r, h, g, d]


def _identity(q: F32) -> State:
    return np.full(q.shape[:3], _START), np.zeros(q.shape[:3], np.float32), np.zeros(q.shape, np.float32)


def _split(
    q: F32, k: F32, v: F32, positions: NDArray[np.int32], first: int, c: np.float32, products: Products
) -> State:
    """The keys first..first+255 by themselves, a tile of 64 at a time."""
    highest, total, acc = _identity(q)
    for start in range(first, min(first + canon.SPLIT, len(k)), canon.TILE):
        keys = _tile(k, start)
        visible = start + np.arange(canon.TILE) <= positions[:, None]  # [r, t]
        masked = visible[:, None, None, :]
        s = np.where(masked, products.scores(q, keys), _START)
        raised = np.maximum(highest, s.max(axis=-1))
        p = exp2(fma(s, c, -(raised * c)[..., None]))
        p = np.where(masked, p, np.float32(0))
        a = np.where(raised == highest, np.float32(1), exp2((highest - raised) * c))
        total = fma(total, a, _tile_sum(p))
        acc = products.accumulate(acc * a[..., None], p, _tile(v, start), visible)
        highest = raised
    return highest, total, acc


def _tile(x: F32, start: int) -> F32:
    """64 tokens from ``start``, zeros past the end. [64, kv_heads, dim]"""
    tile = np.zeros((canon.TILE, *x.shape[1:]), np.float32)
    part = x[start : start + canon.TILE]
    tile[: len(part)] = part
    return tile


def _tile_sum(p: F32) -> F32:
    """Σ p: 16 lanes by key mod 16, chained over the four groups, then the tree. [..., 64] → [...]"""
    groups = p.reshape(*p.shape[:-1], -1, canon.LANES)
    lanes = groups[..., 0, :]
    for group in range(1, groups.shape[-2]):
        lanes = lanes + groups[..., group, :]
    return fold_lanes(lanes)


def _fold(left: State, right: State, c: np.float32) -> State:
    """Combine the splits before with the next one."""
    highest = np.maximum(left[0], right[0])
    w1, w2 = exp2((left[0] - highest) * c), exp2((right[0] - highest) * c)
    total = fma(right[1], w2, left[1] * w1)
    acc = fma(right[2], w2[..., None], left[2] * w1[..., None])
    return highest, total, acc
