"""The TCP transport: blocking sockets and threads, one listening socket an engine; P dials D.

``TCP_USER_TIMEOUT`` and keepalive end a connection to a peer that vanished without a word; leases (sender and receiver)
end a transfer whose peer is connected and silent.
"""

import errno
import os
import socket
import threading
from collections.abc import Callable

import numpy as np

from relay.clock import Clock, MonotonicClock
from relay.errors import PortInUseError
from relay.transfer.channel import Channel, ChannelClosed
from relay.transfer.checksum import crc32c
from relay.transfer.contract import (
    Identity,
    KvStore,
    ReceiveOrder,
    SendFailed,
    SendOrder,
    TransferEvent,
    TransferLimits,
)
from relay.transfer.frame import Checksum, FrameError, Handoff
from relay.transfer.handshake import HANDSHAKE_TIMEOUT_S, HelloRefused, welcome
from relay.transfer.inbound import InboundLink, ReceptionTable
from relay.transfer.outbound import OutboundLink

CONNECT_TIMEOUT_S = 3.0
USER_TIMEOUT_MS = 3000
MAX_CONNECTIONS = 256


class TcpChannel:
    """A connected socket as a ``Channel``."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def send(self, header: bytes, payload: bytes | memoryview) -> None:
        try:
            sent = self._socket.sendmsg([header, payload])
            if sent < len(header):
                self._socket.sendall(header[sent:])
                sent = len(header)
            if sent < len(header) + len(payload):
                self._socket.sendall(memoryview(payload)[sent - len(header) :])
        except OSError as error:
            raise ChannelClosed(f"{self.peer}: {error}") from error

    def receive_into(self, view: memoryview) -> None:
        received = 0
        try:
            while received < len(view):
                count = self._socket.recv_into(view[received:])
                if count == 0:
                    middle = f" in the middle of a frame ({received} of {len(view)} bytes)" if received else ""
                    raise ChannelClosed(f"{self.peer} closed the connection{middle}")
                received += count
        except OSError as error:
            raise ChannelClosed(f"{self.peer}: {error}") from error

    def set_timeout(self, seconds: float | None) -> None:
        try:
            self._socket.settimeout(seconds)
        except OSError as error:  # closed by another thread, as when the engine ends in the middle of a handshake
            raise ChannelClosed(f"{self.peer}: {error}") from error

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise
        self._socket.close()


def dial(addresses: tuple[str, ...]) -> Channel:
    """Connect to the first "tcp://host:port" that answers. Raises ChannelClosed with every address's error."""
    problems = []
    for address in addresses:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            problems.append(f"{address}: {error}")
        else:
            return TcpChannel(sock, address)
    raise ChannelClosed("; ".join(problems) or "no address given")


class TcpTransport:
    """``Transport`` over TCP. Events are emitted from transfer threads: ``emit`` must be thread-safe and must not block."""

    def __init__(
        self,
        identity: Identity,
        store: KvStore,
        emit: Callable[[TransferEvent], None],
        host: str = "127.0.0.1",
        port: int = 0,
        limits: TransferLimits | None = None,
        checksum: Checksum = crc32c,
        clock: Clock | None = None,
    ) -> None:
        self._identity = identity
        self._store = store
        self._emit = emit
        self._limits = limits or TransferLimits()
        self._checksum = checksum
        self._clock = clock or MonotonicClock()
        self._table = ReceptionTable(identity.layout, self._limits, emit, self._clock)
        self._lock = threading.Lock()
        self._links: dict[tuple[str, int], OutboundLink] = {}
        self._link_of: dict[int, OutboundLink] = {}  # by transfer
        self._accepted: set[Channel] = set()
        self._closed = False
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"KV address {host}:{port} is already in use") from error
            raise
        bound = self._listener.getsockname()
        self._addresses = [f"tcp://{bound[0]}:{bound[1]}"]
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    @property
    def addresses(self) -> list[str]:
        return list(self._addresses)

    def open_send(self, order: SendOrder) -> None:
        key = (order.target, order.target_incarnation)
        with self._lock:
            link = self._links.get(key)
            new = link is None or link.closed
            if link is None or new:
                link = self._links[key] = OutboundLink(
                    order, dial, self._identity, self._store, self._limits, self._checksum, self._report, self._clock
                )
            self._link_of[order.transfer] = link
        if not link.open(order):  # it ended since it was looked up
            self._report(SendFailed(order.transfer, f"KV connection to {order.target} was lost", False))
        if new:
            link.start()

    def layer_written(self, transfer: int, layer: int, first: int, count: int, block_table: np.ndarray) -> None:
        link = self._link_of.get(transfer)
        if link is not None:
            link.layer_written(transfer, layer, first, count, block_table)

    def forget_unsent(self, transfer: int) -> None:
        link = self._link_of.get(transfer)
        if link is not None:
            link.forget_unsent(transfer)

    def send_handoff(self, transfer: int, handoff: Handoff) -> None:
        link = self._link_of.get(transfer)
        if link is not None:
            link.hand_off(transfer, handoff)

    def open_receive(self, order: ReceiveOrder) -> None:
        self._table.open(order)

    def abort(self, transfer: int, reason: str) -> None:
        link = self._link_of.pop(transfer, None)
        if link is not None:
            link.abort(transfer, reason)
        self._table.abort(transfer, reason)

    def tick(self, now_ns: int) -> None:
        with self._lock:
            links = list(self._links.values())
            self._links = {key: link for key, link in self._links.items() if not link.closed}
        for link in links:
            link.tick(now_ns)
        self._table.tick(now_ns)

    def close(self) -> None:
        """Close the listener and every connection; running transfers fail. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links, channels = list(self._links.values()), list(self._accepted)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close alone would not
        self._listener.close()
        for link in links:
            link.close("engine closes")
        for channel in channels:
            channel.close()

    def _report(self, event: TransferEvent) -> None:
        self._link_of.pop(event.transfer, None)
        self._emit(event)

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._closed or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM):
                    os.sched_yield()
                    continue
                raise
            channel = TcpChannel(sock, f"{peer[0]}:{peer[1]}")
            with self._lock:
                full = self._closed or len(self._accepted) >= MAX_CONNECTIONS
                if not full:
                    self._accepted.add(channel)
            if full:
                channel.close()
                continue
            threading.Thread(target=self._serve, args=(channel,), name="kv-receive", daemon=True).start()

    def _serve(self, channel: TcpChannel) -> None:
        try:
            channel.set_timeout(HANDSHAKE_TIMEOUT_S)
            peer = welcome(channel, self._identity, self._checksum)
            channel.set_timeout(None)
            InboundLink(channel, peer, self._table, self._store, self._checksum, self._clock).run()
        except (ChannelClosed, FrameError, HelloRefused):
            channel.close()  # the dialling side has the reason and reports it; nothing was received here
        finally:
            with self._lock:
                self._accepted.discard(channel)
