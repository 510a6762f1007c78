"""Ways to connect two engines: TCP, and shared memory where both are on one host in one namespace.

A wire listens and dials; what comes of it is a stream over which both say hello, and then ``upgrade`` makes the channel of it.
Connection choice is by address: D advertises one address a wire, best first, and P takes the first that it can reach.
"""

import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from relay.config import TransportName
from relay.errors import PortInUseError
from relay.transfer.channel import Channel, ChannelClosed
from relay.transfer.ring import DEFAULT_RING_BYTES
from relay.transfer.shm import offer_ring, take_ring
from relay.transfer.stream import StreamChannel

CONNECT_TIMEOUT_S = 3.0
USER_TIMEOUT_MS = 3000
BACKLOG = 64
SHORTAGE_S = 0.05  # between two tries to accept while descriptors or memory run out
TCP_CONNECTIONS = 3  # one for control frames, two for KV: one stream uses one core at each end
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM)


class Wire(Protocol):
    """One way to connect. ``accept`` blocks until a peer comes or the wire closes."""

    scheme: str
    address: str
    connections: int  # of a pair; with several, the first carries no KV

    def reaches(self, address: str) -> bool:
        """Whether ``dial`` may be tried for this address."""
        ...

    def dial(self, address: str) -> StreamChannel:
        """Raises ChannelClosed."""
        ...

    def accept(self) -> StreamChannel | None:
        """The next peer; None: this wire is closed."""
        ...

    def upgrade(self, stream: StreamChannel, *, dialled: bool, lane: int = 0) -> Channel:
        """The channel, after the hellos; who dials says which of the pair's it is. Raises ChannelClosed, FrameError."""
        ...

    def close(self) -> None: ...


class _Listener:
    """A listening socket whose ``accept`` survives shortages."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._closed = False

    def accept(self) -> tuple[socket.socket, object] | None:
        while True:
            try:
                return self._listener.accept()
            except OSError as error:
                if self._closed or error.errno in (errno.EBADF, errno.EINVAL):
                    return None
                if error.errno not in _TRANSIENT:
                    raise
                time.sleep(SHORTAGE_S)

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close alone would not
        self._listener.close()


class TcpWire:
    """``tcp://host:port``. ``TCP_USER_TIMEOUT`` and keepalive end a connection to a peer that vanished without a word."""

    scheme = "tcp"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, connections: int = TCP_CONNECTIONS) -> None:
        self.connections = connections
        try:
            listener = socket.create_server((host, port), backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"KV address {host}:{port} is already in use") from error
            raise
        bound = listener.getsockname()
        self.address = f"tcp://{bound[0]}:{bound[1]}"
        self._listener = _Listener(listener)

    def reaches(self, address: str) -> bool:
        return address.startswith("tcp://")

    def dial(self, address: str) -> StreamChannel:
        return dial_tcp(address)

    def accept(self) -> StreamChannel | None:
        accepted = self._listener.accept()
        if accepted is None:
            return None
        sock, peer = accepted
        assert isinstance(peer, tuple)
        return _tcp_channel(sock, f"{peer[0]}:{peer[1]}")

    def upgrade(self, stream: StreamChannel, *, dialled: bool, lane: int = 0) -> Channel:
        return stream

    def close(self) -> None:
        self._listener.close()


def dial_tcp(address: str) -> StreamChannel:
    """Connect to "tcp://host:port", or that under another scheme. Raises ChannelClosed."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise ChannelClosed(f"{address}: {error}") from error
    return _tcp_channel(sock, address)


def _tcp_channel(sock: socket.socket, peer: str) -> StreamChannel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return StreamChannel(sock, peer, "tcp")


class ShmWire:
    """``shm://host-identity/name``: an abstract Unix socket for the hellos and answers, a ring for the rest.

    The identity names boot, network and IPC namespace, so only an engine that can share memory with this one dials; the kernel
    tells the peer's user, and another user's process is turned away.
    """

    scheme = "shm"
    connections = 1  # a handoff waits for one ring at most, about a millisecond

    def __init__(self, host_identity: str, ring_bytes: int = DEFAULT_RING_BYTES) -> None:
        self._host = host_identity
        self._ring_bytes = ring_bytes
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"relay-kv-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        self.address = f"{self.scheme}://{host_identity}/{name}"
        self._listener = _Listener(listener)

    def reaches(self, address: str) -> bool:
        scheme, _, rest = address.partition("://")
        return scheme == self.scheme and rest.rpartition("/")[0] == self._host

    def dial(self, address: str) -> StreamChannel:
        return dial_shm(address)

    def accept(self) -> StreamChannel | None:
        while (accepted := self._listener.accept()) is not None:
            stream = StreamChannel(accepted[0], "a local process", "shm")
            if _same_user(accepted[0]):
                return stream
            stream.close()
        return None

    def upgrade(self, stream: StreamChannel, *, dialled: bool, lane: int = 0) -> Channel:
        return take_ring(stream) if dialled else offer_ring(stream, self._ring_bytes)

    def close(self) -> None:
        self._listener.close()


def dial_shm(address: str) -> StreamChannel:
    """Connect to the socket of "shm://host/name". Raises ChannelClosed."""
    name = address.rpartition("/")[2]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.connect(f"\0{name}")
        if not _same_user(sock):
            raise PermissionError(errno.EACCES, "the listener belongs to another user")
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"shm {name}: {error}") from error
    return StreamChannel(sock, f"shm {name}", "shm")


def _same_user(sock: socket.socket) -> bool:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid == os.geteuid()


def open_wires(
    name: TransportName,
    host_identity: str,
    host: str = "127.0.0.1",
    port: int = 0,
    ring_bytes: int = DEFAULT_RING_BYTES,
    first: Sequence[Wire] = (),
) -> list[Wire]:
    """The wires of ``--transport``, best first, after ``first``. "shm" has no way to an engine on another host, and does not
    pretend to.

    "nixl" is offered alone, so that no KV goes another way unnoticed. Raises UsageError where it is not installed.
    """
    if name == "nixl":
        from relay.transfer.nixl.wire import NixlWire

        return [NixlWire(host, port, ring_bytes)]
    wires: list[Wire] = list(first)
    if name != "tcp":
        wires.append(ShmWire(host_identity, ring_bytes))
    if name != "shm":
        wires.append(TcpWire(host, port))
    return wires
