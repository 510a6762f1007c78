"""Prefill attention for Hopper: the arithmetic of ``softmax`` with the copy engine, wgmma and specialised warps (Gluon).

A program takes 128 (token, query head of one KV head) rows: two warpgroups of 64 rows compute, one warp streams K and V tiles of
64 keys through a ring in shared memory by bulk tensor copies. Within a warpgroup the softmax of the next tile runs while the tensor
cores accumulate the values of this one; the two warpgroups fill each other's gaps.
None of that changes an addition: each tile's state goes through the same steps in the same order as in ``attention_prefill``.
Rows of V after the last token stored are zeroed in shared memory, since free cache memory may hold NaN. (Later tokens of the chunk
are not: their weight is 0 and their values are finite, as ``rope`` writes them.)
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relay.kernels.cuda.hopper_steps import advance, fold, lane_sums, lane_total, softmax
from relay.kernels.cuda.launcher import Launcher, Options, Tiles
from relay.kernels.cuda.softmax import LOG2_E

TILE_ROWS = 128
STAGES = 3


@gluon.jit
def _share(items):
    """How many items this program takes: one a round, forwards in even rounds and backwards in odd ones, for even shares."""
    programs = gl.num_programs(0)
    rounds = items // programs
    place = gl.where(rounds % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return rounds + (place < items % programs).to(gl.int32)


@gluon.jit
def _item(work, items, turn, KV_HEADS: gl.constexpr, SHARED_OUT: gl.constexpr):
    """The program's item of round ``turn``: sequence row, first step token, tokens, start, tile index, KV head.

    Where a program takes several items (SHARED_OUT) they run from most keys to fewest over all heads, so that shares are even; else
    through one head after another, so that programs at work together read the same keys.
    """
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    number = turn * programs + place
    if SHARED_OUT:
        entry = number // KV_HEADS
        head = number % KV_HEADS
    else:
        entry = number % (items // KV_HEADS)
        head = number // (items // KV_HEADS)
    at = work + entry * 5
    return (
        gl.load(at).to(gl.int64),
        gl.load(at + 1).to(gl.int64),
        gl.load(at + 2),
        gl.load(at + 3),
        gl.load(at + 4),
        head,
    )


@gluon.jit
def _stream(
    k_desc, v_desc, block_tables, work, items, table_stride, k_ring, v_ring, bars,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, RING: gl.constexpr, SHARED_OUT: gl.constexpr,
):  # fmt: skip
    """The copying warp: K and V tiles of all items as slots become free; an item's first tiles come during the last item."""
    DIM: gl.constexpr = k_ring.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    done = 0
    zeroed = 0
    for turn in range(_share(items)):
        row, _, tokens, start, index, head = _item(work, items, turn, KV_HEADS, SHARED_OUT)
        tiles = (start + gl.minimum((index * 128 + 127) // GROUP, tokens - 1)) // 64 + 1
        stored = start + tokens - 1
        table = block_tables + row * table_stride
        for j in range(tiles):
            slot = (done + j) % RING
            parity = (((done + j) // RING) & 1) ^ 1
            block = gl.load(table + (j * 64) // BLOCK)
            at = (block * KV_HEADS + head) * BLOCK + (j * 64) % BLOCK
            mbarrier.wait(bars.index(RING + slot), parity)
            mbarrier.expect(bars.index(slot), 64 * DIM * 2)
            tma.async_copy_global_to_shared(k_desc, [at, 0], bars.index(slot), k_ring.index(slot))
            mbarrier.wait(bars.index(3 * RING + slot), parity)
            if j * 64 + 63 <= stored:
                mbarrier.expect(bars.index(2 * RING + slot), 64 * DIM * 2)
                tma.async_copy_global_to_shared(v_desc, [at, 0], bars.index(2 * RING + slot), v_ring.index(slot))
            else:
                mbarrier.expect(bars.index(4 * RING), 64 * DIM * 2)
                tma.async_copy_global_to_shared(v_desc, [at, 0], bars.index(4 * RING), v_ring.index(slot))
                mbarrier.wait(bars.index(4 * RING), zeroed & 1)
                zeroed += 1
                for part in gl.static_range(8):
                    rows = v_ring.index(slot).slice(part * 8, 8)
                    n = j * 64 + part * 8 + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
                    value = rows.load(LAYOUT)
                    rows.store(gl.where((n <= stored)[:, None], value, gl.zeros([8, DIM], value.dtype, LAYOUT)))
                fence_async_shared()
                mbarrier.arrive(bars.index(2 * RING + slot), count=1)
        done += tiles


@gluon.jit
def _attend_all(
    qkv, out, q_buffer, k_ring, v_ring, bars, work, items, qkv_stride, c,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, RING: gl.constexpr, HALF: gl.constexpr, SHARED_OUT: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its 64 rows of each of the program's items."""
    done = 0
    for turn in range(_share(items)):
        _, first_token, tokens, start, index, head = _item(work, items, turn, KV_HEADS, SHARED_OUT)
        tiles = (start + gl.minimum((index * 128 + 127) // GROUP, tokens - 1)) // 64 + 1
        _attend(
            qkv, out, q_buffer, k_ring, v_ring, bars, head, first_token, tokens, start, index, tiles, done, qkv_stride, c,
            GROUP, KV_HEADS, RING, HALF,
        )  # fmt: skip
        done += tiles


@gluon.jit
def _attend(
    qkv, out, q_buffer, k_ring, v_ring, bars, head, first_token, tokens, start, index, tiles, done, qkv_stride, c,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, RING: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """64 rows through all tiles of an item; ``done`` tiles went through the ring before."""
    DIM: gl.constexpr = k_ring.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    base_row = index * 128 + HALF * 64
    r = base_row + gl.arange(0, 64, gl.SliceLayout(1, LOAD))
    token = r // GROUP
    d = gl.arange(0, DIM, gl.SliceLayout(0, LOAD))
    q_at = (first_token + token) * qkv_stride + (head * GROUP + r % GROUP) * DIM
    q_buffer.store(gl.load(qkv + q_at[:, None] + d[None, :], mask=(token < tokens)[:, None], other=0.0))
    fence_async_shared()

    q_position = start + (base_row + gl.arange(0, 64, ROW)) // GROUP
    lowest = start + base_row // GROUP
    n = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([64, 64], gl.float32, SCORES)
    m = gl.full([64], -1.0e30, gl.float32, ROW)
    lanes = lane_sums(nothing, 64)
    acc = gl.zeros([64, DIM], gl.float32, VALUES)
    total_m = m
    total_l = gl.zeros([64], gl.float32, ROW)
    total_acc = acc

    mbarrier.wait(bars.index(done % RING), (done // RING) & 1)
    s = warpgroup_mma(q_buffer, k_ring.index(done % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(bars.index(RING + done % RING), count=1)
    if lowest < 63:
        s = gl.where(n[None, :] <= q_position[:, None], s, float("-inf"))
    m, lanes, p, _ = softmax(s, m, lanes, c)
    left = gl.convert_layout(p.to(v_ring.dtype), LEFT)
    mbarrier.wait(bars.index((done + 1) % RING), ((done + 1) // RING) & 1, pred=tiles > 1)
    # Steps whose next tile every row sees need no mask; those that complete no split need no fold.
    whole = gl.maximum((lowest + 1) // 64 - 1, 0)
    for split in range(whole // 8):
        for j in range(split * 8, split * 8 + 7):
            m, lanes, left, acc, total_m, total_l, total_acc = advance(
                q_buffer, k_ring, v_ring, bars, j, tiles, done, q_position, m, lanes, left, acc, total_m, total_l, total_acc, c,
                RING, False, 0,
            )  # fmt: skip
        m, lanes, left, acc, total_m, total_l, total_acc = advance(
            q_buffer, k_ring, v_ring, bars, split * 8 + 7, tiles, done, q_position, m, lanes, left, acc, total_m, total_l,
            total_acc, c, RING, False, 1,
        )  # fmt: skip
    for j in range(whole // 8 * 8, whole):
        m, lanes, left, acc, total_m, total_l, total_acc = advance(
            q_buffer, k_ring, v_ring, bars, j, tiles, done, q_position, m, lanes, left, acc, total_m, total_l, total_acc, c,
            RING, False, 0,
        )  # fmt: skip
    for j in range(whole, tiles - 1):
        m, lanes, left, acc, total_m, total_l, total_acc = advance(
            q_buffer, k_ring, v_ring, bars, j, tiles, done, q_position, m, lanes, left, acc, total_m, total_l, total_acc, c,
            RING, True, 2,
        )  # fmt: skip
    final = done + tiles - 1
    mbarrier.wait(bars.index(2 * RING + final % RING), (final // RING) & 1)
    acc_token = warpgroup_mma(left, v_ring.index(final % RING), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    mbarrier.arrive(bars.index(3 * RING + final % RING), count=1)
    l = gl.convert_layout(lane_total(lanes, 64), ROW)
    total_m, total_l, total_acc = fold(total_m, total_l, total_acc, m, l, acc, c)

    inverse = gl.div_rn(gl.zeros_like(total_l) + 1.0, total_l)
    result = (total_acc * gl.convert_layout(inverse, gl.SliceLayout(1, VALUES))[:, None]).to(out.dtype.element_ty)
    ro = base_row + gl.arange(0, 64, gl.SliceLayout(1, VALUES))
    do = gl.arange(0, DIM, gl.SliceLayout(0, VALUES))
    o_at = ((first_token + ro // GROUP) * (KV_HEADS * GROUP) + head * GROUP + ro % GROUP) * DIM
    gl.store(out + o_at[:, None] + do[None, :], result, mask=(ro // GROUP < tokens)[:, None])


@gluon.jit(do_not_specialize=["items", "table_stride"])
def hopper_kernel(
    qkv, k_desc, v_desc, block_tables, work, out, items, table_stride, qkv_stride, c,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr, RING: gl.constexpr,
    SHARED: gl.constexpr, SHARED_OUT: gl.constexpr,
):  # fmt: skip
    """``work`` as in ``attention_prefill.prefill_kernel``; k_desc and v_desc see the caches as [blocks * heads * BLOCK, DIM].

    ``items`` = entries of ``work`` times KV heads; a program takes its share of them one after another.
    """
    TYPE: gl.constexpr = qkv.dtype.element_ty
    q_first = gl.allocate_shared_memory(TYPE, [64, DIM], SHARED)
    q_second = gl.allocate_shared_memory(TYPE, [64, DIM], SHARED)
    k_ring = gl.allocate_shared_memory(TYPE, [RING, 64, DIM], SHARED)
    v_ring = gl.allocate_shared_memory(TYPE, [RING, 64, DIM], SHARED)
    # barriers: [0, R) K full, [R, 2R) K free, [2R, 3R) V full, [3R, 4R) V free, 4R the V tile being zeroed
    bars = gl.allocate_shared_memory(gl.int64, [4 * RING + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(RING + i), count=2)
        mbarrier.init(bars.index(2 * RING + i), count=1)
        mbarrier.init(bars.index(3 * RING + i), count=2)
    mbarrier.init(bars.index(4 * RING), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend_all, (qkv, out, q_first, k_ring, v_ring, bars, work, items, qkv_stride, c,
                           GROUP, KV_HEADS, RING, gl.constexpr(0), SHARED_OUT)),
            (_attend_all, (qkv, out, q_second, k_ring, v_ring, bars, work, items, qkv_stride, c,
                           GROUP, KV_HEADS, RING, gl.constexpr(1), SHARED_OUT)),
            (_stream, (k_desc, v_desc, block_tables, work, items, table_stride, k_ring, v_ring, bars,
                       GROUP, KV_HEADS, BLOCK, RING, SHARED_OUT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_hopper = Launcher(hopper_kernel)


@cache
def shared_layout() -> gl.NVMMASharedLayout:
    """128-byte swizzle of 16-bit rows, as wgmma and the copy engine expect."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@cache
def _processors() -> int:
    """Multiprocessors of the device: programs of the persistent grid."""
    return torch.cuda.get_device_properties().multi_processor_count


@cache
def _l2_bytes() -> int:
    return torch.cuda.get_device_properties().L2_cache_size


def stay_in_l2(keys: int, kv_heads: int, dim: int) -> bool:
    """Whether K and V of so many keys do."""
    return 4 * keys * kv_heads * dim <= _l2_bytes() // 2


def supported(block_size: int, dim: int) -> bool:
    """Whether this kernel can read a cache of such blocks on the present device."""
    return block_size % 64 == 0 and dim in (64, 128) and torch.cuda.get_device_capability()[0] == 9


def prefill_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    keys: int,
) -> None:
    """As ``attention_prefill.prefill_attention``, for caches that ``supported`` accepts; ``work`` made with TILE_ROWS.

    ``keys``: tokens of all sequences in ``work``. Where their K and V stay in L2, a persistent grid hides the start of each item
    behind the end of the last; where they do not, order by head matters more.
    """
    _, kv_heads, block_size, dim = k_cache.shape
    layout = shared_layout()
    items = work.shape[0] * kv_heads
    shared_out = stay_in_l2(keys, kv_heads, dim)
    k, v = (Tiles(cache.view(-1, dim), (64, dim), layout) for cache in (k_cache, v_cache))
    sizes = (out.shape[1] // (kv_heads * dim), kv_heads, dim, block_size, STAGES)
    _hopper(
        (min(items, _processors()) if shared_out else items, 1, 1),
        (qkv, k, v, block_tables, work, out),
        (items, block_tables.stride(0)),
        (qkv.stride(0), scale * LOG2_E, *sizes, layout, shared_out),
        Options(False, 4),
    )
