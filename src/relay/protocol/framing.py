"""Length-prefixed MessagePack frames, sans-IO: bytes in, messages out.

Wire: a header of three little-endian u32 (length, length with every bit flipped, CRC32 of the payload), then ``length`` bytes of
MessagePack. A length over ``MAX_FRAME_BYTES``, or one that is not confirmed, closes the connection before anything is allocated.
The second word is there because a damaged length would otherwise be waited for; the third because a damaged token id would still be
one, and TCP's 16-bit sum lets such things through.
"""

import struct
from typing import Any
from zlib import crc32

import msgspec

MAX_FRAME_BYTES = 16 * 1024 * 1024
HEADER_BYTES = 12
_HEADER = struct.Struct("<III")
_WORD = struct.Struct("<I")
_ALL_BITS = 0xFFFFFFFF


class FramingError(ValueError):
    """The peer sent something that is not a frame of this protocol, or a damaged one; close the connection."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame. Raises FramingError for a message over the limit."""
    payload = _encoder.encode(message)
    size = len(payload)
    if size > MAX_FRAME_BYTES:
        raise FramingError(f"message of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(size, size ^ _ALL_BITS, crc32(payload)) + payload


def payload_size(data: bytes | bytearray, offset: int = 0, limit: int = MAX_FRAME_BYTES) -> int | None:
    """Of the frame that begins at ``offset``; None while its header is not whole. Raises FramingError as soon as what is there
    can't be one, after four bytes at the earliest."""
    there = len(data) - offset
    if there < 4:
        return None
    (size,) = _WORD.unpack_from(data, offset)
    if there >= 8 and size ^ _WORD.unpack_from(data, offset + 4)[0] != _ALL_BITS:
        raise FramingError("no frame of this protocol, or a damaged one")
    if size > limit:
        raise FramingError(f"frame of {size} bytes is over the limit of {limit}")
    return int(size) if there >= HEADER_BYTES else None


class FrameDecoder:
    """Collects bytes of one connection and yields the complete messages of ``types`` (a union of tagged structs).

    ``limit``: the longest frame that is waited for; it may be raised when the peer has said who it is.
    """

    def __init__(self, types: Any, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._decoder = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Any]:
        """Add ``data``; return the messages it completes. Raises FramingError, whatever else ``data`` completes."""
        buffer = self._buffer
        buffer += data
        messages: list[Any] = []
        offset = 0
        while (size := payload_size(buffer, offset, self.limit)) is not None:
            end = offset + HEADER_BYTES + size
            if len(buffer) < end:
                break
            messages.append(self._decode(offset, end))
            offset = end
        if offset:
            del buffer[:offset]
        return messages

    def _decode(self, offset: int, end: int) -> Any:
        start = offset + HEADER_BYTES
        with memoryview(self._buffer) as view, view[start:end] as payload:
            if crc32(payload) != _HEADER.unpack_from(view, offset)[2]:
                raise FramingError("a frame's checksum is wrong")
            try:
                return self._decoder.decode(payload)
            except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested too deeply
                raise FramingError(f"bad frame: {error}") from error
