"""Causal attention of chunks of prompts over the paged cache, any chunk boundaries, any number of sequences.

Canonical order: see ``softmax``; the splits that decode gives to different programs are folded in registers here.
A program takes ROWS consecutive (token, query head of one KV head) pairs of one sequence, so each K and V row is read once
for all the query heads that share it. Tiles wholly visible to all rows skip the mask; the arithmetic is the same.
"""

import torch
import triton
import triton.language as tl

from relay.kernels.cuda import attention_hopper
from relay.kernels.cuda.launch import HOPPER_SHARED, INTERPRETED, pdl_enabled, pdl_start, shared_limit
from relay.kernels.cuda.launcher import Launcher, Options
from relay.kernels.cuda.softmax import LOG2_E, LOWEST, SPLIT, TILE, fold, inverse, lane_total, tile_step


@triton.jit
def load_tile(
    cache,
    table,
    s0,
    last,
    head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Keys or values s0..s0+63 of a sequence as [64, DIM]; rows after ``last`` hold anything, or where ZERO zero.

    Free memory may hold NaN: a score is masked by selection, but a weight of 0 times a NaN value would not vanish.
    """
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM)
    if BLOCK % TILE == 0:
        block = tl.load(table + tl.minimum(s0, last) // BLOCK).to(tl.int64)  # a tile past the end reads what is there
        at = cache + ((block * KV_HEADS + head) * BLOCK + s0 % BLOCK + n[:, None]) * DIM + d[None, :]
    else:
        position = tl.minimum(s0 + n, last)
        blocks = tl.load(table + position // BLOCK).to(tl.int64)
        at = cache + ((blocks[:, None] * KV_HEADS + head) * BLOCK + (position % BLOCK)[:, None]) * DIM + d[None, :]
    if ZERO:
        return tl.load(at, mask=(s0 + n)[:, None] <= last, other=0.0)
    return tl.load(at)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    qkv,
    k_cache,
    v_cache,
    block_tables,
    work,
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
    PDL: tl.constexpr,
):
    """``work`` int32 [programs, 5]: sequence row, first step token of the row, tokens, position of the first, tile index."""
    item = work + tl.program_id(0) * 5
    head = tl.program_id(1)
    pdl_start(PDL)
    row = tl.load(item)
    first_token = tl.load(item + 1).to(tl.int64)
    tokens = tl.load(item + 2)
    start = tl.load(item + 3)
    index = tl.load(item + 4)
    r = index * ROWS + tl.arange(0, ROWS)
    token = r // GROUP
    q_head = head * GROUP + r % GROUP
    d = tl.arange(0, DIM)
    known = (token < tokens)[:, None]
    q_at = qkv + (first_token + token)[:, None] * qkv_stride + (q_head * DIM)[:, None] + d[None, :]
    q = tl.load(q_at, mask=known, other=0.0)
    q_position = start + token
    lowest = start + index * ROWS // GROUP  # position of the tile's first row
    last = start + tl.minimum((index * ROWS + ROWS - 1) // GROUP, tokens - 1)
    table = block_tables + row.to(tl.int64) * table_stride
    n = tl.arange(0, TILE)
    m = tl.full([ROWS], LOWEST, tl.float32)
    lanes = tl.zeros([ROWS, 4], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    total_m, total_l, total_acc = m, tl.zeros([ROWS], tl.float32), acc
    for s0 in range(0, last + 1, TILE):
        k = load_tile(k_cache, table, s0, last, head, KV_HEADS, DIM, BLOCK, TILE, False)
        v = load_tile(v_cache, table, s0, last, head, KV_HEADS, DIM, BLOCK, TILE, True)
        s = tl.dot(q, tl.trans(k))
        if s0 + TILE - 1 > lowest:
            s = tl.where((s0 + n)[None, :] <= q_position[:, None], s, float("-inf"))
        m, lanes, acc = tile_step(s, v, m, lanes, acc, c, ROWS)
        if s0 % SPLIT == SPLIT - TILE:
            total_m, total_l, total_acc = fold(total_m, total_l, total_acc, m, lane_total(lanes, ROWS), acc, c)
            m = tl.full([ROWS], LOWEST, tl.float32)
            lanes = tl.zeros([ROWS, 4], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)
    total_m, total_l, total_acc = fold(total_m, total_l, total_acc, m, lane_total(lanes, ROWS), acc, c)
    o_at = out + ((first_token + token)[:, None] * (KV_HEADS * GROUP) + q_head[:, None]) * DIM + d[None, :]
    tl.store(o_at, (total_acc * inverse(total_l)[:, None]).to(out.dtype.element_ty), mask=known)


_prefill = Launcher(prefill_kernel)


def prefill_work(
    rows: list[tuple[int, int, int, int]], group: int, tile_rows: int
) -> list[tuple[int, int, int, int, int]]:
    """Programs for (sequence row, first step token, tokens, start position) entries, those with most keys first."""
    items = []
    for row, first, tokens, start in rows:
        for index in range(-(-tokens * group // tile_rows)):
            keys = start + min((index * tile_rows + tile_rows - 1) // group, tokens - 1) + 1
            items.append((keys, (row, first, tokens, start, index)))
    items.sort(key=lambda item: -item[0])
    return [item for _, item in items]


def prefill_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    tile_rows: int = 128,
    warps: int = 8,
    stages: int = 2,
) -> None:
    """q from ``qkv`` [tokens, (q + 2 kv) * dim], keys from caches; ``out`` [tokens, q_heads * dim]; ``work`` as the kernel's."""
    _, kv_heads, block_size, dim = k_cache.shape
    group = out.shape[1] // (kv_heads * dim)
    pdl = pdl_enabled()
    _prefill(
        (work.shape[0], kv_heads, 1),
        (qkv, k_cache, v_cache, block_tables, work, out),
        (block_tables.stride(0),),
        (qkv.stride(0), scale * LOG2_E, group, kv_heads, dim, block_size, TILE, SPLIT, tile_rows, pdl),
        Options(pdl, warps, stages),
    )


def tile_rows_for(block_size: int, dim: int) -> int:
    """Rows of a program on this device and cache: what ``prefill_work`` must be called with."""
    return attention_hopper.TILE_ROWS if _hopper(block_size, dim) else prefill_tile(dim, shared_limit())[0]


def prefill_tile(dim: int, shared: int) -> tuple[int, int]:
    """Rows and warps of a program of ``prefill_kernel`` where a program may have ``shared`` bytes of shared memory.

    mma.sync keeps the left operands in registers, which wgmma does not: elsewhere than on Hopper 4 warps would spill.
    """
    if shared >= HOPPER_SHARED:
        return 64, 4
    return (64 if dim <= 128 else 32), 8


def prefill(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    keys: int,
) -> None:
    """The fastest kernel for this device and cache; bits do not depend on the choice.

    ``work`` made with ``tile_rows_for``; ``keys``: the tokens of its sequences together.
    """
    _, _, block_size, dim = k_cache.shape
    if _hopper(block_size, dim):
        attention_hopper.prefill_attention(qkv, k_cache, v_cache, block_tables, work, out, scale, keys)
    else:
        rows, warps = prefill_tile(dim, shared_limit())
        prefill_attention(qkv, k_cache, v_cache, block_tables, work, out, scale, tile_rows=rows, warps=warps, stages=2)


def in_one_round(keys: int, kv_heads: int, block_size: int, dim: int) -> bool:
    """Whether ``prefill`` lays its programs out the same for ``keys`` as for none: what a graph keeps."""
    return not _hopper(block_size, dim) or attention_hopper.stay_in_l2(keys, kv_heads, dim)


def _hopper(block_size: int, dim: int) -> bool:
    return not INTERPRETED and torch.cuda.is_available() and attention_hopper.supported(block_size, dim)
