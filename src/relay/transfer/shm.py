"""The shared-memory channel: KV and handoffs through a ring that both engines map, answers over a Unix socket.

D makes the ring once the hellos agree: a memfd, sealed so that nobody can take mapped bytes away, and two eventfds, passed by
descriptor. Nothing has a name in a file system, so SIGKILL leaves nothing behind. The only shared state beside the bytes is in
the kernel: ``frames`` counts records written, ``space`` counts 64-byte units given back. So there is no index to be damaged and no
memory barrier beyond the system call's, a wake-up cannot be lost, and a waiting end takes no processor time from prefill; the
price is about 1 µs a call and two calls each way for a frame of hundreds of microseconds. The socket tells a peer's death.
"""

import array
import fcntl
import mmap
import os
import select
import socket
import time
from collections import deque

from relay.transfer.channel import Allocate, ChannelClosed
from relay.transfer.frame import FrameError
from relay.transfer.ring import (
    ALIGNMENT,
    DEFAULT_RING_BYTES,
    SLOT_BYTES,
    Placement,
    check_capacity,
    header_of,
    place,
    slot_bytes,
)
from relay.transfer.stream import StreamChannel

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
STALL_S = 3.0  # as TCP_USER_TIMEOUT: a peer that takes nothing from a full ring for so long is gone
MOST_KV_BYTES = 8 << 20  # in one frame: many are under way at once
_EVENTFD = "anon_inode:[eventfd]"


class Descriptor:
    """Owns one file descriptor and closes it when the last user is gone, so that no thread ever uses a number given anew."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def is_eventfd(descriptor: Descriptor) -> bool:
    """What the kernel calls it; a peer may pass anything."""
    return os.readlink(f"/proc/self/fd/{descriptor.number}") == _EVENTFD


class Ring:
    """The shared bytes and the two counters, as either end holds them."""

    def __init__(self, memory: Descriptor, frames: Descriptor, space: Descriptor) -> None:
        """Checks everything that came from the other end. Raises FrameError."""
        self.capacity = os.fstat(memory.number).st_size
        check_capacity(self.capacity)
        needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(memory.number, fcntl.F_GET_SEALS) & needed != needed:
            raise FrameError("the ring's memory is not sealed: it could be taken away while in use")
        for counter in (frames, space):
            if not is_eventfd(counter):
                raise FrameError("a counter of the ring is no eventfd")
            os.set_blocking(counter.number, False)
        self.frames = frames
        self.space = space
        self.bytes = memoryview(
            mmap.mmap(memory.number, self.capacity, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        )
        self.memory = memory

    @classmethod
    def create(cls, capacity: int) -> "Ring":
        memory = Descriptor(os.memfd_create("relay-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(memory.number, capacity)
        fcntl.fcntl(memory.number, fcntl.F_ADD_SEALS, SEALS)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        return cls(memory, Descriptor(os.eventfd(0, flags)), Descriptor(os.eventfd(0, flags)))


class Counted:
    """A socket beside memory whose use eventfds count: waiting for a counter or the peer's end, closing."""

    def __init__(self, stream: StreamChannel, counter: Descriptor) -> None:
        """``counter`` is what this end waits for. Raises ChannelClosed where another thread has closed the stream."""
        self.peer = stream.peer
        self._stream = stream
        try:
            self._socket = Descriptor(os.dup(stream.socket.fileno()))
        except OSError as error:
            raise ChannelClosed(f"{stream.peer}: {error}") from error
        self._timeout_s: float | None = None
        self._counter = counter
        self._poll = select.poll()
        self._poll.register(counter.number, select.POLLIN)
        self._poll.register(self._socket.number, select.POLLRDHUP)

    def lend(self, allocate: Allocate) -> None:
        """KV lies in memory that both ends have."""

    @property
    def _patience_s(self) -> float:
        """For a peer that gives nothing back."""
        return STALL_S if self._timeout_s is None else self._timeout_s

    def set_timeout(self, seconds: float | None) -> None:
        self._stream.set_timeout(seconds)
        self._timeout_s = seconds

    def close(self) -> None:
        self._stream.close()  # shuts the socket down, which wakes whoever waits for the ring

    def _take(self, timeout_s: float | None) -> int:
        """The value of the counter, once it is not 0. What was counted before the peer went counts. Raises ChannelClosed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        gone = False
        while True:
            try:
                return os.eventfd_read(self._counter.number)
            except BlockingIOError:
                if gone:
                    raise ChannelClosed(f"{self.peer} closed the connection") from None
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._poll.poll(None if left is None else left * 1e3)
            if not events and left is not None:
                raise ChannelClosed(f"{self.peer}: nothing for {timeout_s:g} s")
            gone = any(number == self._socket.number for number, _ in events)


class _RingChannel(Counted):
    """What both ends share."""

    scheme = "shm"

    def __init__(self, stream: StreamChannel, ring: Ring, counter: Descriptor) -> None:
        super().__init__(stream, counter)
        self._ring = ring
        self._position = 0
        self._number = 0
        self.region: memoryview | None = ring.bytes
        self.most_kv_bytes = min(MOST_KV_BYTES, ring.capacity // 4)

    def release(self) -> None:
        """Mapped memory goes with its last user."""


class RingSender(_RingChannel):
    """P's end: frames go into the ring, answers come over the socket."""

    def __init__(self, stream: StreamChannel, ring: Ring) -> None:
        super().__init__(stream, ring, ring.space)
        self._free = ring.capacity
        self._reserved: deque[Placement] = deque()

    def await_room(self, size: int) -> None:
        needed = place(self._position, size, self._ring.capacity).occupied
        while self._free < needed:
            self._gain(self._take(self._patience_s))

    def has_room(self, size: int) -> bool:
        needed = place(self._position, size, self._ring.capacity).occupied
        if self._free < needed:
            try:
                self._gain(os.eventfd_read(self._ring.space.number))
            except BlockingIOError:
                return False
        return self._free >= needed

    def _gain(self, units: int) -> None:
        self._free += units * ALIGNMENT
        if self._free > self._ring.capacity:
            raise FrameError(f"{self.peer} gave back more of the ring than there is")

    def reserve(self, size: int) -> memoryview:
        placement = place(self._position, size, self._ring.capacity)
        assert placement.occupied <= self._free, "reserve without await_room"
        self._free -= placement.occupied
        self._position = placement.next
        self._reserved.append(placement)
        return self._ring.bytes[placement.payload : placement.payload + size]

    def reserve_kv(self, size: int) -> memoryview:
        return self.reserve(size)

    def commit(self, *raw_headers: bytes) -> None:
        for raw_header in raw_headers:
            placement = self._reserved.popleft()
            self._ring.bytes[placement.slot : placement.slot + SLOT_BYTES] = slot_bytes(self._number, raw_header)
            self._number += 1
        os.eventfd_write(self._ring.frames.number, len(raw_headers))

    def receive_header(self) -> bytes:
        return self._stream.receive_header()

    def receive_payload(self, size: int) -> memoryview:
        return self._stream.receive_payload(size)

    def receive_kv(self, size: int) -> memoryview:
        return self._stream.receive_kv(size)

    def done(self, count: int = 1) -> None:
        self._stream.done(count)

    def ready(self) -> bool:
        return False


