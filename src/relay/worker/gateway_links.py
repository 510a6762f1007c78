"""A worker process's connections to all its gateways, for a selector loop: dialled, welcomed, lost, dialled again.

Every connection has a number that is never used again. One gateway whose loss ends the process needs no second connection:
``again`` False.
"""

import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relay.protocol.messages import Message, Rejected, Welcome
from relay.worker.control_link import ControlLink, LinkLost

REDIAL_NS = 50_000_000  # after a loss; doubles up to
MAX_REDIAL_NS = 800_000_000
WELCOME_NS = 5_000_000_000  # dialled and not welcomed: dialled again


@dataclass(frozen=True, slots=True)
class Welcomed:
    connection: int
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Received:
    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    connection: int
    reason: str


LinkEvent = Welcomed | Received | Lost


@dataclass(slots=True)
class _Gateway:
    address: str
    connection: int = 0
    link: ControlLink | None = None
    welcome: bool = False
    dialled_ns: int = 0
    dial_ns: int = 0  # when to dial
    delay_ns: int = REDIAL_NS


class GatewayLinks:
    """``hello`` makes the first message of each connection; ``incoming`` is the union of messages to expect."""

    def __init__(
        self,
        addresses: Sequence[str],
        incoming: Any,
        hello: Callable[[], Message],
        now_ns: Callable[[], int],
        *,
        again: bool,
    ) -> None:
        self._gateways = [_Gateway(address) for address in addresses]
        self._incoming = incoming
        self._hello = hello
        self._now_ns = now_ns
        self._again = again
        self._numbers = 0
        self._lost: list[Lost] = []
        self._selector: selectors.BaseSelector | None = None

    def dial_first(self) -> None:
        """Connect to every gateway. Raises LinkLost if one cannot be reached and will not be dialled again."""
        for gateway in self._gateways:
            try:
                self._dial(gateway, wait=not self._again)
            except LinkLost as error:
                if not self._again:
                    raise
                self._end(gateway, str(error))

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Register the connections, those to come included."""
        self._selector = selector
        for gateway in self._gateways:
            if gateway.link is not None:
                selector.register(gateway.link, selectors.EVENT_READ)

    def next_ns(self) -> int | None:
        """When ``tick`` has something to do."""
        if not self._again:
            return None
        waiting = [gateway for gateway in self._gateways if not gateway.welcome]
        return min([g.dial_ns if g.link is None else g.dialled_ns + WELCOME_NS for g in waiting], default=None)

    def tick(self) -> None:
        """Dial what is due."""
        if not self._again:
            return
        now_ns = self._now_ns()
        for gateway in self._gateways:
            if gateway.link is not None and not gateway.welcome and now_ns >= gateway.dialled_ns + WELCOME_NS:
                self._end(gateway, f"{gateway.address} does not answer")
            elif gateway.link is None and now_ns >= gateway.dial_ns:
                try:
                    self._dial(gateway, wait=False)
                except LinkLost as error:
                    self._end(gateway, str(error))

    def serve(self, link: ControlLink, mask: int) -> list[LinkEvent]:
        """What happened on ``link``, which the selector says is ready."""
        gateway = next((g for g in self._gateways if g.link is link), None)
        if gateway is None:
            return []
        events: list[LinkEvent] = []
        try:
            if mask & selectors.EVENT_WRITE:
                link.flush()
            messages: list[Message] = link.receive() if mask & selectors.EVENT_READ else []
            for message in messages:
                if isinstance(message, Rejected):
                    raise LinkLost(f"refused by {link.address}: {message.reason}")
                if isinstance(message, Welcome):
                    gateway.welcome = True
                    gateway.delay_ns = REDIAL_NS
                    events.append(Welcomed(gateway.connection, message))
                else:
                    events.append(Received(gateway.connection, message))
        except LinkLost as error:
            self._end(gateway, str(error))
        return events

    @property
    def num_welcomed(self) -> int:
        """Gateways that are there."""
        return sum(gateway.welcome for gateway in self._gateways)

    def take_lost(self) -> list[Lost]:
        """Connections that have ended since the last call, those that a ``send`` found included."""
        lost, self._lost = self._lost, []
        return lost

    def send(self, connection: int | None, message: msgspec.Struct) -> None:
        """To one connection, or to all that were welcomed. One that has ended hears nothing."""
        for gateway in self._gateways:
            link = gateway.link
            if link is None or not (gateway.welcome if connection is None else gateway.connection == connection):
                continue
            try:
                link.send(message)
            except LinkLost as error:
                self._end(gateway, str(error))

    def close(self, connection: int) -> None:
        """End a connection; ``take_lost`` will not tell of it."""
        for gateway in self._gateways:
            if gateway.connection == connection and gateway.link is not None:
                self._end(gateway, "closed")
                self._lost.pop()

    def update(self) -> None:
        """Before the selector waits: whether to wait for room to send."""
        assert self._selector is not None
        for gateway in self._gateways:
            if gateway.link is not None:
                writing = selectors.EVENT_WRITE if gateway.link.wants_write else 0
                self._selector.modify(gateway.link, selectors.EVENT_READ | writing)

    def finish(self, timeout_s: float) -> None:
        """Send the rest and close."""
        for gateway in self._gateways:
            if gateway.link is not None:
                gateway.link.finish(timeout_s)
                gateway.link = None

    def _dial(self, gateway: _Gateway, *, wait: bool) -> None:
        self._numbers += 1
        gateway.connection = self._numbers
        gateway.welcome = False
        gateway.dialled_ns = self._now_ns()
        gateway.link = ControlLink(gateway.address, self._incoming, wait=wait)
        if self._selector is not None:
            self._selector.register(gateway.link, selectors.EVENT_READ | selectors.EVENT_WRITE)
        gateway.link.send(self._hello())

    def _end(self, gateway: _Gateway, reason: str) -> None:
        link, gateway.link, gateway.welcome = gateway.link, None, False
        if link is not None:
            if self._selector is not None:
                self._selector.unregister(link)
            link.close()
        self._lost.append(Lost(gateway.connection, reason))
        gateway.dial_ns = self._now_ns() + gateway.delay_ns
        gateway.delay_ns = min(2 * gateway.delay_ns, MAX_REDIAL_NS)
