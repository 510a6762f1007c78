"""The canonical steps of attention, shared by prefill and decode so that both are the same function.

Tile of 64 keys at absolute multiples of 64, split of 512 keys (8 tiles). State of a split: m (largest raw score), l in four
lanes, acc. For one tile, with c = scale * log2(e) rounded once to fp32:
    s = q . k (tensor-core chain over the head dimension), invisible keys -inf; m' = max(m, max s);
    p = exp2(fma(s, c, -(m' * c))); a = exp2((m - m') * c); lane sums by an explicit tree (below); l = fma(l, a, lanes);
    acc = acc * a, then acc += p . v, p rounded to the type of v (tensor-core chain over the keys).
Lane j of 4 holds the columns with (column // 2) % 4 == j, the ones a thread of an MMA fragment holds, summed by the tree
written out in ``lane_sums`` with elementwise additions of halves: no compiler-chosen reduction order is left, whatever the layout.
A split's l is (l0 + l1) + (l2 + l3). Splits fold in ascending order from the identity:
    M' = max(M, m); w1 = exp2((M - M') * c), w2 = exp2((m - M') * c); ACC = fma(acc, w2, ACC * w1); L = fma(l, w2, L * w1).
An invisible tile or split is an exact identity, and folding the first split from the identity is exact. The output is
ACC * (1 / L), the division IEEE, rounded once to the type of activations. (p is at most 1, but
for the rounding of m' * c, so fp16 holds it; small values are subnormal there.)
"""

import triton
import triton.language as tl

TILE = 64
SPLIT = 512
LOWEST = tl.constexpr(-1.0e30)
LOG2_E = 1.4426950408889634


@triton.jit
def lane_sums(p, ROWS: tl.constexpr):
    """[ROWS, 64] -> [ROWS, 4]: pairs, then groups g of 8 columns as ((0+4)+(1+5))+((2+6)+(3+7))."""
    a, b = tl.split(tl.reshape(p, (ROWS, 8, 4, 2)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (ROWS, 2, 4, 4)), (0, 2, 3, 1)))
    a, b = tl.split(tl.reshape(tl.permute(a + b, (0, 2, 1)), (ROWS, 4, 2, 2)))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def lane_total(lanes, ROWS: tl.constexpr):
    """[ROWS, 4] -> [ROWS]: (l0 + l1) + (l2 + l3)."""
    a, b = tl.split(tl.reshape(lanes, (ROWS, 2, 2)))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def tile_step(s, v, m, lanes, acc, c, ROWS: tl.constexpr):
    """One tile: raw scores s [ROWS, 64] (invisible: -inf) and values v [64, dim] into the split's state."""
    top = tl.maximum(m, tl.max(s, 1))
    base = top * c
    p = tl.exp2(tl.fma(s, tl.zeros_like(s) + c, tl.zeros_like(s) - base[:, None]))
    a = tl.exp2((m - top) * c)
    acc = acc * a[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc)
    lanes = tl.fma(lanes, tl.zeros_like(lanes) + a[:, None], lane_sums(p, ROWS))
    return top, lanes, acc


@triton.jit
def fold(total_m, total_l, total_acc, m, l, acc, c):
    """Fold a finished split into the running total."""
    top = tl.maximum(total_m, m)
    w1 = tl.exp2((total_m - top) * c)
    w2 = tl.exp2((m - top) * c)
    total_acc = tl.fma(acc, tl.zeros_like(acc) + w2[:, None], total_acc * w1[:, None])
    return top, tl.fma(l, w2, total_l * w1), total_acc


@triton.jit
def inverse(l):
    """1 / l, IEEE."""
    return tl.div_rn(tl.zeros_like(l) + 1.0, l)