class RingReceiver(_RingChannel):
    """D's end: frames come out of the ring, answers go over the socket."""

    def __init__(self, stream: StreamChannel, ring: Ring) -> None:
        super().__init__(stream, ring, ring.frames)
        self._available = 0
        self._in_use = 0  # bytes of the control record whose payload may be in use
        self._held: deque[int] = deque()  # bytes of the KV records that are
        self._spare = 0  # bytes of records before them, to be given back

    def await_room(self, size: int) -> None:
        self._stream.await_room(size)

    def has_room(self, size: int) -> bool:
        return self._stream.has_room(size)

    def reserve(self, size: int) -> memoryview:
        return self._stream.reserve(size)

    def reserve_kv(self, size: int) -> memoryview:
        return self._stream.reserve_kv(size)

    def commit(self, *raw_headers: bytes) -> None:
        self._stream.commit(*raw_headers)

    def receive_header(self) -> bytes:
        ring = self._ring
        if self._in_use:
            assert not self._held, "space is given back in the order of the records"
            self._spare += self._in_use
            self._in_use = 0
        self._give_back(0 if not self._available else ring.capacity // 4)
        if not self._available:
            self._available = self._take(self._timeout_s)
        self._available -= 1
        slot = bytes(
            ring.bytes[self._position : self._position + SLOT_BYTES]
        )  # out of the peer's reach, then looked at
        return header_of(slot, self._number)

    def receive_payload(self, size: int) -> memoryview:
        placement = self._next(size)
        self._in_use = placement.occupied
        return self._ring.bytes[placement.payload : placement.payload + size]

    def receive_kv(self, size: int) -> memoryview:
        placement = self._next(size)
        self._held.append(placement.occupied)
        return self._ring.bytes[placement.payload : placement.payload + size]

    def done(self, count: int = 1) -> None:
        for _ in range(count):
            self._spare += self._held.popleft()
        self._give_back(self._ring.capacity // 4)

    def _give_back(self, least: int) -> None:
        """One call for several records, but never while this end sleeps: P may be waiting for just these bytes."""
        if self._spare and self._spare >= least:
            os.eventfd_write(self._ring.space.number, self._spare // ALIGNMENT)
            self._spare = 0

    def ready(self) -> bool:
        if not self._available:
            try:
                self._available = os.eventfd_read(self._ring.frames.number)
            except BlockingIOError:
                return False
        return True

    def _next(self, size: int) -> Placement:
        placement = place(self._position, size, self._ring.capacity)
        self._position = placement.next
        self._number += 1
        return placement


def offer_ring(stream: StreamChannel, capacity: int = DEFAULT_RING_BYTES) -> RingReceiver:
    """D's side, after the hellos: make a ring and pass it. Raises ChannelClosed."""
    try:
        ring = Ring.create(capacity)
        socket.send_fds(stream.socket, [b"R"], [ring.memory.number, ring.frames.number, ring.space.number])
    except OSError as error:
        raise ChannelClosed(f"{stream.peer}: no ring: {error}") from error
    return RingReceiver(stream, ring)


def take_ring(stream: StreamChannel) -> RingSender:
    """P's side, after the hellos: take the ring and check it. Raises ChannelClosed, FrameError."""
    descriptors = array.array("i")
    try:
        data, ancillary, flags, _ = stream.socket.recvmsg(1, socket.CMSG_SPACE(3 * descriptors.itemsize), _CLOEXEC)
    except OSError as error:
        raise ChannelClosed(f"{stream.peer}: {error}") from error
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    owned = [Descriptor(number) for number in descriptors]
    if not data:
        raise ChannelClosed(f"{stream.peer} closed the connection instead of passing a ring")
    if len(owned) != 3 or flags & socket.MSG_CTRUNC:
        raise FrameError(f"{stream.peer} passed {len(owned)} descriptors instead of 3")
    try:
        return RingSender(stream, Ring(*owned))
    except OSError as error:
        raise FrameError(f"{stream.peer} passed no ring: {error}") from error


_CLOEXEC = socket.MSG_CMSG_CLOEXEC
