"""KV between blocks and frames, with the checksum taken in the copy itself where the backend can do that."""

from typing import Protocol, cast

import numpy as np

from relay.transfer.contract import KvStore
from relay.transfer.frame import Checksum, FrameError


class FusedStore(Protocol):
    """A backend whose copies return the CRC32C of the bytes they moved. ``write_kv_crc`` reads each byte of ``data`` once."""

    def read_kv_crc(self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview) -> int: ...

    def write_kv_crc(self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview) -> int: ...


class ChecksummedStore:
    """Reads and writes KV together with its checksum."""

    def __init__(self, store: KvStore, checksum: Checksum) -> None:
        fused = hasattr(store, "read_kv_crc") and hasattr(store, "write_kv_crc")
        self._store = store
        self._fused = cast(FusedStore, store) if fused else None
        self._checksum = checksum

    def read(self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview) -> int:
        """Fill ``out`` from the blocks; returns its checksum."""
        if self._fused is not None:
            return self._fused.read_kv_crc(layer, block_table, first, count, out)
        self._store.read_kv(layer, block_table, first, count, out)
        return self._checksum(out, 0)

    def write(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, expected: int
    ) -> None:
        """Fill the blocks from ``data``. Raises FrameError if it is damaged: what then lies in the blocks must not be used."""
        if self._fused is not None:
            actual = self._fused.write_kv_crc(layer, block_table, first, count, data)
        else:
            actual = self._checksum(data, 0)
            if actual == expected:
                self._store.write_kv(layer, block_table, first, count, data)
        if actual != expected:
            raise FrameError(f"payload checksum {actual:08x}, frame says {expected:08x}")
