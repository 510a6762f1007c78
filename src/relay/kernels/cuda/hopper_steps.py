"""Attention for one warpgroup of 64 rows in Gluon: the arithmetic of ``softmax``, and how one tile overlaps the next.

Functions mirror ``softmax`` operation by operation; tests compare the kernels built on both bit for bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def lane_sums(p, ROWS: gl.constexpr):
    """The tree of ``softmax.lane_sums``."""
    a, b = gl.split(gl.reshape(p, (ROWS, 8, 4, 2)))
    a, b = gl.split(gl.permute(gl.reshape(a + b, (ROWS, 2, 4, 4)), (0, 2, 3, 1)))
    a, b = gl.split(gl.reshape(gl.permute(a + b, (0, 2, 1)), (ROWS, 4, 2, 2)))
    a, b = gl.split(a + b)
    return a + b


@gluon.jit
def lane_total(lanes, ROWS: gl.constexpr):
    """(l0 + l1) + (l2 + l3); the four lanes of a row first meet in one thread of the same warp."""
    lanes = gl.convert_layout(lanes, gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))
    a, b = gl.split(gl.reshape(lanes, (ROWS, 2, 2)))
    a, b = gl.split(a + b)
    return a + b


@gluon.jit
def softmax(s, m, lanes, c):
    """Scores of one tile into the split's m and lanes; returns also p and the factor of what was accumulated before."""
    top = gl.maximum(m, gl.max(s, 1))
    base = top * c
    zero = gl.zeros_like(s)
    p = gl.exp2(gl.fma(s, zero + c, zero - base[:, None]))
    a = gl.exp2((m - top) * c)
    LANES: gl.constexpr = lanes.type.layout
    factor = gl.zeros_like(lanes) + gl.convert_layout(a, gl.SliceLayout(1, LANES))[:, None]
    lanes = gl.fma(lanes, factor, lane_sums(p, 64))
    return top, lanes, p, a


@gluon.jit
def fold(total_m, total_l, total_acc, m, l, acc, c):
    """Fold a split into the running total, as ``softmax.fold``; l and total_l share the layout of m."""
    top = gl.maximum(total_m, m)
    w1 = gl.exp2((total_m - top) * c)
    w2 = gl.exp2((m - top) * c)
    VALUES: gl.constexpr = acc.type.layout
    f1 = gl.convert_layout(w1, gl.SliceLayout(1, VALUES))[:, None]
    f2 = gl.zeros_like(acc) + gl.convert_layout(w2, gl.SliceLayout(1, VALUES))[:, None]
    total_acc = gl.fma(acc, f2, total_acc * f1)
    return top, gl.fma(l, w2, total_l * w1), total_acc


@gluon.jit
def advance(
    q_buffer, k_ring, v_ring, bars, j, tiles, done, q_position, m, lanes, left, acc, total_m, total_l, total_acc, c,
    RING: gl.constexpr, MASK: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """Accumulate the values of tile j (weights in ``left``) while the scores and the softmax of tile j + 1 are made.

    K of tile j + 1 has arrived already; at the end K of tile j + 2 has too. FOLD says whether tile j completes its split: 0 no,
    1 yes, 2 if it is the eighth.
    """
    DIM: gl.constexpr = k_ring.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    nothing = gl.zeros([64, 64], gl.float32, SCORES)
    slot = (done + j) % RING
    next_slot = (done + j + 1) % RING
    s_token = warpgroup_mma(q_buffer, k_ring.index(next_slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(2 * RING + slot), ((done + j) // RING) & 1)
    acc_token = warpgroup_mma(left, v_ring.index(slot), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(bars.index(RING + next_slot), count=1)
    if MASK:
        n = (j + 1) * 64 + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        s = gl.where(n[None, :] <= q_position[:, None], s, float("-inf"))
    done_m = m
    done_lanes = lanes
    if FOLD == 1:
        m = gl.full([64], -1.0e30, gl.float32, ROW)
        lanes = gl.zeros_like(lanes)
    if FOLD == 2:
        m = gl.where((j % 8) == 7, gl.full([64], -1.0e30, gl.float32, ROW), m)
        lanes = gl.where((j % 8) == 7, gl.zeros_like(lanes), lanes)
    m, lanes, p, a = softmax(s, m, lanes, c)
    # The wait for the K tile after next stands here because it is a loop: if nothing but arithmetic lay between, the assembler
    # would move the wait for the tensor cores in front of the softmax, and they would idle.
    after = done + j + 2
    mbarrier.wait(bars.index(after % RING), (after // RING) & 1, pred=j + 2 < tiles)
    acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
    mbarrier.arrive(bars.index(3 * RING + slot), count=1)
    if FOLD == 1:
        l = gl.convert_layout(lane_total(done_lanes, 64), ROW)
        total_m, total_l, total_acc = fold(total_m, total_l, total_acc, done_m, l, acc, c)
        acc = gl.zeros([64, DIM], gl.float32, VALUES)
    else:
        if FOLD == 2:
            if (j % 8) == 7:
                l = gl.convert_layout(lane_total(done_lanes, 64), ROW)
                total_m, total_l, total_acc = fold(total_m, total_l, total_acc, done_m, l, acc, c)
                acc = gl.zeros([64, DIM], gl.float32, VALUES)
        acc = acc * gl.convert_layout(a, gl.SliceLayout(1, VALUES))[:, None]
    return m, lanes, gl.convert_layout(p.to(v_ring.dtype), LEFT), acc, total_m, total_l, total_acc
