"""KV from GPU to GPU of one machine: P's gather kernel writes into an area of D's memory, and D scatters from there.

The area belongs to D and to one connection. P's frames lie in it as records lie in a ring (``ring.place``), but only their
payloads: headers, control frames and answers go over the Unix socket, which tells a peer's death, and an eventfd counts the bytes
given back. A header leaves P after the kernel that wrote its payload has ended, and D takes the digest again while it scatters, so
nothing partial is ever decoded, whatever P or its death left behind.

What happens to the area afterwards: ``relay.transfer.areas``.
"""

import contextlib
import os
import socket
import struct
import sys
from collections import deque
from typing import Any

from relay.kernels.kv_frames import SharingFailed, Span
from relay.transfer.areas import AreaPool, AreasBusy, DeviceMemory, Mappings, hung_up
from relay.transfer.channel import ChannelClosed, WireBusy, WireUnusable
from relay.transfer.frame import HEADER_BYTES, MAX_DEVICE_KV_BYTES, FrameError
from relay.transfer.ring import ALIGNMENT, Placement, place
from relay.transfer.shm import Counted, Descriptor, is_eventfd
from relay.transfer.stream import ReadAhead, StreamChannel
from relay.transfer.wire import ShmWire, dial_shm

_OFFER = struct.Struct("<cQ64s")  # "D", bytes of the area, its handle; or "X", or "B" for now, 0, the reason
_ACCEPTED, _DECLINED = b"Y", b"N"


