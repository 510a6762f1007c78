"""One connection that carries frames, whatever the wire: a TCP socket or a ring in shared memory."""

from collections.abc import Callable
from typing import Protocol

from relay.kernels.kv_frames import Place
from relay.transfer.frame import MAX_CONTROL_BYTES, MAX_KV_BYTES, Checksum, Header, Kind, parse, seal, verify

Allocate = Callable[[int], memoryview]
"""So many bytes, writable, their contents undefined."""


class ChannelClosed(Exception):
    """The connection is gone; the text says how it ended."""


class WireUnusable(ChannelClosed):
    """These two ends cannot use this wire, though they reach each other: another one may serve."""


class WireBusy(WireUnusable):
    """Not now."""


class Channel(Protocol):
    """Reliable and ordered. One thread sends, one receives, any may close.

    A payload is written where ``reserve`` says and read where ``receive_payload`` says: on a ring those are the shared bytes
    themselves, so that KV is copied once out of P's blocks and once into D's. KV has calls of its own, since it may lie elsewhere.
    """

    peer: str
    scheme: str  # "tcp" or "shm"
    region: memoryview | None  # memory both ends map, if that is what payloads lie in
    most_kv_bytes: int  # worth sending in one frame; more than MAX_KV_BYTES may come only where this is more

    def lend(self, allocate: Allocate) -> None:
        """KV payloads that this end alone holds shall lie in memory that ``allocate`` gives, as a device copies there faster."""
        ...

    def await_room(self, size: int) -> None:
        """Wait until ``reserve`` of up to ``size`` bytes need not wait. Raises ChannelClosed, FrameError."""
        ...

    def has_room(self, size: int) -> bool:
        """Whether ``reserve`` of up to ``size`` bytes need not wait. Raises ChannelClosed, FrameError."""
        ...

    def reserve(self, size: int) -> memoryview:
        """Where the payload of the next frame goes before ``commit``. Comes after ``await_room`` and never waits.

        Several payloads may be reserved before the first is committed; frames are committed in the order of their reservation.
        """
        ...

    def reserve_kv(self, size: int) -> Place:
        """``reserve`` for the payload of a KV frame."""
        ...

    def commit(self, *raw_headers: bytes) -> None:
        """Send the headers with the payloads reserved first, as many. Raises ChannelClosed."""
        ...

    def receive_header(self) -> bytes:
        """The next ``HEADER_BYTES``, out of the peer's reach. Raises ChannelClosed, FrameError for a broken ring."""
        ...

    def receive_payload(self, size: int) -> memoryview:
        """The payload of that header; valid until ``receive_header``. Raises ChannelClosed, also for an end in the middle."""
        ...

    def receive_kv(self, size: int) -> Place:
        """``receive_payload`` of a KV frame, valid until ``done``. Several may be held."""
        ...

    def done(self, count: int = 1) -> None:
        """The KV payloads that are held longest are not needed any more, so many."""
        ...

    def ready(self) -> bool:
        """Whether a KV frame can be received without waiting for any part of it, as far as this channel can know."""
        ...

    def set_timeout(self, seconds: float | None) -> None:
        """Longest wait of one call from now on; ChannelClosed when it passes."""
        ...

    def close(self) -> None:
        """Wake both threads. Idempotent."""
        ...

    def release(self) -> None:
        """After the last copy from or to this channel's memory. Idempotent."""
        ...


def read_frame(channel: Channel, checksum: Checksum) -> tuple[Header, memoryview, int]:
    """(header, payload, checksum it had) of a control frame, where nothing else may come. Raises ChannelClosed, FrameError."""
    header, expected = parse(channel.receive_header(), checksum)
    if header.kind is Kind.KV or header.payload_bytes > MAX_CONTROL_BYTES:
        raise ChannelClosed(f"unexpected {header.kind.name} frame of {header.payload_bytes} bytes")
    return header, _control_payload(channel, header, expected, checksum), expected


def read_any_frame(
    channel: Channel, checksum: Checksum, before_waiting: Callable[[], None] = lambda: None
) -> tuple[Header, Place, int]:
    """The same of any frame. A KV payload is not verified, who copies it does that, and is held until ``done``.

    ``before_waiting`` is called before a payload that may still be on its way.

    Raises ChannelClosed, FrameError.
    """
    header, expected = parse(channel.receive_header(), checksum, max(MAX_KV_BYTES, channel.most_kv_bytes))
    if header.kind is Kind.KV:
        return header, channel.receive_kv(header.payload_bytes), expected
    before_waiting()
    return header, _control_payload(channel, header, expected, checksum), expected


def _control_payload(channel: Channel, header: Header, expected: int, checksum: Checksum) -> memoryview:
    """Copied before it is checked: on a ring the peer could change it in between."""
    payload = memoryview(bytes(channel.receive_payload(header.payload_bytes)))
    verify(payload, expected, checksum)
    return payload


def send_frame(channel: Channel, header: Header, payload: bytes | memoryview, checksum: Checksum) -> None:
    """Seal and send one frame. Raises ChannelClosed, FrameError."""
    raw = seal(header, payload, checksum)
    channel.await_room(len(payload))
    channel.reserve(len(payload))[:] = payload
    channel.commit(raw)
