"""Between the paged cache and the canonical layout [token][kv_head][dim] of transfers: byte copies, no arithmetic."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "count"])
def copy_kernel(
    k_cache,
    v_cache,
    table,
    flat,
    first,
    count,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENTS: tl.constexpr,
    STORE: tl.constexpr,
):
    """One token: K into flat[token], V into flat[count + token], or back where STORE."""
    token = tl.program_id(0)
    position = first + token
    e = tl.arange(0, ELEMENTS)
    inside = e < KV_HEADS * DIM
    block = tl.load(table + position // BLOCK).to(tl.int64)
    place = ((block * KV_HEADS + e // DIM) * BLOCK + position % BLOCK) * DIM + e % DIM
    k_at = flat + token.to(tl.int64) * (KV_HEADS * DIM) + e
    v_at = k_at + count.to(tl.int64) * (KV_HEADS * DIM)
    if STORE:
        tl.store(k_cache + place, tl.load(k_at, mask=inside), mask=inside)
        tl.store(v_cache + place, tl.load(v_at, mask=inside), mask=inside)
    else:
        tl.store(k_at, tl.load(k_cache + place, mask=inside), mask=inside)
        tl.store(v_at, tl.load(v_cache + place, mask=inside), mask=inside)


def copy_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, flat: torch.Tensor, first: int, store: bool
) -> None:
    """Positions first.. of one sequence between its blocks and ``flat`` [2, count, kv_heads * dim]; ``store``: into the cache."""
    _, kv_heads, block_size, dim = k_cache.shape
    count = flat.shape[1]
    copy_kernel[(count,)](
        k_cache,
        v_cache,
        table,
        flat,
        first,
        count,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=block_size,
        ELEMENTS=triton.next_power_of_2(kv_heads * dim),
        STORE=store,
    )
