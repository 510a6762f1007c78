"""P's shell: one link to one life of one D: a writer thread that reads KV from the pool and sends, a reader for the answers.

The compute thread only marks ranges (``layer_written``). Blocks are read outside the lock with ``reading`` set; whoever
takes blocks away (abort, preemption) waits for that one copy.
"""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from relay.clock import Clock
from relay.transfer.channel import Channel, ChannelClosed, read_frame, send_frame
from relay.transfer.contract import (
    Layout,
    SendAcknowledged,
    SendFailed,
    SendOrder,
    TransferEvent,
    TransferLimits,
)
from relay.transfer.frame import MAX_CONTROL_BYTES, Checksum, FrameError, Handoff, seal_over
from relay.transfer.handshake import HelloRefused
from relay.transfer.sender import Outgoing, Sender, SenderState
from relay.transfer.store import ChecksummedStore

Dial = Callable[[SendOrder], Channel]
"""Open a connection to the order's target and say hello. Raises ChannelClosed, FrameError, HelloRefused."""


class _Sending:
    """One open transfer on P."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.block_table = np.zeros(0, np.int32)
        self.reading = False


class OutboundLink:
    """All transfers to one incarnation of one target, in turns of one frame."""

    def __init__(
        self,
        order: SendOrder,
        dial: Dial,
        epoch: int,
        layout: Layout,
        store: ChecksummedStore,
        limits: TransferLimits,
        checksum: Checksum,
        emit: Callable[[TransferEvent], None],
        clock: Clock,
    ) -> None:
        self._order = order
        self._dial = dial
        self._epoch = epoch
        self._layout = layout
        self._store = store
        self._limits = limits
        self._checksum = checksum
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the writer waits here
        self._idle = threading.Condition(self._lock)  # who needs a copy to end waits here
        self._sendings: dict[int, _Sending] = {}
        self._farewells: deque[Outgoing] = deque()  # aborts of transfers already forgotten
        self._channel: Channel | None = None
        self._opened = False
        self._closed = False
        self._writer = threading.Thread(target=self._run, name=f"kv-send-{order.target}", daemon=True)

    def start(self) -> None:
        """Dial. Transfers may be opened before, so that they hear why it failed."""
        self._writer.start()

    @property
    def scheme(self) -> str:
        """The wire in use; empty until there is one."""
        with self._lock:
            return "" if self._channel is None else self._channel.scheme

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._closed

    def open(self, order: SendOrder) -> bool:
        """Add a transfer; False when the link has ended meanwhile."""
        with self._lock:
            if self._closed:
                return False
            now_ns = self._clock.now_ns()
            sender = Sender(order, self._epoch, self._layout, self._limits, now_ns)
            if self._opened:
                sender.link_opened(now_ns)
            self._sendings[order.transfer] = _Sending(sender)
            self._work.notify()
            return True

    def layer_written(self, transfer: int, layer: int, first: int, count: int, block_table: np.ndarray) -> None:
        with self._lock:
            sending = self._sendings.get(transfer)
            if sending is not None:
                sending.block_table = block_table
                sending.sender.written(layer, first, count)
                self._settle(sending)
                self._work.notify()

    def hand_off(self, transfer: int, handoff: Handoff) -> None:
        with self._lock:
            sending = self._sendings.get(transfer)
            if sending is not None:
                sending.sender.hand_off(handoff)
                self._settle(sending)
                self._work.notify()

    def forget_unsent(self, transfer: int) -> None:
        with self._lock:
            sending = self._sendings.get(transfer)
            if sending is not None:
                sending.sender.forget_unsent()
                self._wait_for_copy(sending)

    def abort(self, transfer: int, reason: str) -> None:
        with self._lock:
            sending = self._sendings.pop(transfer, None)
            if sending is not None:
                sending.sender.abort(reason)
                self._say_farewell(sending.sender)
                self._wait_for_copy(sending)

    def tick(self, now_ns: int) -> None:
        with self._lock:
            for sending in list(self._sendings.values()):
                if self._opened:
                    sending.sender.tick(now_ns)
                self._settle(sending)
            self._work.notify()

    def close(self, reason: str) -> None:
        """End the link and fail its transfers. Idempotent."""
        with self._lock:
            self._closed = True
            for sending in list(self._sendings.values()):
                sending.sender.link_lost(reason)
                self._settle(sending)
            self._work.notify()
            channel = self._channel
        if channel is not None:
            channel.close()

    def _run(self) -> None:
        order = self._order
        reason = f"KV connection to {order.target} failed"
        try:
            channel = self._dial(order)
            with self._lock:
                self._channel = channel
                closed = self._closed
            if closed:
                channel.close()
            threading.Thread(target=self._read, args=(channel,), name=f"kv-ack-{order.target}", daemon=True).start()
            with self._lock:
                self._opened = True
                for sending in self._sendings.values():
                    sending.sender.link_opened(self._clock.now_ns())
            self._write(channel)
            reason = f"KV connection to {order.target} closed"
        except (ChannelClosed, FrameError, HelloRefused) as error:
            reason = f"KV connection to {order.target} failed: {error}"
        finally:
            self.close(reason)

    def _write(self, channel: Channel) -> None:
        room = max(self._limits.max_frame_bytes, MAX_CONTROL_BYTES)
        while True:
            channel.await_room(room)  # before a frame is picked: from then on its blocks may not be taken away
            with self._lock:
                while (job := self._pick()) is None:
                    if self._closed:
                        return
                    self._work.wait()
                sending, outgoing = job
                if sending is not None:
                    block_table = sending.block_table
                    sending.reading = True
            header = outgoing.header
            if sending is None:
                send_frame(channel, header, outgoing.payload or b"", self._checksum)
                continue
            payload = channel.reserve(header.payload_bytes)
            try:
                checksum = self._store.read(header.layer, block_table, header.first_token, header.token_count, payload)
            finally:
                with self._lock:
                    sending.reading = False
                    self._idle.notify_all()
            channel.commit(seal_over(header, checksum, self._checksum))

    def _pick(self) -> tuple[_Sending | None, Outgoing] | None:
        """The next frame in turn; a sending comes with it only if KV must be read."""
        if self._farewells:
            return None, self._farewells.popleft()
        for transfer, sending in self._sendings.items():
            outgoing = sending.sender.next_frame()
            if outgoing is not None:
                del self._sendings[transfer]
                self._sendings[transfer] = sending  # to the end of the line
                return (sending if outgoing.payload is None else None), outgoing
        return None

    def _read(self, channel: Channel) -> None:
        reason = f"KV connection to {self._order.target} failed"
        try:
            while True:
                header, payload, _ = read_frame(channel, self._checksum, MAX_CONTROL_BYTES)
                with self._lock:
                    sending = self._sendings.get(header.transfer)
                    if sending is not None:
                        sending.sender.receive(header, payload, self._clock.now_ns())
                        self._settle(sending)
                        self._work.notify()
        except (ChannelClosed, FrameError) as error:
            reason = f"KV connection to {self._order.target} ended: {error}"
        finally:
            self.close(reason)

    def _settle(self, sending: _Sending) -> None:
        """If the transfer is over, forget it and say so. Under the lock."""
        sender = sending.sender
        transfer = sender.order.transfer
        if not sender.over or self._sendings.pop(transfer, None) is None:
            return
        self._say_farewell(sender)
        self._wait_for_copy(sending)
        if sender.state is SenderState.ACKNOWLEDGED:
            self._emit(SendAcknowledged(transfer))
        else:
            self._emit(SendFailed(transfer, sender.reason, sender.handed_off))

    def _say_farewell(self, sender: Sender) -> None:
        frame = sender.next_frame()
        if frame is not None:
            self._farewells.append(frame)
            self._work.notify()

    def _wait_for_copy(self, sending: _Sending) -> None:
        while sending.reading:
            self._idle.wait()
