"""The HTTP listener, opened before anything else starts."""

import errno
import socket

from relay.errors import PortInUseError, UsageError

BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises PortInUseError naming the address, UsageError for an address that is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(f"--host {host!r}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{host}:{port} is in use; choose another --port, or 0 for a free one") from error
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
