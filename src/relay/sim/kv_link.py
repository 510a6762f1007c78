"""KV connections over the simulated network: the production frames, hello check, Sender, Receiver and table of receptions.

What ``transfer/transport.py`` does with threads and blocking sockets is done here by callbacks; nothing else differs.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from relay.clock import Clock
from relay.kernels.kv_frames import Heads
from relay.sim.forgery import admitted, forged
from relay.sim.network import Network, Side
from relay.transfer.contract import (
    Identity,
    KvStore,
    ReceiveOrder,
    SendAcknowledged,
    SendFailed,
    SendOrder,
    TransferEvent,
    TransferLimits,
    read_frame_kv,
    write_frame_kv,
)
from relay.transfer.frame import (
    HEADER_BYTES,
    Abort,
    FrameError,
    Handoff,
    Header,
    Hello,
    Kind,
    decode_payload,
    encode_payload,
    parse,
    seal,
    verify,
)
from relay.transfer.handshake import mismatch
from relay.transfer.inbound import ReceptionTable
from relay.transfer.receiver import Receiver, ReceiverState
from relay.transfer.sender import Outgoing, Sender, SenderState


def checksum(data: bytes | bytearray | memoryview, value: int) -> int:
    """Stands in for CRC32C: as good at finding damage, and in C everywhere."""
    return zlib.crc32(data, value)


class FrameStream:
    """Bytes in, verified frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Header, bytes]]:
        """Raises FrameError for damage; nothing after it counts."""
        buffer = self._buffer
        buffer += data
        frames = []
        while len(buffer) >= HEADER_BYTES:
            raw = bytes(buffer[:HEADER_BYTES])
            header, expected = parse(raw, checksum)
            end = HEADER_BYTES + header.payload_bytes
            if len(buffer) < end:
                break
            payload = bytes(buffer[HEADER_BYTES:end])
            verify(payload, expected, checksum)
            frames.append((header, payload))
            del buffer[:end]
        return frames


def frame(header: Header, payload: bytes) -> bytes:
    return seal(header, payload, checksum) + payload


def hello_frame(identity: Identity) -> bytes:
    payload = encode_payload(identity.hello())
    return frame(Header(Kind.HELLO, epoch=identity.incarnation, payload_bytes=len(payload)), payload)


class _Sending:
    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.block_table = np.zeros(0, np.int32)


