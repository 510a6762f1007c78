"""Transport without threads or sockets: frames lie in one list until ``Network.deliver`` moves them. For tests and the simulator.

The state machines, the frame bytes and the hello check are those of the real transports; only the wire is missing, so a
caller that owns the list decides what is late, lost, repeated or damaged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from relay.kernels.kv_frames import Heads
from relay.transfer.contract import (
    Identity,
    KvStore,
    ReceiveCompleted,
    ReceiveFailed,
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
    Abort,
    Checksum,
    FrameError,
    Handoff,
    Header,
    Kind,
    encode_payload,
    parse,
    seal,
    verify,
)
from relay.transfer.handshake import mismatch
from relay.transfer.receiver import Receiver, ReceiverState
from relay.transfer.sender import Outgoing, Sender, SenderState


@dataclass(slots=True)
class Parcel:
    """One frame under way between two workers."""

    source: str
    target: str
    header: bytes
    payload: bytes


class Network:
    """Who can be reached, and what is under way. ``now_ns`` is the time every transport on it sees."""

    def __init__(self, checksum: Checksum) -> None:
        self.checksum = checksum
        self.now_ns = 0
        self.transports: dict[str, InprocTransport] = {}
        self.parcels: list[Parcel] = []

    def deliver(self, index: int = 0) -> None:
        """Hand over one parcel. One to a worker that is gone is lost."""
        parcel = self.parcels.pop(index)
        target = self.transports.get(parcel.target)
        if target is not None:
            target.receive(parcel)

    def deliver_all(self) -> None:
        """Until nothing is under way, what the deliveries cause included."""
        while self.parcels:
            self.deliver()

    def remove(self, worker: str) -> None:
        """The worker is dead: what it sent is lost and its peers see their links end."""
        self.transports.pop(worker, None)
        self.parcels = [p for p in self.parcels if worker not in (p.source, p.target)]
        for transport in self.transports.values():
            transport.peer_lost(worker)


class InprocTransport:
    """``Transport`` on a ``Network``."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        store: KvStore,
        emit: Callable[[TransferEvent], None],
        limits: TransferLimits,
        parts: Sequence[Heads] = (),
    ) -> None:
        self.identity = identity
        self._network = network
        self._store = store
        self._emit = emit
        self._limits = limits
        self._parts = parts
        self._senders: dict[int, Sender] = {}
        self._tables: dict[int, np.ndarray] = {}
        self._receivers: dict[int, Receiver] = {}
        network.transports[identity.worker] = self

    @property
    def addresses(self) -> list[str]:
        return [f"inproc://{self.identity.worker}"]

    def open_send(self, order: SendOrder) -> None:
        peer = self._network.transports.get(order.target)
        problem = f"{order.target} cannot be reached"
        if peer is not None:
            problem = mismatch(self.identity.hello(), peer.identity.hello())
            if not problem and peer.identity.incarnation != order.target_incarnation:
                problem = f"{order.target} is incarnation {peer.identity.incarnation}"
        if problem:
            self._emit(SendFailed(order.transfer, problem, False))
            return
        layout, now_ns = self.identity.layout, self._network.now_ns
        sender = Sender(order, self.identity.incarnation, layout, self._limits, now_ns, self._parts)
        self._senders[order.transfer] = sender
        sender.link_opened(self._network.now_ns)
        self._flush(sender)

    def layer_written(self, transfer: int, layer: int, first: int, count: int, block_table: np.ndarray) -> None:
        sender = self._senders.get(transfer)
        if sender is not None:
            self._tables[transfer] = block_table
            sender.written(layer, first, count)
            self._flush(sender)

    def forget_unsent(self, transfer: int) -> None:
        sender = self._senders.get(transfer)
        if sender is not None:
            sender.forget_unsent()

    def send_handoff(self, transfer: int, handoff: Handoff) -> None:
        sender = self._senders.get(transfer)
        if sender is not None:
            sender.hand_off(handoff, self._network.now_ns)
            self._flush(sender)

    def open_receive(self, order: ReceiveOrder) -> None:
        self._receivers[order.transfer] = Receiver(order, self.identity.layout, self._limits, self._network.now_ns)

    def abort(self, transfer: int, reason: str) -> None:
        sender = self._senders.pop(transfer, None)
        if sender is not None:
            sender.abort(reason)
            self._flush(sender)
        receiver = self._receivers.pop(transfer, None)
        if receiver is not None:
            receiver.abort(reason)
            self._answer(receiver)

    def tick(self, now_ns: int) -> None:
        for sender in list(self._senders.values()):
            sender.tick(now_ns)
            self._flush(sender)
        for receiver in list(self._receivers.values()):
            receiver.tick(now_ns)
            self._answer(receiver)

    def close(self) -> None:
        self._network.remove(self.identity.worker)

    def peer_lost(self, worker: str) -> None:
        """A link to or from ``worker`` ended."""
        for sender in list(self._senders.values()):
            if sender.order.target == worker:
                sender.link_lost(f"{worker} is gone")
                self._flush(sender)
        for receiver in list(self._receivers.values()):
            if receiver.order.source == worker:
                receiver.link_lost(f"{worker} is gone")
                self._answer(receiver)

    def receive(self, parcel: Parcel) -> None:
        """A frame arrives. A damaged one ends the link, as on a real wire."""
        try:
            header, expected = parse(parcel.header, self._network.checksum)
            verify(parcel.payload, expected, self._network.checksum)
            self._handle(header, parcel)
        except FrameError:
            self.peer_lost(parcel.source)
            peer = self._network.transports.get(parcel.source)
            if peer is not None:
                peer.peer_lost(self.identity.worker)

    def _handle(self, header: Header, parcel: Parcel) -> None:
        now_ns = self._network.now_ns
        sender = self._senders.get(header.transfer)
        if sender is not None and sender.order.target == parcel.source:
            sender.receive(header, parcel.payload, now_ns)
            self._flush(sender)
            return
        receiver = self._receivers.get(header.transfer)
        if receiver is None or receiver.order.source != parcel.source:
            if header.kind in (Kind.KV, Kind.HANDOFF, Kind.PROBE):
                payload = encode_payload(Abort("unknown transfer"))
                reply = Header(Kind.ABORT, header.transfer, header.epoch, header.attempt, payload_bytes=len(payload))
                self._post(parcel.source, Outgoing(reply, payload))
            return
        if header.kind is Kind.KV:
            if receiver.admit(header, now_ns):
                table = np.asarray(receiver.order.block_table, np.int32)
                heads = self.identity.layout.heads_of(header)
                write_frame_kv(self._store, header, table, memoryview(parcel.payload), heads)
                receiver.written(header, now_ns)
        else:
            receiver.receive(header, parcel.payload, now_ns)
        self._answer(receiver)

    def _flush(self, sender: Sender) -> None:
        """Send what may be sent; report an end."""
        transfer = sender.order.transfer
        while (outgoing := sender.next_frame()) is not None:
            payload = outgoing.payload
            if payload is None:
                header = outgoing.header
                raw = bytearray(header.payload_bytes)
                heads = self.identity.layout.heads_of(header)
                read_frame_kv(self._store, header, self._tables[transfer], memoryview(raw), heads)
                payload = bytes(raw)
            self._post(sender.order.target, Outgoing(outgoing.header, payload))
        if sender.over:
            self._tables.pop(transfer, None)
            if self._senders.pop(transfer, None) is not None:
                if sender.state is SenderState.ACKNOWLEDGED:
                    self._emit(SendAcknowledged(transfer, sender.stats("inproc")))
                else:
                    self._emit(SendFailed(transfer, sender.reason, sender.handed_off))

    def _answer(self, receiver: Receiver) -> None:
        for reply in receiver.take_replies():
            self._post(receiver.order.source, reply)
        if receiver.over and self._receivers.pop(receiver.order.transfer, None) is not None:
            if receiver.state is ReceiverState.COMPLETE and receiver.handoff is not None:
                self._emit(ReceiveCompleted(receiver.order.transfer, receiver.handoff))
            else:
                self._emit(ReceiveFailed(receiver.order.transfer, receiver.reason))

    def _post(self, target: str, outgoing: Outgoing) -> None:
        payload = outgoing.payload or b""
        header = seal(outgoing.header, payload, self._network.checksum)
        self._network.parcels.append(Parcel(self.identity.worker, target, header, payload))
