"""KV between blocks and frames, with the checksum taken in the copy itself where the backend can do that."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from relay.kernels.kv_frames import Heads, KvRange, Place, Span, payload_digest
from relay.transfer.channel import Channel
from relay.transfer.contract import KvStore, Layout, read_frame_kv, write_frame_kv
from relay.transfer.frame import FLAG_DIGEST, Checksum, Header

TOGETHER = 16  # frames of one launch


class FusedStore(Protocol):
    """A backend whose copies return the CRC32C of the bytes they moved. ``write_kv_crc`` reads each byte of ``data`` once."""

    def read_kv_crc(self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview) -> int: ...

    def write_kv_crc(self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview) -> int: ...


class Copying(Protocol):
    """Copies queued on a device's copy stream."""

    def wait(self) -> list[int]:
        """Return when all bytes are where they should be: ``kv_frames.payload_digest`` of each frame. Raises DeviceLostError."""
        ...

    def ended(self) -> bool:
        """Whether ``wait`` returns or raises at once."""
        ...


class StagedStore(Protocol):
    """A backend whose blocks lie on a device: copies are queued on a stream of their own and compute never waits for them.

    ``stage`` gathers frames into host memory (pinned if it was registered) or spans of device memory, after the events of their
    layers' writes. ``collect`` scatters frames into blocks. Both return at once, and run in the order they were called in; both
    digest the bytes on the way. The memory must stay as it is until the copy was waited for.
    """

    @property
    def stage_depth(self) -> int:
        """Copies of one connection worth having under way at once."""
        ...

    def register(self, region: memoryview) -> None:
        """``region``, mapped by both engines, is about to be copied from and to: pin it."""
        ...

    def unregister(self, region: memoryview) -> None: ...

    def allocate(self, size: int) -> memoryview:
        """Pinned memory to copy from and to, as long as it is referenced."""
        ...

    def stage(self, frames: Sequence[tuple[KvRange, Place]]) -> Copying: ...

    def collect(self, frames: Sequence[tuple[KvRange, Place]]) -> Copying: ...


class Reading:
    """Copies of frames out of the blocks that have been begun."""

    __slots__ = ("_copying", "_values", "flags")

    def __init__(self, values: list[int], copying: Copying | None) -> None:
        self._values = values
        self._copying = copying
        self.flags = 0 if copying is None else FLAG_DIGEST  # of the frames: what their checksums are

    def ended(self) -> bool:
        """Whether ``finish`` does not wait."""
        return self._copying is None or self._copying.ended()

    def finish(self) -> list[int]:
        """Wait for it; the checksum of each frame."""
        return self._values if self._copying is None else self._copying.wait()


class Wanted(NamedTuple):
    """A KV frame to be read: its payload goes to ``out``."""

    header: Header
    block_table: np.ndarray
    out: Place


class Arrived(NamedTuple):
    """A KV frame whose payload is there and whose range was admitted."""

    header: Header
    block_table: np.ndarray
    payload: Place
    expected: int


class ChecksummedStore:
    """Reads and writes KV together with its checksum."""

    def __init__(self, store: KvStore, layout: Layout, checksum: Checksum) -> None:
        fused = hasattr(store, "read_kv_crc") and hasattr(store, "write_kv_crc")
        staged = hasattr(store, "stage") and hasattr(store, "collect")
        self._store = store
        self._layout = layout
        self._fused = cast(FusedStore, store) if fused else None
        self._staged = cast(StagedStore, store) if staged else None
        self._checksum = checksum
        self.parts: tuple[Heads, ...] = getattr(store, "kv_parts", ())
        """Ranges of heads that lie together where KV is read from: each frame is to have heads of one. None: all do."""

    @property
    def depth(self) -> int:
        """Frames worth having under way at once: one where copying is done by the calling thread itself."""
        return 1 if self._staged is None else max(1, self._staged.stage_depth)

    @property
    def together(self) -> int:
        """Frames of one ``read``, at most: where a launch costs more than its bytes, several share one."""
        return 1 if self._staged is None else TOGETHER

    def prepare(self, channel: Channel) -> None:
        """Frames will be copied from or to memory of ``channel``."""
        if self._staged is not None:
            channel.lend(self._staged.allocate)
            if channel.region is not None:
                self._staged.register(channel.region)

    def forget(self, channel: Channel) -> None:
        """None is copied any more."""
        if self._staged is not None and channel.region is not None:
            self._staged.unregister(channel.region)

    def read(self, frames: Sequence[Wanted]) -> Reading:
        """Begin to fill the places of ``frames``."""
        if self._staged is not None:
            return Reading(
                [], self._staged.stage([(self._range(one.header, one.block_table), one.out) for one in frames])
            )
        return Reading([self._read(*one) for one in frames], None)

    def _read(self, header: Header, block_table: np.ndarray, out: Place) -> int:
        assert isinstance(out, memoryview), "only a device reads into a device's memory"
        heads = self._layout.heads_of(header)
        if self._fused is not None and header.layers == 1 and heads is None:
            return self._fused.read_kv_crc(header.layer, block_table, header.first_token, header.token_count, out)
        read_frame_kv(self._store, header, block_table, out, heads)
        return self._checksum(out, 0)

    def write(self, frames: Sequence[Arrived]) -> list[str]:
        """Fill the blocks: what is wrong with each frame, or an empty string. The blocks of a damaged one must not be used."""
        if self._staged is not None and all(frame.header.flags & FLAG_DIGEST for frame in frames):
            ranges = [(self._range(frame.header, frame.block_table), frame.payload) for frame in frames]
            found = self._staged.collect(ranges).wait()
            return [_problem(actual, frame.expected) for actual, frame in zip(found, frames, strict=True)]
        return [self._write(frame) for frame in frames]

    def _write(self, frame: Arrived) -> str:
        header, table, data, expected = frame
        if isinstance(data, Span):
            return "its payload lies on a device, this engine has none"
        heads = self._layout.heads_of(header)
        if header.flags & FLAG_DIGEST:
            actual = payload_digest(data)
        elif self._fused is not None and header.layers == 1 and heads is None:
            actual = self._fused.write_kv_crc(header.layer, table, header.first_token, header.token_count, data)
            return _problem(actual, expected)
        else:
            actual = self._checksum(data, 0)
        if actual == expected:
            write_frame_kv(self._store, header, table, data, heads)
        return _problem(actual, expected)

    def _range(self, header: Header, block_table: np.ndarray) -> KvRange:
        heads = self._layout.heads_of(header)
        return KvRange(header.layer, header.layers, header.first_token, header.token_count, block_table, heads)


def _problem(actual: int, expected: int) -> str:
    return "" if actual == expected else f"payload checksum {actual:08x}, frame says {expected:08x}"
