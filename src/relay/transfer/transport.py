"""The transport of real engines: threads and blocking calls over wires; P dials D.

Leases (sender and receiver) end a transfer whose peer is connected and silent; how a dead peer shows is the wire's business.
"""

import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np

from relay.clock import Clock, MonotonicClock
from relay.transfer.channel import Channel, ChannelClosed, WireUnusable
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
from relay.transfer.handshake import HANDSHAKE_TIMEOUT_S, HelloRefused, greet, welcome
from relay.transfer.inbound import InboundLink, ReceptionTable
from relay.transfer.outbound import OutboundLink
from relay.transfer.store import ChecksummedStore
from relay.transfer.stream import StreamChannel
from relay.transfer.wire import Wire

MAX_CONNECTIONS = 768


class WiredTransport:
    """``Transport`` over ``wires``, best first. Events come from transfer threads: ``emit`` must be thread-safe and not block."""

    def __init__(
        self,
        identity: Identity,
        store: KvStore,
        emit: Callable[[TransferEvent], None],
        wires: Sequence[Wire],
        limits: TransferLimits | None = None,
        checksum: Checksum = crc32c,
        clock: Clock | None = None,
    ) -> None:
        self._identity = identity
        self._store = ChecksummedStore(store, identity.layout, checksum)
        self._wires = list(wires)
        self._emit = emit
        self._limits = limits or TransferLimits()
        self._checksum = checksum
        self._clock = clock or MonotonicClock()
        self._table = ReceptionTable(identity.layout, self._limits, emit, self._clock)
        self._lock = threading.Lock()
        self._links: dict[tuple[str, int], OutboundLink] = {}
        self._link_of: dict[int, OutboundLink] = {}  # by transfer
        self._accepted: set[StreamChannel] = set()
        self._closed = False
        for wire in self._wires:
            threading.Thread(target=self._accept, args=(wire,), name=f"kv-accept-{wire.scheme}", daemon=True).start()

    @property
    def addresses(self) -> list[str]:
        return [wire.address for wire in self._wires]

    def open_send(self, order: SendOrder) -> None:
        key = (order.target, order.target_incarnation)
        with self._lock:
            link = self._links.get(key)
            new = link is None or link.closed
            if link is None or new:
                link = self._links[key] = OutboundLink(
                    order,
                    self._dial,
                    self._identity.incarnation,
                    self._identity.layout,
                    self._store,
                    self._limits,
                    self._checksum,
                    self._report,
                    self._clock,
                    self._store.parts,
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
        """Close the listeners and every connection; running transfers fail. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links, channels = list(self._links.values()), list(self._accepted)
        for wire in self._wires:
            wire.close()
        for link in links:
            link.close("engine closes")
        for channel in channels:
            channel.close()

    def _report(self, event: TransferEvent) -> None:
        self._link_of.pop(event.transfer, None)
        self._emit(event)

    def _dial(self, order: SendOrder) -> list[Channel]:
        """Channels to the target over the first of its addresses that this end can reach and that answers.

        Raises ChannelClosed with every address's problem, HelloRefused, FrameError.
        """
        problems = []
        for address in order.addresses:
            wire = next((wire for wire in self._wires if wire.reaches(address)), None)
            if wire is None:
                problems.append(f"{address}: not reachable from here over {', '.join(w.scheme for w in self._wires)}")
                continue
            try:
                first = wire.dial(address)
            except ChannelClosed as error:
                problems.append(str(error))
                continue
            channels: list[Channel] = []
            streams = [first]
            try:
                channels.append(self._greet(wire, first, order, 0))
                for lane in range(1, wire.connections):
                    streams.append(wire.dial(address))
                    channels.append(self._greet(wire, streams[-1], order, lane))
            except WireUnusable as error:
                problems.append(str(error))
                _close(streams)
                continue
            except BaseException:
                _close(streams)
                raise
            return channels
        raise ChannelClosed("; ".join(problems) or "no address given")

    def _greet(self, wire: Wire, stream: StreamChannel, order: SendOrder, lane: int) -> Channel:
        stream.set_timeout(HANDSHAKE_TIMEOUT_S)
        greet(stream, self._identity, self._checksum, order.target, order.target_incarnation)
        channel = wire.upgrade(stream, dialled=True, lane=lane)
        channel.set_timeout(None)
        return channel

    def _accept(self, wire: Wire) -> None:
        while (stream := wire.accept()) is not None:
            with self._lock:
                full = self._closed or len(self._accepted) >= MAX_CONNECTIONS
                if not full:
                    self._accepted.add(stream)
            if full:
                stream.close()
            else:
                threading.Thread(target=self._serve, args=(wire, stream), name="kv-receive", daemon=True).start()

    def _serve(self, wire: Wire, stream: StreamChannel) -> None:
        try:
            stream.set_timeout(HANDSHAKE_TIMEOUT_S)
            peer = welcome(stream, self._identity, self._checksum)
            channel = wire.upgrade(stream, dialled=False)
            channel.set_timeout(None)
            InboundLink(channel, peer, self._table, self._store, self._checksum, self._clock).run()
        except (ChannelClosed, FrameError, HelloRefused) as error:
            stream.close()  # nothing was received here
            if isinstance(error, HelloRefused):
                print(f"KV connection refused: {error}", file=sys.stderr, flush=True)
        finally:
            with self._lock:
                self._accepted.discard(stream)


def _close(streams: list[StreamChannel]) -> None:
    for stream in streams:
        stream.close()
