"""The KV pools of all ranks as one: canonical bytes of all heads, read and written by one process without asking the others."""

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np

from relay.kernels.cpu import library, records
from relay.kernels.kv_frames import Heads
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
        self.head_bytes = 2 * head_dim * (2 if half else 4)  # K and V

    def move(
        self, layer: int, heads: Heads, table: np.ndarray, first: int, count: int, data: np.ndarray, *, write: bool
    ) -> None:
        """Canonical K then V of ``heads``, counted from this rank's first, between the pool and ``data``. Raises ValueError."""
        function = self._library.relay_write_kv if write else self._library.relay_read_kv
        crc = ctypes.c_uint32()
        model, blocks = ctypes.addressof(self._model), table.ctypes.data
        status = function(model, layer, *heads, blocks, first, count, data.ctypes.data, ctypes.addressof(crc))
        if status:
            raise ValueError(records.ERRORS[status])


class AllPools:
    """``Backend.read_kv`` and ``write_kv`` over the pools of every rank, in rank order."""

    def __init__(self, pools: list[RankPool], layers: int) -> None:
        self._pools, self._layers = pools, layers
        self._heads = sum(pool.heads for pool in pools)
        self._head_bytes = pools[0].head_bytes

    def read(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None
    ) -> None:
        asked = heads or (0, self._heads)
        whole = self._whole(layer, block_table, first, count, np.frombuffer(out, np.uint8), asked)
        if not whole.flags.writeable:
            raise ValueError("out is read-only")
        table = np.ascontiguousarray(block_table, np.int32)
        for pool, at, own in self._owners(asked):
            direct = own[1] == asked[1]
            part = whole if direct else np.empty((2, count, own[1], whole.shape[3]), np.uint8)
            pool.move(layer, own, table, first, count, part, write=False)
            if not direct:
                whole[:, :, at : at + own[1]] = part

    def write(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None
    ) -> None:
        asked = heads or (0, self._heads)
        whole = self._whole(layer, block_table, first, count, np.frombuffer(data, np.uint8), asked)
        table = np.ascontiguousarray(block_table, np.int32)
        for pool, at, own in self._owners(asked):
            part = np.ascontiguousarray(whole[:, :, at : at + own[1]])
            pool.move(layer, own, table, first, count, part, write=True)

    def _owners(self, asked: Heads) -> Iterator[tuple[RankPool, int, Heads]]:
        """Every pool that has some of these heads, where they begin among those asked for, and which of its own they are."""
        begin = 0
        for pool in self._pools:
            first, last = max(asked[0], begin), min(asked[0] + asked[1], begin + pool.heads)
            if first < last:
                yield pool, first - asked[0], (first - begin, last - first)
            begin += pool.heads

    def _whole(
        self, layer: int, table: np.ndarray, first: int, count: int, data: np.ndarray, asked: Heads
    ) -> np.ndarray:
        """``data`` as [K and V, token, head, bytes of a head], once everything is in its bounds."""
        first_head, heads = asked
        if first_head < 0 or heads < 1 or first_head + heads > self._heads:
            raise ValueError(f"heads {first_head} + {heads} of {self._heads}")
        if data.size != count * heads * self._head_bytes:
            raise ValueError(
                f"{count} tokens of {heads} heads take {count * heads * self._head_bytes} bytes, not {data.size}"
            )
        if not 0 <= layer < self._layers or first < 0 or count < 0:
            raise ValueError(f"layer {layer}, positions {first} + {count}")
        if first + count > len(table) * self._pools[0].block_size:
            raise ValueError(records.ERRORS[3])
        return data.reshape(2, count, heads, self._head_bytes // 2)
