"""One connection that carries frames, whatever the wire: TCP now, a shared-memory ring later."""

from typing import Protocol

from relay.transfer.frame import HEADER_BYTES, Checksum, Header, parse, seal, verify


class ChannelClosed(Exception):
    """The connection is gone; the text says how it ended."""


class Channel(Protocol):
    """Reliable and ordered. One thread sends, one receives, any may close."""

    peer: str

    def send(self, header: bytes, payload: bytes | memoryview) -> None:
        """Send both wholly. Raises ChannelClosed."""
        ...

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` wholly. Raises ChannelClosed, also when the peer ends in the middle."""
        ...

    def set_timeout(self, seconds: float | None) -> None:
        """Longest wait of one call from now on; ChannelClosed when it passes."""
        ...

    def close(self) -> None:
        """Wake both threads. Idempotent."""
        ...


class FrameReader:
    """Reads whole verified frames from a channel into one buffer that is reused."""

    def __init__(self, channel: Channel, checksum: Checksum, max_payload_bytes: int) -> None:
        self._channel = channel
        self._checksum = checksum
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(bytearray(max_payload_bytes))

    def read(self) -> tuple[Header, memoryview]:
        """The next frame; its payload is valid until the next call. Raises ChannelClosed, FrameError."""
        self._channel.receive_into(self._head)
        header = parse(self._head)
        if header.payload_bytes > len(self._body):
            # parse() bounds it by kind; a side that never gets KV keeps a smaller buffer.
            raise ChannelClosed(f"unexpected {header.kind.name} frame of {header.payload_bytes} bytes")
        payload = self._body[: header.payload_bytes]
        if header.payload_bytes:
            self._channel.receive_into(payload)
        verify(self._head, payload, self._checksum)
        return header, payload


def send_frame(channel: Channel, header: Header, payload: bytes | memoryview, checksum: Checksum) -> None:
    """Seal and send one frame. Raises ChannelClosed, FrameError."""
    channel.send(seal(header, payload, checksum), payload)
