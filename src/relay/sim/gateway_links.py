"""A simulated process's connections to its gateways. It follows ``worker/gateway_links.py``."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relay.protocol.framing import FrameDecoder, FramingError, encode
from relay.protocol.messages import Message, Rejected, Welcome
from relay.sim.network import Network, Side
from relay.sim.process import Process

REDIAL_NS = 50_000_000


class _Link:
    """One gateway, and the connection there is to it now."""

    def __init__(self, address: str, incoming: Any) -> None:
        self.address = address
        self.incoming = incoming
        self.decoder = FrameDecoder(incoming)
        self.connection = 0
        self.side: Side | None = None
        self.welcome = False


class SimGatewayLinks:
    """``again`` False: what is lost is not dialled again. ``lost(connection, reason)`` is called once a connection."""

    def __init__(
        self,
        network: Network,
        process: Process,
        host: str,
        kind: str,
        addresses: Sequence[str],
        incoming: Any,
        hello: Callable[[], Message],
        welcomed: Callable[[int, Welcome], None],
        received: Callable[[int, Message], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self._network = network
        self._process = process
        self._host = host
        self._kind = kind
        self._links = [_Link(address, incoming) for address in addresses]
        self._again = len(self._links) > 1
        self._hello = hello
        self._welcomed = welcomed
        self._received = received
        self._lost = lost
        self._numbers = 0
        for link in self._links:
            self._dial(link)

    def send(self, connection: int | None, message: msgspec.Struct) -> None:
        """To one connection, or to all that were welcomed."""
        for link in self._links:
            if link.side is not None and (link.welcome if connection is None else link.connection == connection):
                link.side.send(encode(message))

    def close(self, connection: int) -> None:
        """End a connection; nobody is told here."""
        for link in self._links:
            if link.connection == connection and link.side is not None:
                self._end(link)

    def _dial(self, link: _Link) -> None:
        self._numbers += 1
        link.connection = number = self._numbers
        link.decoder = FrameDecoder(link.incoming)

        def dialled(result: Side | str) -> None:
            if isinstance(result, str):
                self._over(link, number, result)
                return
            link.side = result
            result.on_data = self._process.guard(lambda data: self._data(link, number, data))
            result.on_close = self._process.guard(lambda reason: self._over(link, number, reason))
            result.send(encode(self._hello()))

        self._network.dial(self._host, self._kind, link.address, self._process.guard(dialled))

    def _data(self, link: _Link, number: int, data: bytes) -> None:
        if link.connection != number or link.side is None:
            return
        try:
            messages: list[Message] = link.decoder.feed(data)
        except FramingError as error:
            self._over(link, number, str(error))
            return
        for message in messages:
            if link.connection != number:
                return
            if isinstance(message, Rejected):
                self._over(link, number, f"refused: {message.reason}")
                return
            if isinstance(message, Welcome):
                link.welcome = True
                self._welcomed(number, message)
            else:
                self._received(number, message)

    def _over(self, link: _Link, number: int, reason: str) -> None:
        if link.connection == number:
            self._end(link)
            self._lost(number, reason)

    def _end(self, link: _Link) -> None:
        side, link.side, link.welcome, link.connection = link.side, None, False, 0
        if side is not None and side.open:
            side.close()
        if self._again:
            self._process.after(REDIAL_NS, self._dial, link)
