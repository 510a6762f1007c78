"""One end of the socket pair between the supervisor and a gateway, on an event loop."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

from relay.protocol.framing import FrameDecoder, encode


class Channel(asyncio.Protocol):
    """``received`` gets every message, ``lost`` is called once when the other end is gone."""

    def __init__(self, incoming: Any, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._decoder = FrameDecoder(incoming)
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Read and write on ``end`` from now on, and own it."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._received(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, message: msgspec.Struct) -> None:
        """Queue ``message``; to an end that is gone it is lost."""
        if self._transport is not None:
            self._transport.write(encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
