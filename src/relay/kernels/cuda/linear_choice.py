"""Which implementation computes a linear layer at which number of rows: Triton tiles for few rows, the library for many.

cuBLASLt that may not split K computes the canonical chain (measured on an H200 for every shape and number of rows tried), but
its choice of kernel is not ours to know, so it is used only at numbers of rows where ``LinearLayer.test`` has seen its bits equal
the Triton kernel's on this very weight and device; other batches are padded up to such a number, and a shape that fails keeps to
Triton. At few rows its kernels without split-K can be ten times too slow, whatever their bits.
"""

from bisect import bisect_left

import torch

from relay.kernels.cuda.launch import HOPPER_SHARED, shared_limit
from relay.kernels.cuda.linear import LinearTile, linear

_TALL = LinearTile(128, 128, 64, 8, 4, tma=True)

# Fastest of 14 tiles on one H200 (benchmarks/results/h200/linear.json): 16, then 32, then 64 rows.
_WIDE = {
    16: LinearTile(16, 64, 128, 4, 5, swap=True, tma=True),
    32: LinearTile(32, 128, 64, 4, 5, swap=True, tma=True),
    64: LinearTile(64, 128, 64, 8, 5, swap=True, tma=True),
}
_NARROW = {
    16: LinearTile(16, 32, 128, 4, 8),
    32: LinearTile(32, 32, 256, 4, 4, tma=True),
    64: LinearTile(64, 32, 256, 4, 4, tma=True),
}
_NARROW_DEEP = {**_NARROW, 16: LinearTile(16, 32, 256, 4, 6, tma=True)}


def tiles_for(outputs: int, depth: int, shared: int) -> dict[int, LinearTile]:
    """The tile for at most 16, 32 and 64 rows: narrow where few outputs must still fill the chip.

    ``shared``: bytes of shared memory that a program may have.
    """
    if shared < HOPPER_SHARED:
        if outputs > 5120:
            return {
                16: _elsewhere(16, 64, 128, shared),
                **{rows: _elsewhere(rows, 64, 64, shared) for rows in (32, 64)},
            }
        return {**{rows: _elsewhere(rows, 32, 128, shared) for rows in (16, 32)}, 64: _elsewhere(64, 32, 64, shared)}
    if depth < 2048:
        return {16: _WIDE[16], 32: _NARROW[64], 64: _NARROW[64]}
    if outputs > 5120:
        return _WIDE
    return _NARROW_DEEP if depth > 8192 else _NARROW


def tall_tile(shared: int) -> LinearTile:
    """The tile for more rows, and what the library is compared with."""
    return _TALL if shared >= HOPPER_SHARED else _elsewhere(128, 64, 64, shared)


def _elsewhere(tokens: int, outputs: int, depth: int, shared: int) -> LinearTile:
    """Without the bulk copies that Ampere lacks; stages, which keep one step fewer, for half of ``shared``, so that two programs
    share a multiprocessor. Not measured."""
    step = 2 * (tokens + outputs) * depth
    return LinearTile(tokens, outputs, depth, 4, min(8, 1 + shared // 2 // step))


def library_from(outputs: int, depth: int) -> int:
    """Rows from which on the library is at least as fast."""
    return 65 if depth < 2048 or outputs > 65536 else 17


def row_counts(largest: int) -> list[int]:
    """Numbers of rows at which the library is tested: fine for decode batches, then steps of an eighth of the size.

    The last is the first that is not below ``largest``.
    """
    counts = [32, 48, 64, 96, 128, 160, 192, 224, 256]
    while counts[-1] < largest:
        counts.append(counts[-1] + max(64, 1 << (counts[-1].bit_length() - 4)))
    return counts[: bisect_left(counts, largest) + 1]


def use_exact_library() -> None:
    """Route ``torch.mm`` to cuBLASLt and forbid it to split K or to reduce in 16 bits. Process-wide; called once at load."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


class LinearLayer:
    """One weight shape: what is allowed and what is chosen."""

    def __init__(self, outputs: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.outputs, self.depth = outputs, depth
        self._type = dtype
        shared = shared_limit()
        self._tiles, self._tall = tiles_for(outputs, depth, shared), tall_tile(shared)
        self._from = library_from(outputs, depth)
        self.tested: list[int] = []
        self.failed: list[int] = []
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def test(self, w: torch.Tensor, largest: int) -> None:
        """Compare the library with the Triton kernel at every number of rows up to ``largest``."""
        counts = row_counts(largest)
        x = probing_rows(counts[-1], self.depth, w.device, self._type)
        reference = torch.empty(counts[-1], self.outputs, dtype=self._type, device=w.device)
        linear(x, w, reference, self._tall)
        got = torch.empty_like(reference)
        for rows in counts:
            got[:rows].fill_(float("nan"))
            torch.mm(x[:rows], w.t(), out=got[:rows])
            (self.tested if torch.equal(got[:rows], reference[:rows]) else self.failed).append(rows)

    def padded(self, rows: int) -> int | None:
        """The tested number of rows at which the library takes ``rows``; None: Triton does."""
        if rows < self._from:
            return None
        index = bisect_left(self.tested, rows)
        return self.tested[index] if index < len(self.tested) else None

    def __call__(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rows: int) -> None:
        """y[:rows] = x[:rows] @ w.T; x and y are whole buffers, whose rows after ``rows`` hold anything and may be overwritten."""
        if rows == 0:
            return
        padded = self.padded(rows)
        if padded is not None and padded <= x.shape[0]:
            torch.mm(self._first(x, padded), self._first(w, 0), out=self._first(y, padded))
            return
        for size, tile in self._tiles.items():
            if rows <= size:
                linear(x[:rows], w, y[:rows], tile)
                return
        linear(x[:rows], w, y[:rows], self._tall)

    def _first(self, matrix: torch.Tensor, rows: int) -> torch.Tensor:
        """The first ``rows`` of a buffer; with 0 a weight, transposed. Kept: a view costs as much of a processor as a launch."""
        key = (matrix.data_ptr(), rows)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = matrix[:rows] if rows else matrix.t()
        return view

    def forget(self) -> None:
        """Buffers are about to move."""
        self._views.clear()


def probing_rows(rows: int, depth: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values over several binades, so that another order of additions shows in the rounded result."""
    generator = torch.Generator(device=device).manual_seed(depth)
    x = torch.randn(rows, depth, device=device, generator=generator)
    scale = torch.randint(-3, 4, (1, depth), device=device, generator=generator)
    return (x * torch.exp2(scale.float())).to(dtype)
