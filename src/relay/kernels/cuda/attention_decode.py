"""Flash-decoding: one new token a sequence over its paged cache, splits on different programs, then a fold.

Canonical order: see ``softmax``. Program (split, kv_head, row) computes one split of 512 keys for all query heads that share
the KV head (rows of one tile, padded to ROWS), so each K and V row is read once. Partials are fp32; ``fold_kernel`` folds them in
ascending order. Where the longest sequence has one split, the split program folds from the identity itself (exact).
"""

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.attention_prefill import load_tile
from relay.kernels.cuda.launch import pdl_enabled, pdl_start, shared_limit
from relay.kernels.cuda.launcher import Launcher, Options
from relay.kernels.cuda.softmax import LOG2_E, LOWEST, SPLIT, TILE, fold, inverse, lane_total, tile_step


@triton.jit(do_not_specialize=["table_stride"])
def split_kernel(
    qkv,
    k_cache,
    v_cache,
    block_tables,
    positions,
    tokens,
    rows,
    partial,
    stats,
    out,
    table_stride,
    qkv_stride,
    c,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Entry i = program_id(2): step token tokens[i], block table row rows[i]; a negative position is a padding row."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    entry = tl.program_id(2)
    pdl_start(PDL)
    token = tl.load(tokens + entry).to(tl.int64)
    position = tl.load(positions + token)
    if split * SPLIT <= position:
        table = block_tables + tl.load(rows + entry).to(tl.int64) * table_stride
        r = tl.arange(0, ROWS)
        d = tl.arange(0, DIM)
        n = tl.arange(0, TILE)
        q_head = head * GROUP + r
        known = (r < GROUP)[:, None]
        q = tl.load(qkv + token * qkv_stride + (q_head * DIM)[:, None] + d[None, :], mask=known, other=0.0)
        m = tl.full([ROWS], LOWEST, tl.float32)
        lanes = tl.zeros([ROWS, 4], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        end = tl.minimum(split * SPLIT + SPLIT, position + 1)
        for s0 in range(split * SPLIT, end, TILE):
            k = load_tile(k_cache, table, s0, position, head, KV_HEADS, DIM, BLOCK, TILE, False)
            v = load_tile(v_cache, table, s0, position, head, KV_HEADS, DIM, BLOCK, TILE, True)
            s = tl.where((s0 + n)[None, :] <= position, tl.dot(q, tl.trans(k)), float("-inf"))
            m, lanes, acc = tile_step(s, v, m, lanes, acc, c, ROWS)
        l = lane_total(lanes, ROWS)
        if SPLITS == 1:
            none = tl.full([ROWS], LOWEST, tl.float32)
            m, l, acc = fold(none, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32), m, l, acc, c)
            o_at = out + (token * (KV_HEADS * GROUP) + q_head)[:, None] * DIM + d[None, :]
            tl.store(o_at, (acc * inverse(l)[:, None]).to(out.dtype.element_ty), mask=known)
        else:
            at = (entry.to(tl.int64) * (KV_HEADS * GROUP) + q_head) * SPLITS + split
            tl.store(partial + at[:, None] * DIM + d[None, :], acc, mask=known)
            tl.store(stats + at * 2, m, mask=r < GROUP)
            tl.store(stats + at * 2 + 1, l, mask=r < GROUP)


@triton.jit
def _fold_split(partial, stats, at, there, total_m, total_l, total_acc, c, DIM: tl.constexpr):
    """Fold one stored split; one that is not ``there`` is the exact identity."""
    one = tl.arange(0, 1)
    d = tl.arange(0, DIM)
    m = tl.load(stats + at * 2 + one, mask=there, other=LOWEST)
    l = tl.load(stats + at * 2 + 1 + one, mask=there, other=0.0)
    acc = tl.load(partial + (at + one)[:, None] * DIM + d[None, :], mask=there, other=0.0)
    return fold(total_m, total_l, total_acc, m, l, acc, c)


@triton.jit
def fold_kernel(
    partial,
    stats,
    positions,
    tokens,
    out,
    c,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fold the splits of (entry, query head) ascending and write the attention output of the entry's token."""
    head = tl.program_id(0)
    entry = tl.program_id(1)
    d = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    pdl_start(PDL)
    token = tl.load(tokens + entry).to(tl.int64)
    position = tl.load(positions + token)
    if position >= 0:
        total_m = tl.full([1], LOWEST, tl.float32)
        total_l = tl.zeros([1], tl.float32)
        total_acc = tl.zeros([1, DIM], tl.float32)
        at = (entry.to(tl.int64) * HEADS + head) * SPLITS
        count = position // SPLIT + 1
        if SPLITS <= 16:  # unrolled, so that the loads of all splits are in flight together
            for split in tl.static_range(SPLITS):
                total_m, total_l, total_acc = _fold_split(
                    partial, stats, at + split, split < count, total_m, total_l, total_acc, c, DIM
                )
        else:
            for split in range(count):
                total_m, total_l, total_acc = _fold_split(
                    partial, stats, at + split, True, total_m, total_l, total_acc, c, DIM
                )
        o_at = out + (token * HEADS + head + one)[:, None] * DIM + d[None, :]
        tl.store(o_at, (total_acc * inverse(total_l)[:, None]).to(out.dtype.element_ty))


def split_count(longest: int) -> int:
    """Splits reserved for sequences of at most ``longest`` tokens: a power of two, so that few graphs are captured."""
    return 1 << max(0, (-(-longest // 512) - 1)).bit_length()


def decode_stages(programs: int, dim: int, shared: int) -> int:
    """Depth of the pipeline: deep where few programs must hide the latency of memory, shallow where many share a multiprocessor.

    ``shared``: bytes of shared memory that a program may have; two stages more keep one more tile of K and V in it, beside 16 KiB
    at most.
    """
    stages = 7 if programs <= 132 or dim <= 64 else 3
    while stages > 1 and stages // 2 * 4 * TILE * dim + (16 << 10) > shared:
        stages -= 2
    return stages


def decode_scratch(entries: int, q_heads: int, dim: int, splits: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials fp32 [entries, q_heads, splits, dim] and their (m, l) [entries, q_heads, splits, 2]."""
    return (
        torch.empty(entries, q_heads, splits, dim, device=device, dtype=torch.float32),
        torch.empty(entries, q_heads, splits, 2, device=device, dtype=torch.float32),
    )


_split, _fold = Launcher(split_kernel), Launcher(fold_kernel)


def decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scale: float,
    splits: int,
    *,
    tile_rows: int = 16,
    warps: int = 4,
    stages: int | None = None,
) -> None:
    """Attention of step tokens ``tokens`` int32 [entries]; ``splits`` >= ceil((longest position + 1) / 512), fixed in a graph."""
    _, kv_heads, block_size, dim = k_cache.shape
    q_heads = out.shape[1] // dim
    entries = tokens.shape[0]
    partial, stats = scratch
    pdl = pdl_enabled()
    c = scale * LOG2_E
    stages = stages or decode_stages(splits * kv_heads * entries, dim, shared_limit())
    sizes = (q_heads // kv_heads, kv_heads, dim, block_size, TILE, SPLIT, tile_rows, splits)
    _split(
        (splits, kv_heads, entries),
        (qkv, k_cache, v_cache, block_tables, positions, tokens, rows, partial, stats, out),
        (block_tables.stride(0),),
        (qkv.stride(0), c, *sizes, pdl),
        Options(pdl, warps, stages),
    )
    if splits > 1:
        memory = (partial, stats, positions, tokens, out)
        _fold((q_heads, entries, 1), memory, (), (c, q_heads, dim, SPLIT, splits, pdl), Options(pdl, 1))
