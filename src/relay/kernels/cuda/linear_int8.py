"""Linear layers with int8 weights: y[m, n] = round(s[n] * chain over k ascending of x[m, k] * q[n, k]).

Defined by ``relay.kernels.reference.quantized``. The integers become 16-bit floats in registers, exactly, and feed the same
tensor-core chain as ``linear.py``'s: groups of 16 along k in ascending order, one accumulator an output, K never split. So a
product has the accumulator that the 16-bit kernel has for the same integers, whatever the tile.

Codes are stored two a word, for each 128 k as 64 words: the low byte of word j is code j, the high one code 64 + j; so a word gives
two operands of 64 neighbouring k and no byte is moved. (Where single bytes are loaded, or bytes are joined, the compiler makes
operands four wide, whose tensor-core steps take 16 k that are not neighbours; tests/cuda/test_compile_only.py watches that.)

Half the bytes of the weights are read: worth it for few rows; from some batch on the 16-bit kernels, and above all the library, are
faster.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import launch_options, pdl_enabled, pdl_start

BLOCK = 128  # k of one stored block


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """How the products are laid over programs; changes speed, never a bit."""

    tokens: int
    outputs: int
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
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[M, N] of x[M, K] (row stride x_stride) and packed w [N, cdiv(K, 128) * 64]; weights are the left operand."""
    pdl_start(PDL)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, 64)
    blocks = tl.cdiv(K, 128)
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    w_at = w + tl.minimum(n, N - 1)[:, None].to(tl.int64) * (blocks * 64) + k[None, :]
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        if EVEN:
            first = tl.load(x_at + block * 128, mask=m[:, None] < M, other=0.0)
            second = tl.load(x_at + block * 128 + 64, mask=m[:, None] < M, other=0.0)
        else:
            left = K - block * 128
            first = tl.load(x_at + block * 128, mask=(m[:, None] < M) & (k < left)[None, :], other=0.0)
            second = tl.load(x_at + block * 128 + 64, mask=(m[:, None] < M) & (k + 64 < left)[None, :], other=0.0)
        q = tl.load(w_at + block * 64)
        low = ((q << 8).to(tl.int16) >> 8).to(tl.float32).to(x.dtype.element_ty)
        high = (q >> 8).to(tl.float32).to(x.dtype.element_ty)
        acc = tl.dot(low, tl.trans(first), acc)
        acc = tl.dot(high, tl.trans(second), acc)
    s = tl.load(scales + n, mask=n < N, other=0.0)
    out = y + m[None, :].to(tl.int64) * y_stride + n[:, None]
    tl.store(out, (acc * s[:, None]).to(y.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def tile_for(rows: int, outputs: int) -> Int8Tile:
    """Narrow where few outputs must still fill the chip. Not tuned on a GPU yet."""
    wide = 32 if outputs <= 5120 else 64
    if rows <= 16:
        return Int8Tile(16, wide, stages=6)
    if rows <= 32:
        return Int8Tile(32, wide)
    if rows <= 64:
        return Int8Tile(64, 64)
    return Int8Tile(128, 128, 8, 3)


def linear_int8(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, tile: Int8Tile) -> None:
    """Write the product of x[M, K] and packed w with fp32 ``scales`` [N] into ``y`` [M, N] (16-bit, or fp32 to see it)."""
    rows, depth = x.shape
    outputs = w.shape[0]
    pdl = pdl_enabled()
    linear_int8_kernel[(triton.cdiv(rows, tile.tokens), triton.cdiv(outputs, tile.outputs))](
        x,
        w,
        scales,
        y,
        rows,
        outputs,
        depth,
        x.stride(0),
        y.stride(0),
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        EVEN=depth % BLOCK == 0,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        **launch_options(pdl),
    )


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int16 [n, cdiv(k, 128) * 64] of int8 ``codes`` [n, k]; codes past k are zero."""
    n, k = codes.shape
    blocks = -(-k // BLOCK)
    whole = torch.zeros(n, blocks * BLOCK, dtype=torch.int8, device=codes.device)
    whole[:, :k] = codes
    halves = whole.view(n, blocks, 2, BLOCK // 2)
    return halves.permute(0, 1, 3, 2).contiguous().view(torch.int16).view(n, -1)


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [n, k], fp32 [n]) of a 16-bit ``w`` on its device, the bits of the definition; some rows at a time."""
    codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scales = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
    for first in range(0, w.shape[0], 4096):
        part = w[first : first + 4096].float()
        largest = part.abs().amax(1) / 127
        scale = torch.where(largest == 0, torch.ones_like(largest), largest)
        scales[first : first + 4096] = scale
        codes[first : first + 4096] = (part / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes, scales
