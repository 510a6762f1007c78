"""KV between blocks and frames, with the checksum taken in the copy itself where the backend can do that."""

from typing import Protocol, cast

import numpy as np

from relay.transfer.contract import KvStore, read_frame_kv, write_frame_kv
from relay.transfer.frame import Checksum, FrameError, Header


class FusedStore(Protocol):
    """A backend whose copies return the CRC32C of the bytes they moved. ``write_kv_crc`` reads each byte of ``data`` once."""

    def read_kv_crc(self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview) -> int: ...

    def write_kv_crc(self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview) -> int: ...


class Copying(Protocol):
    """A copy queued on a device's copy stream."""

    def wait(self) -> None:
        """Return when its bytes are where they should be. Raises DeviceLostError."""
        ...


class StagedStore(Protocol):
    """A backend whose blocks lie on a device: copies are queued on a stream of their own and compute never waits for them.

    ``stage`` gathers positions of ``layers`` layers from ``layer`` on, one after the other, into ``out``, which is host memory,
    pinned if it was registered: it runs after the event of the layer's write. ``collect`` copies ``data`` to the device and
    scatters it into blocks. Both return at once, and run in the order they were called in. The memory must stay as it is until
    the copy was waited for.
    """

    @property
    def stage_depth(self) -> int:
        """Copies of one connection worth having under way at once."""
        ...

    def register(self, region: memoryview) -> None:
        """``region``, mapped by both engines, is about to be copied from and to: pin it."""
        ...

    def unregister(self, region: memoryview) -> None: ...

    def stage(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, layers: int = 1
    ) -> Copying: ...

    def collect(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, layers: int = 1
    ) -> Copying: ...


class Reading:
    """One copy out of the blocks that has been begun."""

    __slots__ = ("_checksum", "_copying", "_out", "_value")

    def __init__(self, value: int, copying: Copying | None, out: memoryview, checksum: Checksum) -> None:
        self._value = value
        self._copying = copying
        self._out = out
        self._checksum = checksum

    def finish(self) -> int:
        """Wait for it; the checksum of what was read."""
        if self._copying is None:
            return self._value
        self._copying.wait()
        return self._checksum(self._out, 0)


class ChecksummedStore:
    """Reads and writes KV together with its checksum."""

    def __init__(self, store: KvStore, checksum: Checksum) -> None:
        fused = hasattr(store, "read_kv_crc") and hasattr(store, "write_kv_crc")
        staged = hasattr(store, "stage") and hasattr(store, "collect")
        self._store = store
        self._fused = cast(FusedStore, store) if fused else None
        self._staged = cast(StagedStore, store) if staged else None
        self._checksum = checksum

    @property
    def depth(self) -> int:
        """Reads worth having under way at once: one where reading is done by the reading thread itself."""
        return 1 if self._staged is None else max(1, self._staged.stage_depth)

    def register(self, region: memoryview | None) -> None:
        """Shared memory that frames will be copied from or to."""
        if self._staged is not None and region is not None:
            self._staged.register(region)

    def unregister(self, region: memoryview | None) -> None:
        if self._staged is not None and region is not None:
            self._staged.unregister(region)

    def read(self, header: Header, block_table: np.ndarray, out: memoryview) -> Reading:
        """Begin to fill ``out`` with the payload that ``header`` names."""
        layer, first, count = header.layer, header.first_token, header.token_count
        if self._staged is not None:
            copying = self._staged.stage(layer, block_table, first, count, out, header.layers)
            return Reading(0, copying, out, self._checksum)
        if self._fused is not None and header.layers == 1:
            value = self._fused.read_kv_crc(layer, block_table, first, count, out)
        else:
            read_frame_kv(self._store, header, block_table, out)
            value = self._checksum(out, 0)
        return Reading(value, None, out, self._checksum)

    def write(self, header: Header, block_table: np.ndarray, data: memoryview, expected: int) -> None:
        """Fill the blocks from ``data``. Raises FrameError if it is damaged: what then lies in the blocks must not be used."""
        layer, first, count = header.layer, header.first_token, header.token_count
        if self._fused is not None and header.layers == 1:
            actual = self._fused.write_kv_crc(layer, block_table, first, count, data)
        else:
            actual = self._checksum(data, 0)
            if actual == expected and self._staged is not None:
                self._staged.collect(layer, block_table, first, count, data, header.layers).wait()
            elif actual == expected:
                write_frame_kv(self._store, header, block_table, data)
        if actual != expected:
            raise FrameError(f"payload checksum {actual:08x}, frame says {expected:08x}")
