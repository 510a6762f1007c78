"""Length-prefixed MessagePack frames, sans-IO: bytes in, messages out.

Wire: 4 bytes little-endian length, then that many bytes of MessagePack. A length over ``MAX_FRAME_BYTES`` closes the
connection before anything is allocated.
"""

from typing import Any

import msgspec

MAX_FRAME_BYTES = 16 * 1024 * 1024


class FramingError(ValueError):
    """The peer sent something that is not a frame of this protocol; close the connection."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame. Raises FramingError for a message over the limit."""
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    size = len(buffer) - 4
    if size > MAX_FRAME_BYTES:
        raise FramingError(f"message of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    buffer[:4] = size.to_bytes(4, "little")
    return bytes(buffer)


class FrameDecoder:
    """Collects bytes of one connection and yields the complete messages of ``types`` (a union of tagged structs)."""

    def __init__(self, types: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Any]:
        """Add ``data``; return the messages it completes. Raises FramingError."""
        buffer = self._buffer
        buffer += data
        messages = []
        offset = 0
        while len(buffer) - offset >= 4:
            size = int.from_bytes(buffer[offset : offset + 4], "little")
            if size > MAX_FRAME_BYTES:
                raise FramingError(f"frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            if len(buffer) - offset - 4 < size:
                break
            try:
                with memoryview(buffer) as view:
                    messages.append(self._decoder.decode(view[offset + 4 : offset + 4 + size]))
            except msgspec.MsgspecError as error:
                raise FramingError(f"bad frame: {error}") from error
            offset += 4 + size
        if offset:
            del buffer[:offset]
        return messages
