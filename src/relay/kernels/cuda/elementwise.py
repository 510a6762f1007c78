"""Row gathers and the gated activation: no sums, so the order of work is free.

silu(g) * u = (g / (1 + exp2(-g * log2 e))) * u in fp32 from bf16 operands, IEEE division, rounded once to bf16.
"""

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import pdl_enabled, pdl_start, power_of_two_from
from relay.kernels.cuda.launcher import Launcher, Options


@triton.jit
def embed_kernel(table, tokens, slots, last_tokens, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[r] = table[tokens[r]], or of the last token drawn for slots[r] where tokens[r] is -1."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    pdl_start(PDL)
    token = tl.load(tokens + r)
    if token < 0:
        token = tl.load(last_tokens + tl.load(slots + r))
    row = tl.load(table + token.to(tl.int64) * WIDTH + c, mask=c < WIDTH, other=0.0)
    tl.store(out + r * WIDTH + c, row, mask=c < WIDTH)


@triton.jit
def silu_mul_kernel(g, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[r, c] = silu(g[r, c]) * g[r, WIDTH + c]."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < WIDTH
    pdl_start(PDL)
    gate = tl.load(g + r * 2 * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(g + r * 2 * WIDTH + WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    e = tl.exp2(gate * -1.4426950408889634)
    tl.store(out + r * WIDTH + c, (tl.div_rn(gate, 1.0 + e) * up).to(out.dtype.element_ty), mask=inside)


_embed, _silu_mul = Launcher(embed_kernel), Launcher(silu_mul_kernel)


def embed(
    table: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, out: torch.Tensor
) -> None:
    """``tokens`` and ``slots`` int32 [rows] (slot of each token's sequence), ``last_tokens`` int32 [slots]."""
    rows, width = out.shape
    pdl = pdl_enabled()
    memory = (table, tokens, slots, last_tokens, out)
    _embed((rows, 1, 1), memory, (), (width, power_of_two_from(width), pdl), Options(pdl))


def silu_mul(g: torch.Tensor, out: torch.Tensor) -> None:
    """``g`` [rows, 2 * width] holds gate then up; ``out`` [rows, width]."""
    rows, width = out.shape
    pdl = pdl_enabled()
    _silu_mul((rows, -(-width // 1024), 1), (g, out), (), (width, 1024, pdl), Options(pdl))


@triton.jit
def select_kernel(x, y, rows, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    """out[i] = x[rows[i]], plus y of that row (one rounding) where ADD."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < WIDTH
    pdl_start(PDL)
    row = tl.load(rows + i).to(tl.int64)
    v = tl.load(x + row * WIDTH + c, mask=inside, other=0.0)
    if ADD:
        d = tl.load(y + row * WIDTH + c, mask=inside, other=0.0)
        v = (v.to(tl.float32) + d.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(out + i * WIDTH + c, v, mask=inside)


_select = Launcher(select_kernel)


def select_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> None:
    """out[i] = bf16(x[rows[i]] + residual[rows[i]]); ``rows`` int32."""
    count, width = out.shape
    pdl = pdl_enabled()
    memory = (x, residual if residual is not None else x, rows, out)
    constants = (width, power_of_two_from(width), residual is not None, pdl)
    _select((count, 1, 1), memory, (), constants, Options(pdl))
