"""From the fused projection to the cache: optional QK-norm, rotary embedding, write of K and V.

Reads q | k | v of a token (bf16), and for each q and k head: (QK-norm) mean of squares over the head by ``tl.sum`` in a program
of one warp, y = bf16((x * s) * weight); rotation in fp32 with the table row of the position: (fma(a, c, -(b * s)),
fma(b, c, a * s)), a from the first half of the head, b from the second; rounded once to bf16. q returns to its place in the
projection buffer; k and v go to the cache. One program a (token, head).

V in the cache is finite: attention multiplies later tokens of a chunk by a weight of 0, and 0 times anything else would be NaN in
tokens that must not see them. What is not finite in v is stored as 0, and k gets NaN in its place, as where k itself is not finite:
scores of unseen tokens are masked by selection, so whoever sees the token is NaN, and nobody else.
"""

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import pdl_enabled, pdl_start
from relay.kernels.cuda.launcher import Launcher, Options
from relay.kernels.cuda.norm import square_root


@triton.jit
def _head_scale(a, b, eps, DIM: tl.constexpr):
    """1 / rms of each head whose halves are the rows of a and b."""
    total = tl.sum(a * a + b * b, 1)
    return tl.div_rn(1.0, square_root(tl.div_rn(total, float(DIM)) + eps))


@triton.jit
def _marked(own, v, is_v):
    """``own`` where it and the ``v`` beside it are finite; else 0 in v, NaN in q and k."""
    fine = (tl.abs(own.to(tl.float32)) < float("inf")) & (tl.abs(v) < float("inf"))
    return tl.where(fine, own.to(tl.float32), tl.where(is_v, 0.0, float("nan"))).to(own.dtype)


@triton.jit(do_not_specialize=["table_stride"])
def rope_kernel(
    qkv,
    positions,
    token_rows,
    block_tables,
    cos,
    sin,
    q_weight,
    k_weight,
    k_cache,
    v_cache,
    table_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, HEADS of the q | k | v heads. Cache [block][kv_head][BLOCK][DIM]; a negative position is a padding row."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, DIM // 2)
    pdl_start(PDL)
    position = tl.load(positions + token)
    if position >= 0:
        row = tl.load(token_rows + token)
        block = tl.load(block_tables + row.to(tl.int64) * table_stride + position // BLOCK).to(tl.int64)
        known = (head < Q_HEADS + 2 * KV_HEADS)[:, None]
        at = qkv + (token * (Q_HEADS + 2 * KV_HEADS) + head[:, None]) * DIM + half[None, :]
        a = tl.load(at, mask=known, other=0.0).to(tl.float32)
        b = tl.load(at + DIM // 2, mask=known, other=0.0).to(tl.float32)
        is_k = (head >= Q_HEADS)[:, None] & (head < Q_HEADS + KV_HEADS)[:, None]
        va = tl.load(at + KV_HEADS * DIM, mask=is_k, other=0.0).to(tl.float32)
        vb = tl.load(at + KV_HEADS * DIM + DIM // 2, mask=is_k, other=0.0).to(tl.float32)
        is_q = (head < Q_HEADS)[:, None]
        is_v = (head >= Q_HEADS + KV_HEADS)[:, None]
        x = a
        y = b
        if NORM:
            s = _head_scale(a, b, eps, DIM)[:, None]
            qa = tl.load(q_weight + half)[None, :]
            qb = tl.load(q_weight + DIM // 2 + half)[None, :]
            ka = tl.load(k_weight + half)[None, :]
            kb = tl.load(k_weight + DIM // 2 + half)[None, :]
            x = ((a * s) * tl.where(is_q, qa, ka)).to(qkv.dtype.element_ty).to(tl.float32)
            y = ((b * s) * tl.where(is_q, qb, kb)).to(qkv.dtype.element_ty).to(tl.float32)
        c = tl.load(cos + position * (DIM // 2) + half)[None, :] + tl.zeros_like(x)
        s = tl.load(sin + position * (DIM // 2) + half)[None, :] + tl.zeros_like(x)
        first = _marked(tl.where(is_v, a, tl.fma(x, c, -(y * s))).to(qkv.dtype.element_ty), va, is_v)
        second = _marked(tl.where(is_v, b, tl.fma(y, c, x * s)).to(qkv.dtype.element_ty), vb, is_v)
        tl.store(at, first, mask=is_q & known)
        tl.store(at + DIM // 2, second, mask=is_q & known)
        kv_head = tl.where(is_v, head[:, None] - Q_HEADS - KV_HEADS, head[:, None] - Q_HEADS)
        place = ((block * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DIM + half[None, :]
        tl.store(k_cache + place, first, mask=is_k)
        tl.store(k_cache + place + DIM // 2, second, mask=is_k)
        tl.store(v_cache + place, first, mask=is_v & known)
        tl.store(v_cache + place + DIM // 2, second, mask=is_v & known)


_rope = Launcher(rope_kernel)


def rope_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    block_tables: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_heads: int,
    *,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """``qkv`` [tokens, (q + 2 kv) * dim] in place; caches [blocks, kv_heads, block_size, dim]; positions int32 (-1: skip).

    ``token_rows`` gives each token's row of ``block_tables``. ``norm`` is (q weight, k weight, eps) of Qwen3's QK-norm.
    """
    _, kv_heads, block_size, dim = k_cache.shape
    tokens = qkv.shape[0]
    # With QK-norm the sum over a head must always run in the same layout: two heads a warp. Without it nothing is summed, and many
    # rows go faster in larger programs.
    heads, warps = (16, 4) if norm is None and tokens > 64 else (2, 1)
    pdl = pdl_enabled()
    q_weight, k_weight, eps = norm or (cos, cos, 0.0)
    _rope(
        (tokens, -(-(q_heads + 2 * kv_heads) // heads), 1),
        (qkv, positions, token_rows, block_tables, cos, sin, q_weight, k_weight, k_cache, v_cache),
        (block_tables.stride(0),),
        (eps, q_heads, kv_heads, dim, block_size, heads, norm is not None, pdl),
        Options(pdl, warps),
    )
