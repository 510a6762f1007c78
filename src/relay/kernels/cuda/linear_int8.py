"""Linear layers with int8 weights: y[m, n] = round(s[n] * chain over k ascending of x[m, k] * q[n, k]).

Defined by ``relay.kernels.reference.quantized``. The integers become 16-bit floats in registers, exactly, and feed the same
tensor-core chain as ``linear.py``'s: groups of 16 along k in ascending order, one accumulator an output, K never split. So a
product has the accumulator that the 16-bit kernel has for the same integers, whatever the tile. Half the bytes of the weights are
read: worth it for few rows; from some batch on the 16-bit kernels, and above all the library, are faster.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import launch_options, pdl_enabled, pdl_start


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """How the products are laid over programs; changes speed, never a bit."""

    tokens: int
    outputs: int
    depth: int
    warps: int = 4
    stages: int = 4


@triton.jit(do_not_specialize=["M"])
def linear_int8_kernel(
    x,
    w,
    scales,
    y,
    M,
    N,
    K,
    x_stride,
    y_stride,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[M, N] of x[M, K] (row stride x_stride) and int8 w[N, K]; weights are the left operand, converted in registers.

    ``w`` is read two codes a word: from single bytes the compiler makes operands four wide, whose tensor-core steps take 16 k
    that are not neighbours (tests/cuda/test_compile_only.py watches that).
    """
    pdl_start(PDL)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, DEPTH)
    pair = tl.arange(0, DEPTH // 2)
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    w_at = w + tl.minimum(n, N - 1)[:, None].to(tl.int64) * (K // 2) + pair[None, :]
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        if EVEN:
            a = tl.load(x_at + k0, mask=m[:, None] < M, other=0.0)
            q = tl.load(w_at + k0 // 2)
        else:
            a = tl.load(x_at + k0, mask=(m[:, None] < M) & (k0 + k < K)[None, :], other=0.0)
            q = tl.load(w_at + k0 // 2, mask=(k0 + pair * 2 < K)[None, :], other=0)
        low = ((q << 8).to(tl.int16) >> 8).to(tl.float32).to(x.dtype.element_ty)
        high = (q >> 8).to(tl.float32).to(x.dtype.element_ty)
        acc = tl.dot(tl.reshape(tl.join(low, high), (OUTPUTS, DEPTH)), tl.trans(a), acc)
    s = tl.load(scales + n, mask=n < N, other=0.0)
    out = y + m[None, :].to(tl.int64) * y_stride + n[:, None]
    tl.store(out, (acc * s[:, None]).to(y.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def tile_for(rows: int, outputs: int) -> Int8Tile:
    """Narrow where few outputs must still fill the chip. Not tuned on a GPU yet."""
    wide = 32 if outputs <= 5120 else 64
    if rows <= 16:
        return Int8Tile(16, wide, 256)
    if rows <= 32:
        return Int8Tile(32, wide, 128)
    if rows <= 64:
        return Int8Tile(64, 64, 128)
    return Int8Tile(128, 128, 64, 8, 3)


def linear_int8(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, tile: Int8Tile) -> None:
    """Write the product of x[M, K] and int8 w[N, K] with fp32 ``scales`` [N] into ``y`` [M, N] (16-bit, or fp32 to see it)."""
    rows, depth = x.shape
    outputs = w.shape[0]
    pdl = pdl_enabled()
    linear_int8_kernel[(triton.cdiv(rows, tile.tokens), triton.cdiv(outputs, tile.outputs))](
        x,
        w.view(torch.int16),
        scales,
        y,
        rows,
        outputs,
        depth,
        x.stride(0),
        y.stride(0),
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        EVEN=depth % tile.depth == 0,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        **launch_options(pdl),
    )


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [n, k], fp32 [n]) of a 16-bit ``w`` on its device, the bits of the definition; a panel of rows at a time."""
    codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scales = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
    for first in range(0, w.shape[0], 4096):
        part = w[first : first + 4096].float()
        largest = part.abs().amax(1) / 127
        scale = torch.where(largest == 0, torch.ones_like(largest), largest)
        scales[first : first + 4096] = scale
        codes[first : first + 4096] = (part / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes, scales
