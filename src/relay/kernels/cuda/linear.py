"""Linear layers on tensor cores: y[m, n] = round(chain over k ascending of x[m, k] * w[n, k]).

Canonical order (docs/decisions/0004-gpu-canon.md): one accumulator per output, fed by groups of 16 along k in ascending
order; each group is one fused tensor-core step (Hopper: mma.sync m16n8k16 and wgmma k16 give equal bits). Tile sizes, warps,
stages, operand order and the way bytes reach shared memory are free, so ``LinearTile`` may be chosen by M; K is never split.
The accumulator is rounded once to the type of ``y``.

One kernel serves decode (narrow output tiles: enough programs to fill the chip) and prefill (wide tiles, grouped order).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import pdl_enabled, pdl_start
from relay.kernels.cuda.launcher import Launcher, Options, Tiles


@dataclass(frozen=True, slots=True)
class LinearTile:
    """How the products are laid over programs; changes speed, never a bit."""

    tokens: int  # rows of x per program, 16..128
    outputs: int  # rows of w per program
    depth: int  # k per step of the pipeline
    warps: int = 4
    stages: int = 4
    swap: bool = False  # w is the left operand (wgmma with 64 outputs and few tokens)
    tma: bool = False  # w and x come by the bulk copy engine instead of cp.async
    group: int = 8  # token tiles that share one pass over w in L2
    prefetch: int = 0  # k columns of w pulled into L2 before waiting for the previous kernel


@triton.jit
def _prefetch_rows(w, n0, N, K, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask L2 for the first COLUMNS columns of the program's rows of w; needs no earlier kernel's result."""
    rows = tl.minimum(n0 + tl.arange(0, OUTPUTS), N - 1).to(tl.int64)
    lines = tl.arange(0, COLUMNS // 64) * 64  # 128 bytes each
    at = w + rows[:, None] * K + lines[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x,
    w,
    w_pointer,
    y,
    M,
    N,
    K,
    x_stride,
    y_stride,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[M, N] of x[M, K] (row stride x_stride) and w[N, K]; M is never specialised."""
    pid = tl.program_id(0)
    token_tiles = tl.cdiv(M, TOKENS)
    output_tiles = tl.cdiv(N, OUTPUTS)
    width = GROUP * output_tiles
    first = (pid // width) * GROUP
    size = tl.minimum(token_tiles - first, GROUP)
    pm = first + (pid % width) % size
    pn = (pid % width) // size
    if PREFETCH > 0:
        _prefetch_rows(w_pointer, pn * OUTPUTS, N, K, OUTPUTS, PREFETCH)
    pdl_start(PDL)
    m = pm * TOKENS + tl.arange(0, TOKENS)
    n = pn * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, DEPTH)
    if not TMA:
        x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
        w_at = w + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    if SWAP:
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    else:
        acc = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        if TMA:
            a = x.load([pm * TOKENS, k0])
            b = w.load([pn * OUTPUTS, k0])
        elif EVEN:
            a = tl.load(x_at + k0, mask=m[:, None] < M, other=0.0)
            b = tl.load(w_at + k0)
        else:
            a = tl.load(x_at + k0, mask=(m[:, None] < M) & (k0 + k < K)[None, :], other=0.0)
            b = tl.load(w_at + k0, mask=(k0 + k < K)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc)
        else:
            acc = tl.dot(a, tl.trans(b), acc)
    if SWAP:
        acc = tl.trans(acc)
    out = y + m[:, None].to(tl.int64) * y_stride + n[None, :]
    tl.store(out, acc.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


_linear = Launcher(linear_kernel)


def linear(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tile: LinearTile) -> None:
    """Write x[M, K] @ w[N, K].T into ``y`` [M, N] (bf16, or fp32 to see the accumulator) with the given tile."""
    tokens, depth = x.shape
    outputs = w.shape[0]
    grid = (-(-tokens // tile.tokens) * -(-outputs // tile.outputs), 1, 1)
    pdl = pdl_enabled()
    sizes = (outputs, depth, x.stride(0), y.stride(0), tile.tokens, tile.outputs, tile.depth, tile.group)
    how = (tile.swap, tile.tma, depth % tile.depth == 0, tile.stages, tile.prefetch if pdl else 0, pdl)
    operands = (Tiles(x, (tile.tokens, tile.depth)), Tiles(w, (tile.outputs, tile.depth))) if tile.tma else (x, w)
    _linear(grid, (*operands, w, y), (tokens,), sizes + how, Options(pdl, tile.warps))
