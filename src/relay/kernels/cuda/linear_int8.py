"""Linear layers with int8 weights: y[m, n] = round(s[n] * chain over k ascending of x[m, k] * q[n, k]).

Defined by ``relay.kernels.reference.quantized``. The integers become 16-bit floats in registers, exactly, and feed the same
tensor-core chain as ``linear.py``'s: groups of 16 along k in ascending order, one accumulator an output, K never split. So a
product has the accumulator that the 16-bit kernel has for the same integers, whatever the tile.

Codes are stored in the order of a left operand's registers (``pack_codes``): ``int8_few`` uses them as they are read; the
kernel here puts them in order again.

Half the bytes of the weights are read: worth it for few rows; from some batch on the 16-bit kernels, and above all the library, are
faster.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.int8_few import _BF16, _FP16, _PAIRS, FewTile, few
from relay.kernels.cuda.launch import INTERPRETED, launch_options, pdl_enabled, pdl_start
from relay.kernels.cuda.linear import LinearTile, linear


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """How the products are laid over programs; changes speed, never a bit."""

    tokens: int
    outputs: int
    depth: int = 64
    warps: int = 4
    stages: int = 4


@triton.jit
def _floats(words, TYPE: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """Packed words [OUTPUTS / 16, 4 * DEPTH] as [OUTPUTS, DEPTH] of TYPE."""
    if tl.bfloat16 == TYPE:
        a, b, c, d = tl.inline_asm_elementwise(
            _BF16, _PAIRS, [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _FP16, _PAIRS, [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )
    pairs = tl.join(tl.join(a, b), tl.join(c, d))  # [.., row + 8, k + 8]
    split = tl.reshape(pairs, (OUTPUTS // 16, DEPTH // 32, 8, 4, 2, 2, 2, 2))  # tile, 32 k, row, k pair, 16 k, k
    return tl.reshape(tl.permute(split, (0, 6, 2, 1, 4, 7, 3, 5)), (OUTPUTS, DEPTH))


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
    """y[M, N] of x[M, K] (row stride x_stride) and packed w [cdiv(N, 16), cdiv(K, 32) * 128]; weights are the left operand."""
    pdl_start(PDL)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, DEPTH)
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    tile = tl.program_id(1) * (OUTPUTS // 16) + tl.arange(0, OUTPUTS // 16)
    words = tl.cdiv(K, 32) * 128
    word = tl.arange(0, DEPTH * 4)
    w_at = w + tl.minimum(tile, tl.cdiv(N, 16) - 1)[:, None].to(tl.int64) * words + word[None, :]
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        if EVEN:
            right = tl.load(x_at + k0, mask=m[:, None] < M, other=0.0)
            q = tl.load(w_at + k0 * 4)
        else:
            right = tl.load(x_at + k0, mask=(m[:, None] < M) & (k0 + k < K)[None, :], other=0.0)
            q = tl.load(w_at + k0 * 4, mask=(k0 * 4 + word < words)[None, :], other=0)
        left = _floats(q, x.dtype.element_ty, OUTPUTS, DEPTH)
        acc = tl.dot(left, tl.trans(right), acc)
    s = tl.load(scales + n, mask=n < N, other=0.0)
    out = y + m[None, :].to(tl.int64) * y_stride + n[:, None]
    tl.store(out, (acc * s[:, None]).to(y.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def tile_for(rows: int, outputs: int) -> Int8Tile | FewTile:
    """Narrow where few outputs must still fill the chip. Not tuned on a GPU yet."""
    if torch.cuda.get_device_capability()[0] != 9:
        return tile_elsewhere(rows)
    if rows > 64:
        return FewTile(128, 128, stages=4, depth=128, warps=8, wgmma=True)
    wide = 32 if outputs <= 8192 else 64
    tokens = 8 if rows <= 8 else max(16, triton.next_power_of_2(rows))
    return FewTile(tokens, wide, warps=wide // 16) if tokens <= 16 else FewTile(tokens, 64, depth=128, warps=4)


def tile_elsewhere(rows: int) -> FewTile:
    """For GPUs without Hopper's instructions or with 99 KiB of shared memory."""
    tokens = 8 if rows <= 8 else min(64, max(16, triton.next_power_of_2(rows)))
    return FewTile(tokens, 64, depth=128, stages=3, warps=4)


def linear_int8(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, tile: Int8Tile | FewTile | None = None
) -> None:
    """Write the product of x[M, K] and packed w with fp32 ``scales`` [N] into ``y`` [M, N] (16-bit, or fp32 to see it)."""
    if INTERPRETED:  # it has no tensor-core registers to fill
        codes = unpack_codes(w)[: scales.shape[0], : x.shape[1]]
        sums = torch.empty(y.shape, dtype=torch.float32)
        linear(x, codes.to(x.dtype), sums, LinearTile(16, 128, 128))
        y.copy_(sums * scales)
        return
    tile = tile or tile_for(x.shape[0], scales.shape[0])
    if isinstance(tile, FewTile):
        few(x, w, scales, y, tile)
        return
    rows, depth = x.shape
    outputs = scales.shape[0]
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
        DEPTH=tile.depth,
        EVEN=depth % tile.depth == 0,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        **launch_options(pdl),
    )


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int32 [cdiv(n, 16), cdiv(k, 32) * 128] of int8 ``codes`` [n, k]; codes past n and k are zero.

    16 outputs by 32 k are 512 bytes: lane 4 g + t of a warp has 16, in this order (k + 16, k + 8, k + 1, row + 8) from the
    place (row g, k = 2 t).
    """
    n, k = codes.shape
    tiles, steps = -(-n // 16), -(-k // 32)
    whole = torch.zeros(tiles * 16, steps * 32, dtype=torch.int8, device=codes.device)
    whole[:n, :k] = codes
    places = whole.view(tiles, 2, 8, steps, 2, 2, 4, 2)  # tile, row + 8, row, 32 k, 16 k, k + 8, k pair, k
    return places.permute(0, 3, 2, 6, 4, 5, 7, 1).reshape(tiles, -1).view(torch.int32)


def unpack_codes(words: torch.Tensor) -> torch.Tensor:
    """int8 [16 tiles, 32 steps] of ``pack_codes``'s words [tiles, steps * 128]."""
    tiles = words.shape[0]
    places = words.view(torch.int8).view(tiles, -1, 8, 4, 2, 2, 2, 2)
    return places.permute(0, 7, 2, 1, 4, 5, 3, 6).reshape(tiles * 16, -1)


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
