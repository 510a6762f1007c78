"""RMS norm of rows, alone or after the residual addition it always follows in a decoder layer.

Canonical order: x' = bf16(x + y) (fp32 sum of two bf16 values); the sum of squares of x' runs in fp32 over one fixed block of
next_power_of_2(width) columns reduced by ``tl.sum`` in a program whose number of warps depends on the width alone;
s = 1 / sqrt(sum / width + eps) with IEEE division and square root; out = bf16((x' * s) * weight), weight in fp32.
One program a row, so a row never meets another. Batch size is no parameter of any kernel here.
"""

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import pdl_enabled, pdl_start, power_of_two_from
from relay.kernels.cuda.launcher import Launcher, Options


@triton.jit
def square_root(v):
    """IEEE square root (``tl.sqrt`` is the approximate instruction)."""
    return tl.sqrt_rn(v)


@triton.jit
def norm_kernel(
    x,
    y,
    weight,
    out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row r: v = x[r], or where ADD v = x[r] + y[r], written back to x; out[r] = norm(v) * weight."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < WIDTH
    g = tl.load(weight + c, mask=inside, other=0.0)
    pdl_start(PDL)
    v = tl.load(x + r * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        d = tl.load(y + r * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
        rounded = (v + d).to(x.dtype.element_ty)
        tl.store(x + r * WIDTH + c, rounded, mask=inside)
        v = rounded.to(tl.float32)
    total = tl.sum(v * v, 0)
    s = tl.div_rn(1.0, square_root(tl.div_rn(total, float(WIDTH)) + eps))
    tl.store(out + r * WIDTH + c, ((v * s) * g).to(out.dtype.element_ty), mask=inside)


_norm = Launcher(norm_kernel)


def norm_warps(width: int) -> int:
    """Warps of a row's program: part of the canon, a function of the width alone."""
    return 4 if width <= 2048 else 8


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out[r] = norm(x[r]) * weight for every row of ``out``; ``residual`` is added to x first, and the sum stored in x.

    ``out`` may be x where there is no residual: a row is read before it is written.
    """
    count, width = out.shape
    pdl = pdl_enabled()
    memory = (x, residual if residual is not None else x, weight, out)
    fixed = (eps, width, power_of_two_from(width), residual is not None, pdl)
    _norm((count, 1, 1), memory, (), fixed, Options(pdl, norm_warps(width)))


@triton.jit
def add_kernel(x, y, COUNT: tl.constexpr, PDL: tl.constexpr):
    """x = bf16(x + y) over flat blocks of COUNT elements a program; the tensor is a whole number of blocks."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    pdl_start(PDL)
    a = tl.load(x + at).to(tl.float32)
    b = tl.load(y + at).to(tl.float32)
    tl.store(x + at, (a + b).to(x.dtype.element_ty))


@triton.jit
def bias_kernel(y, bias, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y[r] = bf16(y[r] + bias), one program a row block."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < WIDTH
    b = tl.load(bias + c, mask=inside, other=0.0)
    pdl_start(PDL)
    v = tl.load(y + r * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + r * WIDTH + c, (v + b).to(y.dtype.element_ty), mask=inside)


_add, _bias = Launcher(add_kernel), Launcher(bias_kernel)


def add_residual(x: torch.Tensor, y: torch.Tensor) -> None:
    """x = bf16(x + y); shapes [rows, width], contiguous."""
    width = x.shape[1]
    count = 64 if width % 64 == 0 else 16
    pdl = pdl_enabled()
    _add((x.numel() // count, 1, 1), (x, y), (), (count, pdl), Options(pdl))


def add_bias(y: torch.Tensor, bias: torch.Tensor) -> None:
    """y[r] = bf16(y[r] + bias) for every row; bias fp32."""
    rows, width = y.shape
    pdl = pdl_enabled()
    _bias((rows, -(-width // 1024), 1), (y, bias), (), (width, 1024, pdl), Options(pdl))