class _AreaChannel(Counted):
    """What both ends share: everything but KV payloads is the socket's."""

    scheme = "ipc"
    region: memoryview | None = None

    def __init__(self, stream: StreamChannel, area: Any, capacity: int, space: Descriptor) -> None:
        super().__init__(stream, space)
        self._area = area
        self._capacity = capacity
        self.most_kv_bytes = min(MAX_DEVICE_KV_BYTES, capacity // 4)
        self._space = space
        self._position = 0
        self._ahead = ReadAhead(stream)  # from here on nothing is read in another way

    def _place(self, size: int) -> Placement:
        placement = place(self._position, size, self._capacity)
        self._position = placement.next
        return placement

    def reserve(self, size: int) -> memoryview:
        return self._stream.reserve(size)

    def receive_header(self) -> bytes:
        return self._ahead.take(HEADER_BYTES)

    def receive_payload(self, size: int) -> memoryview:
        return self._ahead.take_all(size)

    def ready(self) -> bool:
        return self._ahead.has(HEADER_BYTES)  # of KV only the header goes this way


class AreaSender(_AreaChannel):
    """P's end. ``release`` unmaps the area and then lets go of the lease."""

    def __init__(
        self,
        stream: StreamChannel,
        area: Any,
        capacity: int,
        space: Descriptor,
        lease: Descriptor,
        mappings: "Mappings",
    ) -> None:
        super().__init__(stream, area, capacity, space)
        self._free = capacity
        self._lease: Descriptor | None = lease
        self._mappings = mappings
        self._reserved: deque[bool] = deque()  # whether each is KV

    def await_room(self, size: int) -> None:
        needed = place(self._position, size, self._capacity).occupied
        while self._free < needed:
            self._gain(self._take(self._patience_s))

    def has_room(self, size: int) -> bool:
        needed = place(self._position, size, self._capacity).occupied
        if self._free < needed:
            with contextlib.suppress(BlockingIOError):
                self._gain(os.eventfd_read(self._space.number))
        return self._free >= needed

    def _gain(self, units: int) -> None:
        self._free += units * ALIGNMENT
        if self._free > self._capacity:
            raise FrameError(f"{self.peer} gave back more of its area than there is")

    def reserve(self, size: int) -> memoryview:
        self._reserved.append(False)
        return super().reserve(size)

    def reserve_kv(self, size: int) -> Span:
        placement = self._place(size)
        assert placement.occupied <= self._free, "reserve without await_room"
        self._free -= placement.occupied
        self._reserved.append(True)
        return Span(self._area, placement.payload, size)

    def commit(self, *raw_headers: bytes) -> None:
        """Of KV only headers go over the socket: those of several frames together."""
        together: list[bytes] = []
        for raw_header in raw_headers:
            if self._reserved.popleft():
                together.append(raw_header)
            else:
                self._send_headers(together)
                self._stream.commit(raw_header)
        self._send_headers(together)

    def _send_headers(self, headers: list[bytes]) -> None:
        if headers:
            self._stream.send(b"".join(headers))
            headers.clear()

    def receive_kv(self, size: int) -> Span:
        raise FrameError(f"{self.peer} sent KV to its source")

    def done(self, count: int = 1) -> None:
        """Nothing is ever held."""

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._mappings.end(self._area, self.peer, dead=hung_up(lease))
            del lease  # its last owner closes it


class AreaReceiver(_AreaChannel):
    """D's end."""

    def __init__(self, stream: StreamChannel, area: Any, space: Descriptor, lease: Descriptor, pool: AreaPool) -> None:
        super().__init__(stream, area, pool.size, space)
        self._lease: Descriptor | None = lease
        self._pool = pool
        self._held: deque[int] = deque()

    def await_room(self, size: int) -> None:
        self._stream.await_room(size)

    def has_room(self, size: int) -> bool:
        return self._stream.has_room(size)

    def reserve_kv(self, size: int) -> memoryview:
        return self._stream.reserve_kv(size)

    def commit(self, *raw_headers: bytes) -> None:
        self._stream.commit(*raw_headers)

    def receive_kv(self, size: int) -> Span:
        placement = self._place(size)
        self._held.append(placement.occupied)
        return Span(self._area, placement.payload, size)

    def done(self, count: int = 1) -> None:
        os.eventfd_write(self._space.number, sum(self._held.popleft() for _ in range(count)) // ALIGNMENT)

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._pool.retire(self._area, lease)


def offer_area(stream: StreamChannel, pool: AreaPool) -> AreaReceiver:
    """D's side, after the hellos. Raises ChannelClosed where there is no area, or P cannot map it."""
    try:
        area, handle = pool.take()
    except SharingFailed as error:
        tag = b"B" if isinstance(error, AreasBusy) else b"X"
        _send(stream, _OFFER.pack(tag, 0, str(error).encode()[:64]), [])
        raise ChannelClosed(f"{stream.peer}: no area for KV: {error}") from error
    space = Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    ours, theirs = (Descriptor(number) for number in os.pipe2(os.O_CLOEXEC))
    receiver = AreaReceiver(stream, area, space, ours, pool)
    try:
        _send(stream, _OFFER.pack(b"D", pool.size, handle), [space.number, theirs.number])
        del theirs  # from now on the peer alone holds it
        if bytes(stream.receive_payload(1)) != _ACCEPTED:
            raise ChannelClosed(f"{stream.peer} cannot map the area for KV")
    except BaseException:
        receiver.release()
        raise
    return receiver


def take_area(stream: StreamChannel, mappings: Mappings) -> AreaSender:
    """P's side, after the hellos. Raises WireUnusable where the area cannot be had, ChannelClosed, FrameError."""
    try:
        data, numbers, _, _ = socket.recv_fds(
            stream.socket, _OFFER.size, 2, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        raise ChannelClosed(f"{stream.peer}: {error}") from error
    owned = [Descriptor(number) for number in numbers]
    if len(data) != _OFFER.size:
        raise ChannelClosed(f"{stream.peer} closed the connection instead of offering an area")
    tag, capacity, handle = _OFFER.unpack(data)
    if tag != b"D":
        problem = f"{stream.peer}: {handle.rstrip(bytes(1)).decode(errors='replace')}"
        raise (WireBusy if tag == b"B" else WireUnusable)(problem)
    if len(owned) != 2 or not is_eventfd(owned[0]) or capacity % ALIGNMENT or not capacity:
        raise FrameError(f"{stream.peer} offered no area of KV")
    try:
        area = mappings.begin(handle, capacity)
    except SharingFailed as error:
        _send(stream, _DECLINED, [])
        raise WireUnusable(f"{stream.peer}: {error}") from error
    os.set_blocking(owned[0].number, False)
    sender = AreaSender(stream, area, capacity, owned[0], owned[1], mappings)
    try:
        _send(stream, _ACCEPTED, [])
    except BaseException:
        sender.release()
        raise
    return sender


class IpcWire(ShmWire):
    """``ipc://host-identity/name``: as the ring's, for engines whose devices reach each other. A target whose area cannot be
    mapped is said once on standard error and not tried again: the next address serves it."""

    scheme = "ipc"

    def __init__(self, host_identity: str, memory: DeviceMemory, area_bytes: int) -> None:
        super().__init__(host_identity)
        self._mappings = Mappings(memory)
        self._pool = AreaPool(memory, area_bytes)
        self._unusable: set[str] = set()

    def reaches(self, address: str) -> bool:
        return super().reaches(address) and address not in self._unusable

    def dial(self, address: str) -> StreamChannel:
        stream = dial_shm(address)
        stream.address = address
        return stream

    def upgrade(self, stream: StreamChannel, *, dialled: bool, lane: int = 0) -> AreaSender | AreaReceiver:
        if not dialled:
            return offer_area(stream, self._pool)
        try:
            return take_area(stream, self._mappings)
        except WireBusy:
            raise
        except WireUnusable as error:
            self._unusable.add(stream.address)
            print(f"KV over CUDA IPC is not possible: {error}", file=sys.stderr, flush=True)
            raise


def _send(stream: StreamChannel, data: bytes, descriptors: list[int]) -> None:
    try:
        socket.send_fds(stream.socket, [data], descriptors)
    except OSError as error:
        raise ChannelClosed(f"{stream.peer}: {error}") from error
