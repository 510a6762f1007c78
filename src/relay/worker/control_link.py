"""The connection of an agent or an engine to one gateway: a non-blocking socket for a selector loop."""

import errno
import os
import select
import socket
import time
from typing import Any

import msgspec

from relay.protocol.framing import FrameDecoder, FramingError, encode
from relay.worker.spec import parse_address

CONNECT_TIMEOUT_S = 3.0
MAX_UNSENT_BYTES = 64 * 1024 * 1024
_READ_BYTES = 1 << 18


class LinkLost(Exception):
    """The connection ended; the text says how."""


class ControlLink:
    """Messages out are queued and sent as the socket takes them; messages in come from ``receive``."""

    def __init__(self, address: str, incoming: Any, *, wait: bool = True) -> None:
        """Connect to "tcp://host:port"; ``incoming`` is the union of messages to expect. Raises LinkLost.

        ``wait`` False: only begin to connect (the address should need no look-up); the first ``flush`` that is possible ends it.
        """
        self.address = address
        self._decoder = FrameDecoder(incoming)
        self._unsent = bytearray()
        self._connecting = not wait
        try:
            self._socket = _dial(parse_address(address), wait)
        except OSError as error:
            raise LinkLost(f"cannot connect to gateway {address}: {error}") from error
        option = self._socket.setsockopt
        option(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent) or self._connecting

    def send(self, message: msgspec.Struct) -> None:
        """Queue ``message`` and send what the socket takes. Raises LinkLost."""
        self._unsent += encode(message)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise LinkLost(f"gateway {self.address} does not read: {len(self._unsent)} bytes unsent")
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Raises LinkLost."""
        if self._connecting:
            if not select.select([], [self._socket], [], 0)[1]:
                return
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise LinkLost(f"cannot connect to gateway {self.address}: {os.strerror(error)}")
            self._connecting = False
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLost(f"gateway {self.address}: {error}") from error

    def receive(self) -> list[Any]:
        """Messages that have come, possibly none. Raises LinkLost at the end of the connection or a bad frame."""
        if self._connecting:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(f"gateway {self.address}: {error}") from error
        if not data:
            raise LinkLost(f"gateway {self.address} closed the connection")
        try:
            return self._decoder.feed(data)
        except FramingError as error:
            raise LinkLost(f"gateway {self.address}: {error}") from error

    def close(self) -> None:
        """Close at once; what is unsent is lost."""
        self._socket.close()

    def finish(self, timeout_s: float) -> None:
        """Send the rest, waiting at most ``timeout_s``, and close. A peer that is gone already is no error here."""
        deadline = time.monotonic() + timeout_s
        try:
            while self._unsent and (left := deadline - time.monotonic()) > 0:
                select.select([], [self._socket], [], left)
                self.flush()
            self._socket.shutdown(socket.SHUT_WR)
        except LinkLost:
            self._unsent.clear()
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET):
                raise
        self._socket.close()


def _dial(address: tuple[str, int], wait: bool) -> socket.socket:
    """A socket that is connected, or is connecting. Raises OSError."""
    if wait:
        return socket.create_connection(address, CONNECT_TIMEOUT_S)
    family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    dialling = socket.socket(family, kind, protocol)
    try:
        dialling.setblocking(False)
        result = dialling.connect_ex(target)
        if result not in (0, errno.EINPROGRESS):
            raise OSError(result, os.strerror(result))
    except OSError:
        dialling.close()
        raise
    return dialling
