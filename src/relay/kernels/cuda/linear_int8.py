"""Linear layers with int8 weights: y[m, n] = round(s[n] * chain over k ascending of x[m, k] * q[n, k]).

Defined by ``relay.kernels.reference.quantized``. The integers become 16-bit floats in registers, exactly, and feed the same
tensor-core chain as ``linear.py``'s: groups of 16 along k in ascending order, one accumulator an output, K never split. So a
product has the accumulator that the 16-bit kernel has for the same integers, whatever the tile.

Codes are stored in the order of a left operand's registers (``pack_codes``): ``int8_product`` uses them as they are read.

Half the bytes of the weights are read: worth it for few rows; from about 128 on the 16-bit kernels, and above all the library, are
faster.
"""

import torch
import triton

from relay.kernels.cuda.int8_product import Int8Tile, product
from relay.kernels.cuda.launch import INTERPRETED
from relay.kernels.cuda.linear import LinearTile, linear

# By most rows of x, from 73 tiles on one H200 (benchmarks/results/h200/int8.json): up to 64 rows a layer of 8B takes at most 2.3 %
# longer than with the best tile for each linear. Narrow where few outputs must still fill the chip.
_NARROW = {
    8: Int8Tile(8, 32, 512, 4),
    16: Int8Tile(16, 64, 512, 4, hopper=True),
    32: Int8Tile(32, 64, 256, 6, hopper=True),
    128: Int8Tile(64, 64, 256, 4, hopper=True),
}
_WIDE = {
    8: Int8Tile(8, 64, 256, 4),
    16: Int8Tile(16, 64, 256, 4),
    32: Int8Tile(32, 128, 256, 4, hopper=True),
    64: Int8Tile(64, 128, 128, 4, hopper=True),
}
_MANY = Int8Tile(128, 128, 128, 4, hopper=True)


def tile_for(rows: int, outputs: int) -> Int8Tile:
    """The tile of this device for ``rows`` of x."""
    if torch.cuda.get_device_capability()[0] != 9:
        return tile_elsewhere(rows)
    return tile_on_hopper(rows, outputs)


def tile_on_hopper(rows: int, outputs: int) -> Int8Tile:
    tiles = _NARROW if outputs <= 8192 else _WIDE
    return next((tile for most, tile in tiles.items() if rows <= most), _MANY)


def tile_elsewhere(rows: int) -> Int8Tile:
    """For GPUs without Hopper's instructions or with 99 KiB of shared memory. Not measured."""
    tokens = 8 if rows <= 8 else min(64, max(16, triton.next_power_of_2(rows)))
    return Int8Tile(tokens, 64, depth=128, stages=3)


def linear_int8(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, tile: Int8Tile | None = None
) -> None:
    """Write the product of x[M, K] and packed w with fp32 ``scales`` [N] into ``y`` [M, N] (16-bit, or fp32 to see it)."""
    if INTERPRETED:  # it has no tensor-core registers to fill
        codes = unpack_codes(w)[: scales.shape[0], : x.shape[1]]
        sums = torch.empty(y.shape, dtype=torch.float32)
        linear(x, codes.to(x.dtype), sums, LinearTile(16, 128, 128))
        y.copy_(sums * scales)
        return
    product(x, w, scales, y, tile or tile_for(x.shape[0], scales.shape[0]))


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
