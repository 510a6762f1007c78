"""The socket between the process that holds a GPU's weights and the engines that use them.

An abstract Unix socket: nothing in the file system, gone with its owner. The holder answers each connection with one message
(8 bytes of length, then the handles) once the weights are loaded; the connection then stays open for as long as they are used.
"""

import contextlib
import os
import socket
import struct
import time

CONNECT_S = 10.0  # the holder listens before it loads anything
LOAD_S = 170.0  # under the gateway's deadline for a start
POLL_S = 0.05
_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
MAX_MESSAGE_BYTES = 64 << 20


class NotShared(Exception):
    """There are no weights to be had; the text says why."""


def listen(name: str) -> socket.socket:
    """Raises OSError if ``name`` is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(64)
    return listener


def same_user(connection: socket.socket) -> bool:
    """The kernel says whose the other end is; handles are given to nobody else."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1]) == os.getuid()


def send_message(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def fetch(name: str, connect_s: float = CONNECT_S, load_s: float = LOAD_S) -> tuple[socket.socket, bytes]:
    """The open connection and the holder's message. Raises NotShared."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + connect_s
    try:
        while True:
            try:
                connection.connect(f"\0{name}")
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise NotShared(f"no process holds them ({name})") from None
                time.sleep(POLL_S)
        if not same_user(connection):
            raise NotShared("the process that holds them is another user's")
        connection.settimeout(load_s)
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise NotShared(f"a message of {length} bytes")
        message = _receive(connection, length)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise NotShared(f"the process that holds them does not answer: {error}") from error
    except NotShared:
        connection.close()
        raise
    return connection, message


def wait_for_end(connection: socket.socket) -> None:
    """Return when the holder is gone."""
    with contextlib.suppress(OSError):
        while connection.recv(1):
            pass


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(1 << 20, size - len(data)))
        if not part:
            raise NotShared("the process that holds them has ended")
        data += part
    return bytes(data)
