"""D's shell: the table of open receptions and one link (a reader and a writer thread) a connection.

A frame is admitted and counted under its reception's lock and written between, counted in ``writing``; several connections may
write to one reception at once. Whoever ends it waits until nobody writes: a late write is either finished before the blocks are
given away, or dropped. Where blocks lie on a device, all frames that have come meanwhile are written by one launch.
"""

import queue
import threading
from collections.abc import Callable

import numpy as np

from relay.clock import Clock
from relay.kernels.kv_frames import Place
from relay.transfer.channel import Channel, ChannelClosed, read_any_frame, send_frame
from relay.transfer.contract import (
    Layout,
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveOrder,
    TransferEvent,
    TransferLimits,
    TransferStats,
)
from relay.transfer.frame import (
    Abort,
    Checksum,
    FrameError,
    Header,
    Hello,
    Kind,
    encode_payload,
)
from relay.transfer.receiver import Receiver, ReceiverState
from relay.transfer.sender import Outgoing
from relay.transfer.store import Arrived, ChecksummedStore

Emit = Callable[[TransferEvent], None]


class Reception:
    """One open transfer on D with the lock that orders writes against abort."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.writing = 0
        self.block_table = np.asarray(receiver.order.block_table, np.int32)
        self.link: InboundLink | None = None  # where answers go
        self.links: set[InboundLink] = set()  # all that fed it: the end of any is its end

    def heard_on(self, link: "InboundLink", header: Header) -> None:
        """Under the lock. Answers go where control frames come from. A frame of another life or attempt ties no link."""
        order = self.receiver.order
        if (header.epoch, header.attempt) != (order.source_incarnation, order.attempt):
            return
        self.links.add(link)
        if self.link is None or header.kind is not Kind.KV:
            self.link = link

    def wait_until_idle(self) -> None:
        """Under the lock."""
        while self.writing:
            self.idle.wait()


class ReceptionTable:
    """All open receptions of an engine. An event is emitted by whoever takes an ended one out, so at most once."""

    def __init__(self, layout: Layout, limits: TransferLimits, emit: Emit, clock: Clock) -> None:
        self._layout = layout
        self._limits = limits
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._receptions: dict[int, Reception] = {}

    def open(self, order: ReceiveOrder) -> None:
        receiver = Receiver(order, self._layout, self._limits, self._clock.now_ns())
        with self._lock:
            self._receptions[order.transfer] = Reception(receiver)

    def get(self, transfer: int) -> Reception | None:
        with self._lock:
            return self._receptions.get(transfer)

    def abort(self, transfer: int, reason: str) -> None:
        """Take it out without an event; no write is running when this returns."""
        with self._lock:
            reception = self._receptions.pop(transfer, None)
        if reception is None:
            return
        with reception.lock:
            reception.receiver.abort(reason)
            replies = reception.receiver.take_replies()
            reception.wait_until_idle()
        if reception.link is not None:
            reception.link.post(replies)

    def settle(self, reception: Reception) -> None:
        """If the transfer is over, take it out and say so; then answer P, who waits for nothing as urgent."""
        with reception.lock:
            receiver = reception.receiver
            replies = receiver.take_replies()
            over = receiver.over
            if over:
                reception.wait_until_idle()
        if over:
            self._end(reception)
        if reception.link is not None:
            reception.link.post(replies)

    def _end(self, reception: Reception) -> None:
        """Only whoever takes it out reports it."""
        receiver = reception.receiver
        transfer = receiver.order.transfer
        with self._lock:
            if self._receptions.get(transfer) is not reception:
                return
            del self._receptions[transfer]
        if receiver.state is ReceiverState.COMPLETE and receiver.handoff is not None:
            scheme = reception.link.scheme if reception.link is not None else ""
            stats = TransferStats(scheme, receiver.bytes_copied, receiver.frames_copied)
            self._emit(ReceiveCompleted(transfer, receiver.handoff, stats))
        else:
            self._emit(ReceiveFailed(transfer, receiver.reason))

    def tick(self, now_ns: int) -> None:
        for reception in self._snapshot():
            with reception.lock:
                reception.receiver.tick(now_ns)
            self.settle(reception)

    def link_lost(self, link: "InboundLink", reason: str) -> None:
        for reception in self._snapshot():
            if link in reception.links:
                with reception.lock:
                    reception.receiver.link_lost(reason)
                self.settle(reception)

    def _snapshot(self) -> list[Reception]:
        with self._lock:
            return list(self._receptions.values())


class InboundLink:
    """One accepted connection after its hello. ``run`` is the reader's loop; a writer thread sends the replies."""

    def __init__(
        self,
        channel: Channel,
        peer: Hello,
        table: ReceptionTable,
        store: ChecksummedStore,
        checksum: Checksum,
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._peer = peer
        self._table = table
        self._store = store
        self._checksum = checksum
        self._clock = clock
        self._arrived: list[tuple[Reception, Arrived]] = []  # admitted frames that are not in the blocks yet
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"kv-reply-{peer.worker}", daemon=True)

    def run(self) -> None:
        """Read until the connection ends; every reception it fed fails then."""
        self._writer.start()
        self._store.prepare(self._channel)
        reason = ""
        try:
            while True:
                if self._arrived and (len(self._arrived) >= self._store.depth or not self._channel.ready()):
                    self._store_arrived()
                self._handle(*read_any_frame(self._channel, self._checksum, self._store_arrived))
        except (ChannelClosed, FrameError) as error:
            reason = f"KV connection from {self._peer.worker} ended: {error}"
        finally:
            for reception, frame in self._arrived:
                self._end_writing(reception, [(frame, "the connection ended")])
            self._channel.close()
            self._outbox.put(None)
            self._table.link_lost(self, reason or "KV connection failed")
            self._writer.join()
            self._store.forget(self._channel)
            self._channel.release()

    @property
    def scheme(self) -> str:
        return self._channel.scheme

    def post(self, replies: list[Outgoing]) -> None:
        """Queue frames for the peer; never blocks."""
        for reply in replies:
            self._outbox.put(reply)

    def _handle(self, header: Header, payload: Place, expected: int) -> None:
        """A KV frame joins those that have arrived; everything else is handled once these are in the blocks."""
        reception = self._table.get(header.transfer) if header.epoch == self._peer.incarnation else None
        known = reception is not None and reception.receiver.order.source == self._peer.worker
        if header.kind is Kind.KV and known and reception is not None and self._admit(reception, header):
            self._arrived.append((reception, Arrived(header, reception.block_table, payload, expected)))
            if len(self._arrived) >= self._store.depth:
                self._store_arrived()
            return
        self._store_arrived()
        if header.kind is Kind.KV:
            self._channel.done()
        elif known and reception is not None:
            assert isinstance(payload, memoryview)
            with reception.lock:
                reception.receiver.receive(header, payload, self._clock.now_ns())
                reception.heard_on(self, header)
        if known and reception is not None:
            self._table.settle(reception)
        elif header.epoch == self._peer.incarnation and header.kind is not Kind.ABORT:
            self.post([_unknown(header)])

    def _admit(self, reception: Reception, header: Header) -> bool:
        """Whether the frame is to be written: from now on it counts as being written."""
        with reception.lock:
            reception.heard_on(self, header)
            admitted = reception.receiver.admit(header, self._clock.now_ns())
            reception.writing += admitted
        return admitted

    def _store_arrived(self) -> None:
        """Write all that has arrived, at once where the store can. Raises FrameError if a frame is damaged, after the last."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        problems = ["D cannot store it"] * len(arrived)
        try:
            problems = self._store.write([frame for _, frame in arrived])
        finally:
            ended: dict[int, tuple[Reception, list[tuple[Arrived, str]]]] = {}
            for (reception, frame), problem in zip(arrived, problems, strict=True):
                ended.setdefault(id(reception), (reception, []))[1].append((frame, problem))
            try:
                self._channel.done(len(arrived))  # first of all: P may be waiting for just this room
            finally:
                for reception, frames in ended.values():
                    self._end_writing(reception, frames)
        for reception, _ in ended.values():
            self._table.settle(reception)
        damage = next((problem for problem in problems if problem), "")
        if damage:
            raise FrameError(damage)

    def _end_writing(self, reception: Reception, frames: list[tuple[Arrived, str]]) -> None:
        """Frames with what is wrong with each. Damage fails the transfer before anyone can see its blocks."""
        with reception.lock:
            reception.writing -= len(frames)
            reception.idle.notify_all()
            for frame, problem in frames:
                if problem:
                    reception.receiver.abort(f"damaged KV frame from {self._peer.worker}: {problem}")
                else:
                    reception.receiver.written(frame.header, self._clock.now_ns())

    def _write(self) -> None:
        try:
            while (reply := self._outbox.get()) is not None:
                send_frame(self._channel, reply.header, reply.payload or b"", self._checksum)
        except ChannelClosed:
            self._channel.close()  # the reader sees it and fails the receptions


def _unknown(header: Header) -> Outgoing:
    """Tell P that D holds nothing for this transfer (any more), so that P frees its blocks too."""
    payload = encode_payload(Abort("unknown transfer"))
    reply = Header(Kind.ABORT, header.transfer, header.epoch, header.attempt, payload_bytes=len(payload))
    return Outgoing(reply, payload)
