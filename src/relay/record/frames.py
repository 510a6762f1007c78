"""The file format of recordings and tapes: one line of magic, then MessagePack frames, each after its length.

    relay record\\n
    u32 length, Head          who recorded what, with which source
    u32 length, frame ...     in order of time
    u32 length, End           why nothing follows, and a digest of everything before

A file without End was cut off: its process died, or still writes. One with End is exactly what was written, to the last bit, and
ends there. Nothing of a file is executed, and a frame is decoded into fixed types only. Version 1 was the JSON tape of the first
simulator; version 2 had no digest.
"""

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from relay import __version__
from relay.errors import UsageError

MAGIC = b"relay record\n"
FORMAT_VERSION = 3
DIGEST_BYTES = 16
MAX_FRAME_BYTES = 64 << 20
LENGTH_BYTES = 4

Kind = Literal["sim", "gateway", "worker"]


class BadRecording(UsageError):
    """The file is no recording, is damaged, or belongs to another version of the program."""


class Head(msgspec.Struct, frozen=True):
    """``settings``: what the core (or the world) was made from, encoded by whoever recorded it."""

    format_version: int
    kind: Kind
    name: str  # of the core, or of the seed
    commit: str
    relay: str
    settings: msgspec.Raw


class Happened(msgspec.Struct, frozen=True, array_like=True, tag="event"):
    """An event, of the type called ``name``, entered the core at ``now_ns``."""

    now_ns: int
    name: str
    event: msgspec.Raw


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What the core asked of the outside while it handled the event before."""

    value: msgspec.Raw


class Decided(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """Number and digest of the commands that the event before led to."""

    count: int
    digest: bytes


class Choices(msgspec.Struct, frozen=True, array_like=True, tag="choices"):
    """Draws of one stream of a tape, in order: index into ``labels``, and value."""

    stream: str
    labels: list[str]
    drawn: list[tuple[int, int]]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """``digest``: BLAKE2b of every byte before this frame, then of ``reason``."""

    reason: str
    digest: bytes


Frame = Happened | Answered | Decided | Choices | End

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)


class _AnyHead(msgspec.Struct):
    """As much of a head as every version has."""

    format_version: int


def head(kind: Kind, name: str, commit: str, settings: bytes) -> Head:
    return Head(FORMAT_VERSION, kind, name, commit, __version__, msgspec.Raw(settings))


def opening(recorded: Head) -> bytes:
    """The bytes a file begins with."""
    return MAGIC + encode(recorded)


def encode(frame: Head | Frame) -> bytes:
    raw = _encoder.encode(frame)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


class Content:
    """What a file holds so far, for the digest in its End."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._hash = blake2b(data, digest_size=DIGEST_BYTES)

    def add(self, data: bytes) -> None:
        self._hash.update(data)

    def end(self, reason: str) -> End:
        """The frame that ends the file."""
        hashed = self._hash.copy()
        hashed.update(reason.encode())
        return End(reason, hashed.digest())


def whole(recorded: Head, frames: Iterable[Frame], reason: str = "closed") -> bytes:
    """All bytes of a file."""
    data = opening(recorded) + b"".join(encode(frame) for frame in frames)
    return data + encode(Content(data).end(reason))


@dataclass(slots=True)
class Recording:
    """A file that was read. ``ended`` is the reason in its End, None if it was cut off."""

    path: Path
    head: Head
    frames: list[Frame]
    ended: str | None


def read(path: Path, *, cut: bool = False) -> Recording:
    """The recording at ``path``. Raises BadRecording for anything else, and for one that was cut off unless ``cut`` allows it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would wait for a writer, a device may never end
            raise BadRecording(f"{path} is no regular file")
        data = path.read_bytes()
    except OSError as error:
        raise BadRecording(f"{path}: {error.strerror or error}") from error
    if not data.startswith(MAGIC):
        if data.startswith(b'{"format": "relay-sim-tape"'):
            raise BadRecording(f"{path} has format version 1, this program reads {FORMAT_VERSION}")
        raise BadRecording(f"{path} is no recording of relay")
    raws = _split(path, data, cut)
    first = next(raws, None)
    if first is None:
        raise BadRecording(f"{path} ends before its head")
    recorded = _head(path, first[1])
    frames: list[Frame] = []
    for number, (at, raw) in enumerate(raws):
        try:
            frame = _frames.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRecording(f"{path} is damaged at frame {number}: {error}") from error
        if isinstance(frame, End):
            if frame != Content(memoryview(data)[:at]).end(frame.reason):
                raise BadRecording(
                    f"{path} is damaged: it is not what was recorded (the digest in its end mark differs)"
                )
            if at + LENGTH_BYTES + len(raw) != len(data):
                raise BadRecording(f"{path} is damaged: bytes follow its end mark")
            return Recording(path, recorded, frames, frame.reason)
        frames.append(frame)
    if not cut:
        raise BadRecording(f"{path} was cut off after {len(frames)} frames: its process died or still writes")
    return Recording(path, recorded, frames, None)


def _split(path: Path, data: bytes, cut: bool) -> Iterator[tuple[int, memoryview]]:
    """Whole frames, each with its offset. One that ends early ends the file if ``cut``, and is an error otherwise."""
    view = memoryview(data)
    at = len(MAGIC)
    while at < len(data):
        start = at + LENGTH_BYTES
        size = int.from_bytes(view[at:start], "little")
        if size > MAX_FRAME_BYTES:
            raise BadRecording(f"{path} is damaged: a frame of {size} bytes at offset {at}")
        if start + size > len(data):
            if cut:
                return
            raise BadRecording(f"{path} is truncated: it ends within the frame at offset {at}")
        yield at, view[start : start + size]
        at = start + size


def _head(path: Path, raw: memoryview) -> Head:
    try:
        version = msgspec.msgpack.decode(raw, type=_AnyHead).format_version
        if version != FORMAT_VERSION:
            raise BadRecording(f"{path} has format version {version}, this program reads {FORMAT_VERSION}")
        return msgspec.msgpack.decode(raw, type=Head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRecording(f"{path} has no readable head: {error}") from error