class OutboundLink:
    """All transfers of one P to one life of one D."""

    def __init__(self, transport: "SimTransport", order: SendOrder) -> None:
        self._transport = transport
        self._order = order
        self._stream = FrameStream()
        self._side: Side | None = None
        self.greeted = False
        self.closed = False
        self.sendings: dict[int, _Sending] = {}
        transport.network.dial(transport.host, "kv", order.addresses[0], transport.guard(self._dialled))

    def _dialled(self, result: Side | str) -> None:
        if isinstance(result, str):
            self.close(result)
        elif self.closed:
            result.close()
        else:
            self._side = result
            guard = self._transport.guard
            result.on_data, result.on_close = guard(self._data), guard(self.close)
            result.send(hello_frame(self._transport.identity))

    def _data(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            for header, payload in self._stream.feed(data):
                self._transport.network.handled()
                if self.greeted:
                    sending = self.sendings.get(header.transfer)
                    if sending is not None:
                        sending.sender.receive(header, payload, self._transport.clock.now_ns())
                        self.flush(sending)
                elif not self._greet(header, payload):
                    return
        except FrameError as error:
            self.close(f"KV connection to {self._order.target} failed: {error}")

    def _greet(self, header: Header, payload: bytes) -> bool:
        """The checks of ``handshake.greet``."""
        if header.kind is Kind.ABORT:
            self.close(decode_payload(payload, Abort).reason)
            return False
        if header.kind is not Kind.HELLO:
            raise FrameError(f"{header.kind.name} before HELLO")
        theirs = decode_payload(payload, Hello)
        problem = mismatch(self._transport.identity.hello(), theirs)
        if not problem and (theirs.worker, theirs.incarnation) != (self._order.target, self._order.target_incarnation):
            problem = f"{theirs.worker} incarnation {theirs.incarnation} answered"
        if problem:
            self.close(problem)
            return False
        self.greeted = True
        for sending in list(self.sendings.values()):
            sending.sender.link_opened(self._transport.clock.now_ns())
            self.flush(sending)
        return True

    def open(self, order: SendOrder) -> None:
        one, now_ns = self._transport, self._transport.clock.now_ns()
        identity = one.identity
        sender = Sender(order, identity.incarnation, identity.layout, one.limits, now_ns, one.parts)
        sending = self.sendings[order.transfer] = _Sending(sender)
        if self.greeted:
            sending.sender.link_opened(now_ns)
            self.flush(sending)

    def abort(self, transfer: int, reason: str) -> None:
        sending = self.sendings.pop(transfer, None)
        if sending is not None:
            sending.sender.abort(reason)
            self._send(sending)

    def tick(self, now_ns: int) -> None:
        for sending in list(self.sendings.values()):
            if self.greeted:
                sending.sender.tick(now_ns)
            self.flush(sending)

    def close(self, reason: str) -> None:
        self.closed = True
        for sending in list(self.sendings.values()):
            sending.sender.link_lost(reason)
            self.flush(sending)
        if self._side is not None:
            self._side.close()

    def flush(self, sending: _Sending) -> None:
        """Send what may be sent; if the transfer is over, forget it and say so."""
        self._send(sending)
        sender = sending.sender
        transfer = sender.order.transfer
        if not sender.over or self.sendings.pop(transfer, None) is None:
            return
        self._send(sending)
        if sender.state is SenderState.ACKNOWLEDGED:
            self._transport.report(SendAcknowledged(transfer, sender.stats("sim")))
        else:
            self._transport.report(SendFailed(transfer, sender.reason, sender.handed_off))

    def _send(self, sending: _Sending) -> None:
        side = self._side
        if side is None or not self.greeted:
            return
        while (outgoing := sending.sender.next_frame()) is not None:
            header, payload = outgoing.header, outgoing.payload
            if payload is None:
                raw = bytearray(header.payload_bytes)
                heads = self._transport.identity.layout.heads_of(header)
                read_frame_kv(self._transport.store, header, sending.block_table, memoryview(raw), heads)
                payload = bytes(raw)
            side.send(frame(*forged(self._transport.network, side, header, payload, sending.sender.order)))


class InboundLink:
    """One accepted connection at D."""

    scheme = "sim"

    def __init__(self, transport: "SimTransport", side: Side) -> None:
        self._transport = transport
        self._side = side
        self._stream = FrameStream()
        self._peer: Hello | None = None
        self._ended = False
        side.on_data, side.on_close = transport.guard(self._data), transport.guard(self._lost)

    def post(self, replies: list[Outgoing]) -> None:
        for reply in replies:
            self._side.send(frame(reply.header, reply.payload or b""))

    def _data(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            for header, payload in self._stream.feed(data):
                self._transport.network.handled()
                if self._peer is None:
                    self._welcome(header, payload)
                else:
                    self._handle(header, payload)
        except FrameError as error:
            self._side.close()
            self._lost(str(error))

    def _welcome(self, header: Header, payload: bytes) -> None:
        """The checks of ``handshake.welcome``."""
        if header.kind is not Kind.HELLO:
            raise FrameError(f"{header.kind.name} before HELLO")
        theirs = decode_payload(payload, Hello)
        problem = mismatch(self._transport.identity.hello(), theirs)
        if problem:
            reason = encode_payload(Abort(problem))
            self._side.send(frame(Header(Kind.ABORT, payload_bytes=len(reason)), reason))
            raise FrameError(problem)
        self._peer = theirs
        self._side.send(hello_frame(self._transport.identity))

    def _handle(self, header: Header, payload: bytes) -> None:
        """As ``transfer.inbound.InboundLink``."""
        assert self._peer is not None
        if header.epoch != self._peer.incarnation:
            return
        table = self._transport.table
        reception = table.get(header.transfer)
        if reception is None or reception.receiver.order.source != self._peer.worker:
            if header.kind is not Kind.ABORT:
                reason = encode_payload(Abort("unknown transfer"))
                reply = Header(Kind.ABORT, header.transfer, header.epoch, header.attempt, payload_bytes=len(reason))
                self.post([Outgoing(reply, reason)])
            return
        receiver = reception.receiver
        now_ns = self._transport.clock.now_ns()
        if header.kind is Kind.KV:
            if receiver.admit(header, now_ns):
                admitted(header, receiver.order)
                heads = self._transport.identity.layout.heads_of(header)
                write_frame_kv(self._transport.store, header, reception.block_table, memoryview(payload), heads)
                receiver.written(header, now_ns)
        else:
            receiver.receive(header, payload, now_ns)
        reception.heard_on(cast(Any, self), header)
        table.settle(reception)

    def _lost(self, reason: str) -> None:
        self._ended = True
        name = self._peer.worker if self._peer else "somebody"
        self._transport.table.link_lost(cast(Any, self), f"KV connection from {name} ended: {reason}")


class SimTransport:
    """``Transport`` over the simulated network. ``guard`` makes a callback run in the engine process, later or never if it must."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        store: KvStore,
        emit: Callable[[TransferEvent], None],
        limits: TransferLimits,
        clock: Clock,
        guard: Callable[[Callable[[Any], None]], Callable[[Any], None]],
        parts: Sequence[Heads],
    ) -> None:
        self.network = network
        self.host = identity.worker
        self.identity = identity
        self.store = store
        self.limits = limits
        self.clock = clock
        self.guard = guard
        self.parts = parts
        self._emit = emit
        self.table = ReceptionTable(identity.layout, limits, emit, clock)
        self.receiving: dict[int, ReceiveOrder] = {}
        self._links: dict[tuple[str, int], OutboundLink] = {}
        self._link_of: dict[int, OutboundLink] = {}
        network.listen(self.addresses[0], self.host, self._accept)

    @property
    def addresses(self) -> list[str]:
        return [f"sim://{self.identity.worker}/{self.identity.incarnation}"]

    def open_transfers(self) -> list[int]:
        """Transfers that this engine sends or receives, for checkers."""
        sending = [transfer for link in self._links.values() for transfer in link.sendings]
        return sending + [transfer for transfer in self.receiving if self.table.get(transfer) is not None]

    def targets(self) -> list[str]:
        """Workers that this engine sends KV to now, for faults."""
        return list(dict.fromkeys(target for (target, _), link in self._links.items() if link.sendings))

    def senders(self) -> list[Sender]:
        return [sending.sender for link in self._links.values() for sending in link.sendings.values()]

    def receivers(self) -> list[Receiver]:
        """Of the open receptions."""
        receptions = [self.table.get(transfer) for transfer in self.receiving]
        return [reception.receiver for reception in receptions if reception is not None]

    def silences(self, now_ns: int) -> list[tuple[int, int, int]]:
        """(transfer, ns since its peer was heard, its lease) of open transfers, for checkers."""
        limits = self.limits
        senders = [
            sending.sender for link in self._links.values() if link.greeted for sending in link.sendings.values()
        ]
        found = [(sender.order.transfer, now_ns - sender.watchdog.heard_ns, limits.lease_ns) for sender in senders]
        for receiver in self.receivers():
            lease_ns = limits.open_lease_ns if receiver.state is ReceiverState.RESERVED else limits.lease_ns
            found.append((receiver.order.transfer, now_ns - receiver.watchdog.heard_ns, lease_ns))
        return found

    def open_send(self, order: SendOrder) -> None:
        key = (order.target, order.target_incarnation)
        link = self._links.get(key)
        if link is None or link.closed:
            link = self._links[key] = OutboundLink(self, order)
        self._link_of[order.transfer] = link
        link.open(order)

    def layer_written(self, transfer: int, layer: int, first: int, count: int, block_table: np.ndarray) -> None:
        link = self._link_of.get(transfer)
        sending = link.sendings.get(transfer) if link else None
        if link is not None and sending is not None:
            sending.block_table = block_table
            sending.sender.written(layer, first, count)
            link.flush(sending)

    def forget_unsent(self, transfer: int) -> None:
        link = self._link_of.get(transfer)
        if link is not None and transfer in link.sendings:
            link.sendings[transfer].sender.forget_unsent()

    def send_handoff(self, transfer: int, handoff: Handoff) -> None:
        link = self._link_of.get(transfer)
        sending = link.sendings.get(transfer) if link else None
        if link is not None and sending is not None:
            sending.sender.hand_off(handoff, self.clock.now_ns())
            link.flush(sending)

    def open_receive(self, order: ReceiveOrder) -> None:
        self.receiving[order.transfer] = order
        self.table.open(order)

    def abort(self, transfer: int, reason: str) -> None:
        self.receiving.pop(transfer, None)
        link = self._link_of.pop(transfer, None)
        if link is not None:
            link.abort(transfer, reason)
        self.table.abort(transfer, reason)

    def tick(self, now_ns: int) -> None:
        links = list(self._links.values())
        self._links = {key: link for key, link in self._links.items() if not link.closed}
        for link in links:
            link.tick(now_ns)
        self.table.tick(now_ns)

    def close(self) -> None:
        self.network.unlisten(self.addresses[0])

    def report(self, event: TransferEvent) -> None:
        self._link_of.pop(event.transfer, None)
        self._emit(event)

    def _accept(self, side: Side) -> None:
        InboundLink(self, side)
