"""What an agent process does between a ring it shares with its engine and the ring of the peer's agent; pure.

Both rings have the same size and the same records (``ring.py``) at the same places. P's bridge writes each payload by itself
to its place in D's staging area, with the record's slot as the notification that follows it; D's bridge puts the slot into
the ring and so shows the record to its engine. What D's engine gives back of the ring returns as a notification and opens P's
ring. So nobody writes where D may be reading, and a place is written anew only after the notification of the write before:
an aborted transfer's late writes land where they always would have, and the engine drops their frames as stale.
"""

import struct
from collections import deque
from typing import Protocol

from relay.transfer.frame import HEADER_BYTES, FrameError
from relay.transfer.ring import ALIGNMENT, SLOT_BYTES, place

_NUMBER = struct.Struct("<Q")
_SPACE = struct.Struct("<Q")  # units of 64 bytes: the notification from D to P
_PAYLOAD_BYTES = struct.Struct("<I")
_PAYLOAD_AT = SLOT_BYTES - HEADER_BYTES + 44  # of a slot; see frame.py


class AgentFailed(Exception):
    """The agent cannot go on: its peer is gone, or NIXL reported an error. The connection is over."""


class Write(Protocol):
    """One write under way."""

    def done(self) -> bool:
        """Whether the local bytes were read. Raises AgentFailed."""
        ...


class Agent(Protocol):
    """One NIXL agent joined with one peer: each has registered one region. None of these waits."""

    def write(self, offset: int, size: int, note: bytes) -> Write:
        """Write the local bytes to the same place of the peer's region, then notify it. Raises AgentFailed."""
        ...

    def notify(self, note: bytes) -> None:
        """Raises AgentFailed."""
        ...

    def notes(self) -> list[bytes]:
        """What the peer's notifications said since the last call, in any order. Moves writes forward. Raises AgentFailed."""
        ...


class SourceBridge:
    """P's side: from the ring its engine fills to the peer."""

    def __init__(self, agent: Agent, ring: memoryview) -> None:
        self._agent = agent
        self._ring = ring
        self._position = 0
        self._writes: deque[Write] = deque()
        self._lent = 0  # bytes of the ring that D has not given back

    @property
    def busy(self) -> bool:
        """Whether something is under way that ``poll`` moves."""
        return bool(self._writes)

    @property
    def resting(self) -> bool:
        """Whether nothing can happen until ``advance``."""
        return not self._writes and not self._lent

    def advance(self, count: int) -> None:
        """The engine has filled ``count`` more records."""
        for _ in range(count):
            slot = bytes(self._ring[self._position : self._position + SLOT_BYTES])
            size = payload_bytes(slot)
            placement = place(self._position, size, len(self._ring))
            self._position = placement.next
            self._lent += placement.occupied
            if size:
                self._writes.append(self._agent.write(placement.payload, size, slot))
            else:
                self._agent.notify(slot)

    def poll(self) -> int:
        """Units of the ring that D gave back since the last call. Raises AgentFailed, FrameError."""
        units = 0
        for note in self._agent.notes():
            if len(note) != _SPACE.size:
                raise FrameError(f"notification of {len(note)} bytes from D")
            units += _SPACE.unpack(note)[0]
        if units * ALIGNMENT > self._lent:
            raise FrameError(f"D gave back {units * ALIGNMENT} bytes of {self._lent} it had")
        self._lent -= units * ALIGNMENT
        while self._writes and self._writes[0].done():
            self._writes.popleft()
        return units


class TargetBridge:
    """D's side: from the peer to the ring its engine reads. Notifications may overtake each other; records do not."""

    def __init__(self, agent: Agent, ring: memoryview) -> None:
        self._agent = agent
        self._ring = ring
        self._position = 0
        self._next = 0
        self._waiting: dict[int, bytes] = {}  # slots that came before their predecessors, by number

    @property
    def busy(self) -> bool:
        """Whether records wait for an earlier one that is under way."""
        return bool(self._waiting)

    @property
    def resting(self) -> bool:
        """Never: a peer may write at any time, and only ``poll`` tells."""
        return False

    def advance(self, units: int) -> None:
        """The engine needs ``units`` of the ring no more."""
        self._agent.notify(_SPACE.pack(units))

    def poll(self) -> int:
        """Records the engine may read since the last call. Raises AgentFailed, FrameError."""
        for note in self._agent.notes():
            if len(note) != SLOT_BYTES:
                raise FrameError(f"notification of {len(note)} bytes from P")
            number = _NUMBER.unpack_from(note)[0]
            # A ring cannot hold more records than slots, so an honest peer is never further ahead.
            if not self._next <= number < self._next + len(self._ring) // ALIGNMENT or number in self._waiting:
                raise FrameError(f"record {number} notified, {self._next} is due")
            self._waiting[number] = note
        count = 0
        while (slot := self._waiting.pop(self._next, None)) is not None:
            placement = place(self._position, payload_bytes(slot), len(self._ring))
            self._ring[placement.slot : placement.slot + SLOT_BYTES] = slot
            self._position = placement.next
            self._next += 1
            count += 1
        return count


def payload_bytes(slot: bytes) -> int:
    """What the header in a slot says; checked by ``place`` and, with the rest of the header, by the engine."""
    size: int = _PAYLOAD_BYTES.unpack_from(slot, _PAYLOAD_AT)[0]
    return size
