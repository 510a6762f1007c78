"""One direction and one connection of the byte proxy: what is read on one side is written to the other, unless a fault says
otherwise."""

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from relay.chaos.packets import Flow

MAX_UNSENT_BYTES = 1 << 20
Harm = Literal["cut", "truncate", "corrupt", "half_close", "delay", "one_way"]


@dataclass(slots=True)
class Injury:
    """What to do to a direction from byte ``offset`` of the next chunk on. ``seconds`` for delay and one_way; ``bit`` to flip."""

    harm: Harm
    offset: int = 0
    seconds: float = 0.0
    bit: int = 0


Tap = Callable[[bytes], "tuple[bytes, Injury | None]"]
"""Sees a chunk before it is passed on; returns what to pass on (a frame may be replaced) and what to do to it."""


class Pipe:
    """From one transport to another. ``hurt`` is called by whoever injects; everything else follows from the bytes."""

    def __init__(self, connection: "Connection", tap: Tap) -> None:
        self._connection = connection
        self._tap = tap
        self._held: deque[bytes] = deque()  # arrived while nothing may pass
        self._held_until = 0.0
        self._dropping = False
        self.ended = False  # the source has closed its writing side
        self._silenced = False  # we closed the target's reading side: nothing passes any more
        self._armed: tuple[Injury, Callable[[], None]] | None = None
        self.source: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None

    def data(self, data: bytes) -> None:
        """Bytes from the source."""
        passed, injury = self._tap(data)
        if injury is None and self._armed is not None and passed:
            injury, done = self._armed
            self._armed = None
            done()
        if injury is None:
            self._write(passed)
        else:
            self.hurt(injury, passed)

    def arm(self, injury: Injury, done: Callable[[], None]) -> None:
        """Do it to the next bytes that come; ``done`` is called then."""
        self._armed = (injury, done)

    def disarm(self) -> None:
        self._armed = None

    def flush_early(self) -> None:
        """The target is connected: pass on what came before."""
        if not self._held_until:
            self._release()

    def hurt(self, injury: Injury, data: bytes = b"") -> None:
        """Do it, with ``data`` on its way."""
        offset = min(injury.offset, len(data))
        match injury.harm:
            case "cut":
                self._write(data[:offset])
                self._connection.reset()
            case "truncate":
                self._write(data[: offset or len(data) // 2])
                self._connection.close_after_flush()
                self._silenced = True
            case "corrupt":
                if data:
                    damaged = bytearray(data)
                    damaged[min(offset, len(data) - 1)] ^= 1 << (injury.bit % 8)
                    data = bytes(damaged)
                self._write(data)
            case "half_close":
                self._write(data[:offset])
                self._silenced = True
                self._write_eof()
            case "delay":
                self._hold(injury.seconds)
                self._write(data)
            case "one_way":
                self._dropping = True  # a black hole: what goes in is gone, and the connection is reset when it ends
                asyncio.get_running_loop().call_later(injury.seconds, self._connection.reset)

    def eof(self) -> None:
        """The source has closed its writing side."""
        self.ended = True
        if not self._held:
            self._pass_eof()

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def _hold(self, seconds: float) -> None:
        self._held_until = max(self._held_until, time.monotonic() + seconds)
        asyncio.get_running_loop().call_at(asyncio.get_running_loop().time() + seconds, self._release)

    def _release(self) -> None:
        if time.monotonic() < self._held_until - 0.001:
            return
        self._held_until = 0.0
        while self._held:
            self._write(self._held.popleft())
        if self.ended:
            self._pass_eof()
        self._connection.settle()

    def _write(self, data: bytes) -> None:
        if not data or self._silenced or self._dropping:
            return
        if self.target is None or self._held_until:
            self._held.append(data)
        elif not self.target.is_closing():
            self.target.write(data)
            source = self.source
            if self.target.get_write_buffer_size() > MAX_UNSENT_BYTES and source is not None and source.is_reading():
                source.pause_reading()

    def drained(self) -> None:
        """The target takes bytes again."""
        if self.source is not None and not self.source.is_closing():
            self.source.resume_reading()

    def _pass_eof(self) -> None:
        if not self._silenced:
            self._write_eof()
        self._connection.settle()

    def _write_eof(self) -> None:
        if self.target is not None and self.target.can_write_eof():
            with contextlib.suppress(OSError):  # reset by its peer, of which the loop has yet to hear
                self.target.write_eof()


class End(asyncio.Protocol):
    """One socket of a connection: feeds ``outgoing``, and lets ``incoming`` write to it."""

    def __init__(self, connection: "Connection", feeds: Pipe, written_by: Pipe) -> None:
        self._connection = connection
        self._feeds = feeds
        self._written_by = written_by
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)
        raw = wire.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.set_write_buffer_limits(MAX_UNSENT_BYTES, MAX_UNSENT_BYTES // 4)
        self._feeds.source = wire
        self._written_by.target = wire
        self._connection.attached(wire)

    def data_received(self, data: bytes) -> None:
        self._feeds.data(data)

    def eof_received(self) -> bool:
        self._end()
        self._feeds.eof()
        return True  # the other direction lives on until its own end

    def resume_writing(self) -> None:
        self._written_by.drained()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
        self._connection.lost()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._connection.on_end(self)


class Connection:
    """Two sockets and the two pipes between them: ``up`` from the one that dialled, ``down`` back to it."""

    def __init__(self, up: Tap, down: Tap, on_end: Callable[[End], None]) -> None:
        """``on_end``: one of the two has closed its side, or is gone."""
        self.up = Pipe(self, up)
        self.down = Pipe(self, down)
        self.on_end = on_end
        self._transports: list[asyncio.Transport] = []
        self._lost = False
        self.dialler = End(self, self.up, self.down)
        self.listener = End(self, self.down, self.up)

    def attached(self, transport: asyncio.Transport) -> None:
        self._transports.append(transport)
        if self._lost:
            transport.abort()

    def reset(self) -> None:
        """Both sides get a reset instead of an orderly end."""
        for transport in self._transports:
            raw = transport.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()

    @property
    def flows(self) -> list[Flow]:
        """Of its two sockets' packets, towards the listener; none of one that is not connected (any more)."""
        found = []
        for transport, names in (
            (self.up.source, ("peername", "sockname")),
            (self.up.target, ("sockname", "peername")),
        ):
            ends = [transport.get_extra_info(name) for name in names] if transport is not None else []
            found += [Flow(ends[0][1], ends[1][1])] if all(ends) and ends else []
        return found

    def close_after_flush(self) -> None:
        for transport in self._transports:
            transport.close()

    def lost(self) -> None:
        """One side has ended: so does the other, after what is on its way."""
        if self._lost:
            return
        self._lost = True
        self.settle()

    def settle(self) -> None:
        """Close when nothing is left to pass on: bytes that are held back arrive late, even from a sender that has ended."""
        over = self._lost or (self.up.ended and self.down.ended)
        if over and not self.up.holding and not self.down.holding:
            self.close_after_flush()
