"""Where records lie in a ring of shared bytes; pure arithmetic.

A record is a slot of 64 bytes (its number u64, then the frame's header) and a payload that is never split: where it would cross
the end of the ring it begins at the start, and the bytes before the end stay unused. So both ends find every record from
the sizes alone, and the ring holds no index that the other end could damage.
"""

import struct
from typing import NamedTuple

from relay.transfer.frame import HEADER_BYTES, FrameError

ALIGNMENT = 64
SLOT_BYTES = 64
MIN_RING_BYTES = (2 << 20) + 2 * SLOT_BYTES
MAX_RING_BYTES = 64 << 20
DEFAULT_RING_BYTES = 4 << 20

_NUMBER = struct.Struct("<Q")
assert _NUMBER.size + HEADER_BYTES == SLOT_BYTES


class Placement(NamedTuple):
    """Where one record lies. ``occupied`` counts unused bytes before the end with the record that skips them."""

    slot: int
    payload: int
    occupied: int
    next: int


def place(position: int, size: int, capacity: int) -> Placement:
    """The record of a payload of ``size`` bytes that begins at ``position``, a multiple of 64 below ``capacity``.

    Raises FrameError for a payload that an empty ring could not hold wherever it begins.
    """
    if not 0 <= size <= largest_payload(capacity):
        raise FrameError(f"payload of {size} bytes, a ring of {capacity} bytes takes {largest_payload(capacity)}")
    rounded = -(-size // ALIGNMENT) * ALIGNMENT
    payload = position + SLOT_BYTES
    if payload + rounded <= capacity:
        end = payload + rounded
        return Placement(position, payload, SLOT_BYTES + rounded, 0 if end == capacity else end)
    return Placement(position, 0, capacity - position + rounded, rounded)


def largest_payload(capacity: int) -> int:
    """Half of the ring less the slot."""
    return capacity // 2 - SLOT_BYTES


def slot_bytes(number: int, raw_header: bytes) -> bytes:
    """The slot of record ``number``."""
    return _NUMBER.pack(number) + raw_header


def header_of(slot: bytes, number: int) -> bytes:
    """The header in a slot. Raises FrameError unless it is that of record ``number``: a slot of an earlier lap is none."""
    found = _NUMBER.unpack_from(slot)[0]
    if found != number:
        raise FrameError(f"record {found} in the ring instead of {number}")
    return slot[_NUMBER.size :]


def check_capacity(capacity: int) -> None:
    """Raises FrameError for a ring no record is safe in."""
    if not MIN_RING_BYTES <= capacity <= MAX_RING_BYTES or capacity % 4096:
        raise FrameError(f"ring of {capacity} bytes; {MIN_RING_BYTES} to {MAX_RING_BYTES} in whole pages are allowed")
