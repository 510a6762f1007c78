"""P's shell: one link to one life of one D: for each of its connections a writer thread and a reader for the answers.

One connection carries everything; of several, the first carries control frames alone, so that bulk delays no handoff, probe or
abort, and the others KV. The compute thread only marks ranges (``layer_written``). Blocks are read outside the lock and counted in
``reading``; whoever takes blocks away (abort, preemption) waits for those copies. The end of one connection is the end of all.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from relay.clock import Clock
from relay.kernels.kv_frames import Heads
from relay.transfer.channel import Channel, ChannelClosed, read_frame, send_frame
from relay.transfer.contract import (
    Layout,
    SendAcknowledged,
    SendFailed,
    SendOrder,
    TransferEvent,
    TransferLimits,
)
from relay.transfer.frame import MAX_CONTROL_BYTES, Checksum, FrameError, Handoff, Header, seal_over
from relay.transfer.handshake import HelloRefused
from relay.transfer.sender import Outgoing, Sender, SenderState
from relay.transfer.store import ChecksummedStore, Reading, Wanted

Dial = Callable[[SendOrder], list[Channel]]
"""Open the connections to the order's target and say hello. Raises ChannelClosed, FrameError, HelloRefused."""


class _Sending:
    """One open transfer on P."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.block_table = np.zeros(0, np.int32)
        self.reading = 0  # copies that run


class _Begun(NamedTuple):
    """KV frames whose payloads are being copied together."""

    frames: list[tuple[_Sending, Header]]
    reading: Reading


Job = tuple[_Sending | None, Outgoing]
Pick = Callable[[], Job | None]
"""The next frame of a connection, under the lock; a sending comes with it if its KV must be read."""


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
        parts: Sequence[Heads] = (),
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
        self._parts = parts
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the writer of control frames waits here
        self._bulk = threading.Condition(self._lock)  # writers of KV alone wait here
        self._apart = False  # whether there are any
        self._resting = 0  # writers of KV that wait and have not been woken
        self._idle = threading.Condition(self._lock)  # who needs a copy to end waits here
        self._sendings: dict[int, _Sending] = {}
        self._farewells: deque[Outgoing] = deque()  # aborts of transfers already forgotten
        self._channels: list[Channel] = []
        self._most_kv_bytes = limits.max_frame_bytes
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
            return self._channels[0].scheme if self._channels else ""

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
            sender = Sender(order, self._epoch, self._layout, self._limits, now_ns, self._parts)
            if self._opened:
                sender.link_opened(now_ns, self._most_kv_bytes)
            self._sendings[order.transfer] = _Sending(sender)
            self._wake_all()
            return True

    def layer_written(self, transfer: int, layer: int, first: int, count: int, block_table: np.ndarray) -> None:
        with self._lock:
            sending = self._sendings.get(transfer)
            if sending is not None:
                sending.block_table = block_table
                sending.sender.written(layer, first, count)
                self._settle(sending)
                self._wake_bulk(sending, 1)

    def hand_off(self, transfer: int, handoff: Handoff) -> None:
        with self._lock:
            sending = self._sendings.get(transfer)
            if sending is not None:
                sending.sender.hand_off(handoff, self._clock.now_ns())
                self._settle(sending)
                self._wake_all()

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
            self._wake_all()

    def close(self, reason: str) -> None:
        """End the link and fail its transfers. Idempotent."""
        with self._lock:
            self._closed = True
            for sending in list(self._sendings.values()):
                sending.sender.link_lost(reason)
                self._settle(sending)
            self._wake_all()
            self._bulk.notify_all()
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _run(self) -> None:
        order = self._order
        reason = f"KV connection to {order.target} failed"
        try:
            channels = self._dial(order)
            with self._lock:
                self._channels = channels
                self._most_kv_bytes = min(self._most_kv_bytes, *(channel.most_kv_bytes for channel in channels))
                closed = self._closed
            if closed:
                for channel in channels:
                    channel.close()
            for index, channel in enumerate(channels):
                name = f"{order.target}-{index}"
                threading.Thread(target=self._read, args=(channel,), name=f"kv-ack-{name}", daemon=True).start()
            with self._lock:
                self._opened = True
                for sending in self._sendings.values():
                    sending.sender.link_opened(self._clock.now_ns(), self._most_kv_bytes)
            self._apart = len(channels) > 1
            picks = [self._pick] if not self._apart else [self._pick_control] + [self._pick_kv] * (len(channels) - 1)
            others = [
                threading.Thread(
                    target=self._run_lane, args=(channel, pick), name=f"kv-send-{order.target}-{index}", daemon=True
                )
                for index, (channel, pick) in enumerate(zip(channels[1:], picks[1:], strict=True), 1)
            ]
            for other in others:
                other.start()
            self._write(channels[0], picks[0])
            reason = f"KV connection to {order.target} closed"
        except (ChannelClosed, FrameError, HelloRefused) as error:
            reason = f"KV connection to {order.target} failed: {error}"
        finally:
            self.close(reason)

    def _run_lane(self, channel: Channel, pick: Pick) -> None:
        reason = f"KV connection to {self._order.target} closed"
        try:
            self._write(channel, pick)
        except (ChannelClosed, FrameError) as error:
            reason = f"KV connection to {self._order.target} failed: {error}"
        finally:
            self.close(reason)

    def _write(self, channel: Channel, pick: Pick) -> None:
        """Send what ``pick`` gives until the link closes, with up to ``depth`` copies out of the blocks under way at once."""
        room, depth = max(self._most_kv_bytes, MAX_CONTROL_BYTES), self._store.depth
        begun: deque[_Begun] = deque()
        self._store.prepare(channel)
        try:
            while True:
                # Room comes before the pick: a picked frame's blocks may not be taken away until they are copied.
                if not begun:
                    channel.await_room(room)
                    job = self._await_job(pick)
                    if job is None:
                        return
                else:
                    job = self._job(pick) if channel.has_room(room) else None
                idle = job is None
                if job is not None and job[0] is not None:
                    copies, job, idle = self._begin(channel, pick, room, job)
                    begun.append(copies)
                while begun and (idle or job is not None or len(begun) >= depth or begun[0].reading.ended()):
                    self._finish(channel, begun.popleft())
                    if idle:
                        break
                if job is not None:
                    send_frame(channel, job[1].header, job[1].payload or b"", self._checksum)
        finally:
            with (
                contextlib.ExitStack() as ending
            ):  # all of it, from the last line up, though a lost device makes every copy raise
                ending.callback(channel.release)
                ending.callback(self._store.forget, channel)
                for left in reversed(begun):  # a copy that still runs writes to memory that is about to go
                    ending.callback(self._end_copy, left)

    def _wake_bulk(self, sending: _Sending, count: int) -> None:
        """If ``sending`` has KV to send, wake up to ``count`` of the writers that wait. Under the lock. One that is woken for
        nothing takes the interpreter's lock from the thread that computes, at each layer of each step."""
        if self._resting and sending.sender.kv_due:
            woken = min(count, self._resting)
            self._resting -= woken
            (self._bulk if self._apart else self._work).notify(woken)

    def _wake_all(self) -> None:
        """There may be control frames to send, for whoever sends them. Under the lock."""
        if not self._apart:
            self._resting = 0
        self._work.notify_all()

    def _await_job(self, pick: Pick) -> Job | None:
        """Wait for work; None: the link is closed."""
        with self._lock:
            while (job := pick()) is None:
                if self._closed:
                    return None
                self._resting += pick != self._pick_control
                (self._bulk if pick == self._pick_kv else self._work).wait()
            return self._taken(job)

    def _job(self, pick: Pick) -> Job | None:
        with self._lock:
            job = pick()
            return None if job is None else self._taken(job)

    @staticmethod
    def _taken(job: Job) -> Job:
        if job[0] is not None:
            job[0].reading += 1
        return job

    def _begin(self, channel: Channel, pick: Pick, room: int, job: Job | None) -> tuple[_Begun, Job | None, bool]:
        """Begin to copy the frame of ``job``, and with it others that may go now: together half of what one may have at most, since
        none leaves before all are copied. Also the job without KV that came instead of another, if one did, and whether there was
        none of either kind."""
        frames: list[tuple[_Sending, Header]] = []
        wanted: list[Wanted] = []
        size = 0
        more = False
        try:
            while job is not None and job[0] is not None:
                sending, header = job[0], job[1].header
                frames.append((sending, header))
                wanted.append(Wanted(header, sending.block_table, channel.reserve_kv(header.payload_bytes)))
                size += header.payload_bytes
                more = len(frames) < self._store.together and size < self._most_kv_bytes // 2 and channel.has_room(room)
                job = self._job(pick) if more else None
            return _Begun(frames, self._store.read(wanted)), job, more and job is None
        except BaseException:
            self._done_reading(frames)
            raise

    def _finish(self, channel: Channel, begun: _Begun) -> None:
        flags = begun.reading.flags
        headers = []
        for (_, header), checksum in zip(begun.frames, self._end_copy(begun), strict=True):
            sealed = msgspec.structs.replace(header, flags=header.flags | flags) if flags else header
            headers.append(seal_over(sealed, checksum, self._checksum))
        channel.commit(*headers)

    def _end_copy(self, begun: _Begun) -> list[int]:
        try:
            return begun.reading.finish()
        finally:
            self._done_reading(begun.frames)

    def _done_reading(self, frames: list[tuple[_Sending, Header]]) -> None:
        with self._lock:
            for sending, _ in frames:
                sending.reading -= 1
            self._idle.notify_all()

    def _pick(self) -> Job | None:
        """The next frame in turn; a sending comes with it only if KV must be read."""
        return self._farewell() or self._in_turn(Sender.next_frame)

    def _pick_control(self) -> Job | None:
        return self._farewell() or self._in_turn(Sender.next_control)

    def _pick_kv(self) -> Job | None:
        job = self._in_turn(Sender.next_kv)
        if job is not None and self._sendings[job[1].header.transfer].sender.all_sent:
            self._wake_all()  # now the handoff may go
        return job

    def _farewell(self) -> Job | None:
        return (None, self._farewells.popleft()) if self._farewells else None

    def _in_turn(self, next_frame: Callable[[Sender], Outgoing | None]) -> Job | None:
        """Sendings in turns, those first whose prompt is computed: each frame they still have is waited for."""
        for drawn in (True, False):
            for transfer, sending in self._sendings.items():
                outgoing = next_frame(sending.sender) if sending.sender.drawn is drawn else None
                if outgoing is not None:
                    del self._sendings[transfer]
                    self._sendings[transfer] = sending  # to the end of the line
                    return (sending if outgoing.payload is None else None), outgoing
        return None

    def _read(self, channel: Channel) -> None:
        reason = f"KV connection to {self._order.target} failed"
        try:
            while True:
                header, payload, _ = read_frame(channel, self._checksum)
                with self._lock:
                    sending = self._sendings.get(header.transfer)
                    if sending is not None:
                        sending.sender.receive(header, payload, self._clock.now_ns())
                        self._settle(sending)
                        self._wake_bulk(sending, len(self._channels))
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
            self._emit(SendAcknowledged(transfer, sender.stats(self._channels[0].scheme)))
        else:
            self._emit(SendFailed(transfer, sender.reason, sender.handed_off))

    def _say_farewell(self, sender: Sender) -> None:
        frame = sender.next_frame()
        if frame is not None:
            self._farewells.append(frame)
            self._wake_all()

    def _wait_for_copy(self, sending: _Sending) -> None:
        while sending.reading:
            self._idle.wait()
