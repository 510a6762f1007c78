"""The KV pools of all ranks as one: canonical bytes of all heads, read and written by one process without asking the others."""

import ctypes
import mmap

import numpy as np

from relay.kernels.cpu import library, records
from relay.kernels.ranks.share import pool_bytes


class RankPool:
    """One rank's pool seen from outside: as much of the C model record as moving KV needs."""

    def __init__(
        self,
        isa: str,
        memory: int,
        offset: int,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: str,
    ) -> None:
        width = heads * head_dim
        half = dtype == "bfloat16"
        self._library = library.load(isa)
        self._bytes = np.frombuffer(
            mmap.mmap(memory, pool_bytes(num_blocks, block_size, layers, width, dtype), offset=offset), np.uint8
        )
        layer_bytes = 2 * block_size * width * (2 if half else 4)
        self._model = records.Model(
            kv_heads=heads,
            head_dim=head_dim,
            num_layers=layers,
            kv=self._bytes.ctypes.data,
            layer_bytes=layer_bytes,
            block_bytes=layer_bytes * layers,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_half=int(half),
        )
        self.heads = heads
        self.block_size = block_size
        self.token_bytes = 2 * width * (2 if half else 4)

    def move(self, layer: int, table: np.ndarray, first: int, count: int, data: np.ndarray, *, write: bool) -> None:
        """Canonical K then V of this rank's heads between the pool and ``data`` (uint8). Raises ValueError."""
        function = self._library.relay_write_kv if write else self._library.relay_read_kv
        crc = ctypes.c_uint32()
        model, blocks = ctypes.addressof(self._model), table.ctypes.data
        status = function(model, layer, blocks, first, count, data.ctypes.data, ctypes.addressof(crc))
        if status:
            raise ValueError(records.ERRORS[status])


class AllPools:
    """``Backend.read_kv`` and ``write_kv`` over the pools of every rank, in rank order."""

    def __init__(self, pools: list[RankPool], layers: int) -> None:
        self._pools, self._layers = pools, layers
        self._heads = sum(pool.heads for pool in pools)
        self.token_bytes = sum(pool.token_bytes for pool in pools)

    def read(self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview) -> None:
        whole = self._whole(layer, block_table, first, count, np.frombuffer(out, np.uint8))
        if not whole.flags.writeable:
            raise ValueError("out is read-only")
        table, head = np.ascontiguousarray(block_table, np.int32), 0
        for pool in self._pools:
            part = np.empty((2, count, pool.heads, whole.shape[3]), np.uint8)
            pool.move(layer, table, first, count, part, write=False)
            whole[:, :, head : head + pool.heads] = part
            head += pool.heads

    def write(self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview) -> None:
        whole = self._whole(layer, block_table, first, count, np.frombuffer(data, np.uint8))
        table, head = np.ascontiguousarray(block_table, np.int32), 0
        for pool in self._pools:
            part = np.ascontiguousarray(whole[:, :, head : head + pool.heads])
            pool.move(layer, table, first, count, part, write=True)
            head += pool.heads

    def _whole(self, layer: int, table: np.ndarray, first: int, count: int, data: np.ndarray) -> np.ndarray:
        """``data`` as [K and V, token, head, bytes of a head], once everything is in its bounds."""
        if data.size != count * self.token_bytes:
            raise ValueError(f"{count} tokens take {count * self.token_bytes} bytes, not {data.size}")
        if not 0 <= layer < self._layers or first < 0 or count < 0:
            raise ValueError(f"layer {layer}, positions {first} + {count}")
        if first + count > len(table) * self._pools[0].block_size:
            raise ValueError(records.ERRORS[3])
        return data.reshape(2, count, self._heads, self.token_bytes // (2 * self._heads))
