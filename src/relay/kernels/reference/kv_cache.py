"""A paged KV cache in plain arrays: per layer K and V [block, token, kv_head, dim], which is the canonical byte order."""

import numpy as np
from numpy.typing import NDArray

from relay.errors import DoesNotFitError
from relay.kernels.kv_frames import Heads
from relay.kernels.reference.arithmetic import F32, round_bfloat16, widen_bfloat16

Table = NDArray[np.int32]


class PagedKv:
    """``dtype`` "float32" stores values as they are, "bfloat16" rounds them to nearest even as they are written."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        """Raises ValueError for another dtype or block size, DoesNotFitError when the memory is not there."""
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"kv dtype {dtype!r} is neither float32 nor bfloat16")
        if block_size <= 0 or block_size % 16:
            raise ValueError(f"block size {block_size} is not a multiple of 16")
        self.block_size = block_size
        self.bfloat16 = dtype == "bfloat16"
        shape = (num_layers, 2, num_blocks, block_size, kv_heads, head_dim)
        self._item_bytes = 2 if self.bfloat16 else 4
        try:
            self._data: NDArray[np.generic] = np.zeros(shape, np.uint16 if self.bfloat16 else np.float32)
        except MemoryError:
            size = int(np.prod(shape, dtype=np.int64)) * self._item_bytes
            raise DoesNotFitError(f"a KV cache of {num_blocks} blocks needs {size} bytes") from None

    @property
    def bytes_per_token_layer(self) -> int:
        return 2 * int(np.prod(self._data.shape[4:])) * self._item_bytes

    def _places(self, table: Table, positions: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return table[positions // self.block_size], positions % self.block_size

    def write(self, layer: int, table: Table, positions: NDArray[np.int32], k: F32, v: F32) -> None:
        """Store ``k`` and ``v`` [tokens, kv_heads, dim] at ``positions`` of the sequence whose blocks are ``table``."""
        blocks, offsets = self._places(table, positions)
        for part, values in enumerate((k, v)):
            self._data[layer, part, blocks, offsets] = round_bfloat16(values) if self.bfloat16 else values

    def read(self, layer: int, table: Table, count: int) -> tuple[F32, F32]:
        """K and V of positions 0..count-1, widened to fp32. [count, kv_heads, dim] each"""
        blocks, offsets = self._places(table, np.arange(count, dtype=np.int32))
        k, v = self._data[layer, 0, blocks, offsets], self._data[layer, 1, blocks, offsets]
        return (widen_bfloat16(k), widen_bfloat16(v)) if self.bfloat16 else (k, v)

    def export(
        self, layer: int, table: Table, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        """Stored bytes of K then V, [token][kv_head][dim] each, into ``out``. Raises ValueError for another length."""
        blocks, offsets = self._places(table, np.arange(first, first + count, dtype=np.int32))
        raw = self._of(heads)[layer][:, blocks, offsets]
        target = out.cast("B")
        if len(target) != raw.nbytes:
            raise ValueError(f"{count} tokens of one layer are {raw.nbytes} bytes, not {len(target)}")
        target[:] = raw.tobytes()

    def restore(
        self, layer: int, table: Table, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        """The inverse of ``export``."""
        cache = self._of(heads)
        expected = count * 2 * int(np.prod(cache.shape[4:])) * self._item_bytes
        if data.nbytes != expected:
            raise ValueError(f"{count} tokens of one layer are {expected} bytes, not {data.nbytes}")
        blocks, offsets = self._places(table, np.arange(first, first + count, dtype=np.int32))
        values = np.frombuffer(data, self._data.dtype).reshape(2, count, *cache.shape[4:])
        cache[layer][:, blocks, offsets] = values

    def _of(self, heads: Heads | None) -> NDArray[np.generic]:
        """A view of these heads alone. Raises ValueError where there are no such."""
        if heads is None:
            return self._data
        first, count = heads
        if first < 0 or count < 1 or first + count > self._data.shape[4]:
            raise ValueError(f"heads {first} + {count} of {self._data.shape[4]}")
        return self._data[:, :, :, :, first : first + count]

    def copy_block(self, source: int, target: int) -> None:
        self._data[:, :, target] = self._data[:, :, source]
