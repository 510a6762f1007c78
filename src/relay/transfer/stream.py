"""Frames over a connected stream socket: the whole of a TCP channel, and the way back of a shared-memory one."""

import errno
import socket
import time
from collections import deque

from relay.transfer.channel import Allocate, ChannelClosed
from relay.transfer.frame import HEADER_BYTES


class StreamChannel:
    """A connected socket as a ``Channel``. Buffers grow to the largest payload and are used again."""

    region: memoryview | None = None
    most_kv_bytes = 4 << 20  # larger ones leave D idle while they come

    def __init__(self, sock: socket.socket, peer: str, scheme: str) -> None:
        self.peer = peer
        self.scheme = scheme
        self.socket = sock
        self.address = ""  # that was dialled, where it matters
        self._allocate: Allocate = _ordinary
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._timeout_s: float | None = None
        self._received = memoryview(bytearray(1 << 12))
        self._free: list[memoryview] = []
        self._reserved: deque[tuple[memoryview, int]] = deque()
        self._held: deque[memoryview] = deque()
        self._spare: list[memoryview] = []

    def lend(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._free.clear()  # what the hello was written to

    def await_room(self, size: int) -> None:
        """``commit`` waits for the socket, nothing else does."""

    def has_room(self, size: int) -> bool:
        return True

    def reserve(self, size: int) -> memoryview:
        buffer = self._free.pop() if self._free else memoryview(bytearray())
        if size > len(buffer):
            buffer = self._allocate(max(size, 1 << 12))
        self._reserved.append((buffer, size))
        return buffer[:size]

    def reserve_kv(self, size: int) -> memoryview:
        return self.reserve(size)

    def commit(self, *raw_headers: bytes) -> None:
        for raw_header in raw_headers:
            self._commit(raw_header)

    def _commit(self, raw_header: bytes) -> None:
        buffer, size = self._reserved.popleft()
        self._free.append(buffer)
        payload = buffer[:size]
        try:
            sent = self.socket.sendmsg([raw_header, payload])
            if sent < len(raw_header):
                self.socket.sendall(raw_header[sent:])
                sent = len(raw_header)
            if sent < len(raw_header) + len(payload):
                self.socket.sendall(payload[sent - len(raw_header) :])
        except OSError as error:
            raise ChannelClosed(f"{self.peer}: {error}") from error

    def send(self, raw: bytes) -> None:
        """Headers whose payloads go another way. Raises ChannelClosed."""
        try:
            self.socket.sendall(raw)
        except OSError as error:
            raise ChannelClosed(f"{self.peer}: {error}") from error

    def receive_header(self) -> bytes:
        self.receive_into(self._head, "")
        return bytes(self._head)

    def receive_payload(self, size: int) -> memoryview:
        if size > len(self._received):
            self._received = memoryview(bytearray(size))
        view = self._received[:size]
        self.receive_into(view, " in the middle of a frame")
        return view

    def receive_kv(self, size: int) -> memoryview:
        buffer = self._spare.pop() if self._spare else memoryview(bytearray())
        if size > len(buffer):
            buffer = self._allocate(size)
        self._held.append(buffer)
        self.receive_into(buffer[:size], " in the middle of a frame")
        return buffer[:size]

    def done(self, count: int = 1) -> None:
        for _ in range(count):
            self._spare.append(self._held.popleft())

    def ready(self) -> bool:
        """Never known: a peer may stop in the middle of a payload, and what has arrived before is written first."""
        return False

    def set_timeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds
        try:
            self.socket.settimeout(seconds)
        except OSError as error:  # closed by another thread, as when the engine ends in the middle of a handshake
            raise ChannelClosed(f"{self.peer}: {error}") from error

    def close(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise
        self.socket.close()

    def release(self) -> None:
        """The memory is Python's."""

    def receive_into(self, view: memoryview, where: str) -> None:
        """Fill ``view``; ``where`` an end would be. Raises ChannelClosed."""
        received = 0
        seconds = self._timeout_s
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while received < len(view):
                if deadline is not None:  # of the whole: a byte now and then buys no time
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(f"not whole after {seconds:g} s")
                    self.socket.settimeout(left)
                count = self.socket.recv_into(view[received:], 0, socket.MSG_WAITALL)
                if count == 0:
                    where = where or (" in the middle of a frame" if received else "")
                    middle = f"{where} ({received} of {len(view)} bytes)" if where else ""
                    raise ChannelClosed(f"{self.peer} closed the connection{middle}")
                received += count
        except OSError as error:
            raise ChannelClosed(f"{self.peer}: {error}") from error


class ReadAhead:
    """What has come over a stream that carries small frames alone, taken as it is there: where several have come, they cost one
    call and one turn of the interpreter's lock."""

    def __init__(self, stream: StreamChannel) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(1 << 12))
        self._start = self._end = 0

    def has(self, size: int) -> bool:
        """Whether ``take`` of ``size`` bytes need not wait, or raises at once."""
        try:
            while self._end - self._start < size:
                if not self._more(socket.MSG_DONTWAIT):
                    return True
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            return True  # closed by another thread: ``take`` says so
        return True

    def take(self, size: int) -> bytes:
        """Of up to the buffer's size. Raises ChannelClosed."""
        try:
            while (there := self._end - self._start) < size:
                if not self._more(0):
                    middle = f" in the middle of a frame ({there} of {size} bytes)" if there else ""
                    raise ChannelClosed(f"{self._stream.peer} closed the connection{middle}")
        except OSError as error:
            raise ChannelClosed(f"{self._stream.peer}: {error}") from error
        taken = bytes(self._buffer[self._start : self._start + size])
        self._start += size
        return taken

    def take_all(self, size: int) -> memoryview:
        """A payload of any size. Raises ChannelClosed."""
        if size <= len(self._buffer):
            return memoryview(self.take(size))
        view, there = memoryview(bytearray(size)), self._end - self._start
        view[:there] = self.take(there)
        self._stream.receive_into(view[there:], " in the middle of a frame")
        return view

    def _more(self, flags: int) -> int:
        """Bytes that came, 0 at the end."""
        rest = self._end - self._start
        if rest:
            self._buffer[:rest] = self._buffer[self._start : self._end]
        self._start, self._end = 0, rest
        count = self._stream.socket.recv_into(self._buffer[rest:], 0, flags)
        self._end += count
        return count


def _ordinary(size: int) -> memoryview:
    return memoryview(bytearray(size))
