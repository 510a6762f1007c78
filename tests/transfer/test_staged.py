"""The seam for devices, with a fake copy stream: copies are queued, overlapped, and waited for before memory goes."""

import threading
import time
from collections import deque

import msgspec
import numpy as np
import pytest

from relay.kernels.kv_frames import Span, payload_digest
from relay.transfer import store as store_module
from relay.transfer.checksum import crc32c
from relay.transfer.contract import (
    ReceiveCompleted,
    ReceiveFailed,
    SendAcknowledged,
    SendFailed,
    TransferLimits,
    read_frame_kv,
    write_frame_kv,
)
from relay.transfer.frame import FLAG_DIGEST, Handoff, Header, Kind, seal_over
from relay.transfer.outbound import OutboundLink
from relay.transfer.sender import Sender
from tests.transfer.nodes import (
    SMALL,
    SOURCE_TABLE,
    TARGET_TABLE,
    WAIT_S,
    Node,
    announce,
    eventually,
    kv_header,
    raw_peer,
    receive_order,
    send_order,
    send_raw,
)
from tests.transfer.stores import LAYOUT, ArrayStore


class FakeCopy:
    def __init__(self, work, count):
        self.work = work
        self.count = count
        self.done = threading.Event()

    def end(self, result):
        self.result = result
        self.done.set()

    def ended(self):
        return self.done.is_set()

    def wait(self):
        assert self.done.wait(WAIT_S)
        return self.result


def bytes_of(place):
    """Where the fake device keeps them: its memory is a bytearray."""
    if isinstance(place, Span):
        return memoryview(place.region)[place.offset : place.offset + place.size]
    return place


def header_of(one, size):
    return Header(
        Kind.KV,
        layer=one.layer,
        first_token=one.first,
        token_count=one.count,
        payload_bytes=size,
        layers=one.layers,
    )


class FakeStream(ArrayStore):
    """A device's blocks behind one copy stream: copies run in order on a thread of their own, some time after they were queued."""

    def __init__(self, depth=2, delay_s=0.002, seed=None):
        super().__init__(seed=seed)
        self.stage_depth = depth
        self.delay_s = delay_s
        self.pinned = []
        self.allocated = []
        self.places = []
        self.staged = []  # frames of each stage
        self.sizes = []  # and of every frame
        self.log = []
        self.together = []  # frames of each collect
        self.most_under_way = 0
        self._queue = deque()
        self._lock = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()

    def register(self, region):
        self.pinned.append(region)

    def unregister(self, region):
        self.pinned.remove(region)

    def allocate(self, size):
        one = bytearray(size)
        self.allocated.append(one)
        return memoryview(one)

    def stage(self, frames):
        self.places += [out.obj if isinstance(out, memoryview) else None for _, out in frames]
        self.staged.append(len(frames))
        self.sizes += [len(bytes_of(out)) for _, out in frames]

        def work():
            for one, out in frames:
                target = bytes_of(out)
                read_frame_kv(self, header_of(one, len(target)), one.block_table, target, one.heads)
            return [payload_digest(bytes_of(out)) for _, out in frames]

        return self._enqueue("stage", work, len(frames))

    def collect(self, frames):
        def work():
            for one, place in frames:
                data = bytes_of(place)
                write_frame_kv(self, header_of(one, len(data)), one.block_table, data, one.heads)
            return [payload_digest(bytes_of(place)) for _, place in frames]

        self.together.append(len(frames))
        return self._enqueue("collect", work, len(frames))

    def _enqueue(self, name, work, count):
        copy = FakeCopy(work, count)
        with self._lock:
            if self._ended:
                copy.end([0] * count)
                return copy
            self.log.append(name)
            self._queue.append(copy)
            self.most_under_way = max(self.most_under_way, len(self._queue))
            self._lock.notify()
        return copy

    def _run(self):
        while True:
            with self._lock:
                while not self._queue and not self._ended:
                    self._lock.wait()
                if self._ended:
                    for left in self._queue:  # a thread may wait for it, and would fail another test
                        left.end([0] * left.count)
                    return
                copy = self._queue[0]
            time.sleep(self.delay_s)
            copy.end(copy.work())
            with self._lock:
                self._queue.popleft()

    def close(self):
        with self._lock:
            self._ended = True
            self._lock.notify()
        self._thread.join(WAIT_S)


JOINED = TransferLimits(512, 4096, 16384, probe_ns=200_000_000, join_bytes=2048)


class DevicePair:
    def __init__(self, scheme, depth, limits=SMALL, parts=()):
        self.stores = FakeStream(depth, seed=1), FakeStream(depth)
        self.stores[0].kv_parts = parts
        self.source = Node("p", scheme, store=self.stores[0], limits=limits)
        self.target = Node("d", scheme, store=self.stores[1], limits=limits)

    def close(self):
        self.source.transport.close()
        self.target.transport.close()
        for store in self.stores:
            store.close()

    def start(self):
        self.target.transport.open_receive(receive_order())
        self.source.transport.open_send(send_order(self.target))

    def carry(self):
        """A whole transfer, which D completes."""
        self.start()
        announce(self.source)
        self.source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(self.target.event(), ReceiveCompleted)


@pytest.fixture(params=["shm", "tcp", "ipc"])
def scheme(request):
    return request.param


@pytest.mark.parametrize(("depth", "parts"), [(1, ()), (2, ()), (3, ()), (3, ((0, 1), (1, 1)))])
def test_every_byte_arrives_through_streams(scheme, depth, parts):
    pair = DevicePair(scheme, depth, parts=parts)
    try:
        pair.carry()
        assert isinstance(pair.source.event(), SendAcknowledged)
        sent = pair.stores[0].tokens(SOURCE_TABLE, 100)
        assert np.array_equal(sent, pair.stores[1].tokens(TARGET_TABLE, 100))
        assert set(pair.stores[0].log) == {"stage"}
        assert set(pair.stores[1].log) == {"collect"}
        if scheme != "tcp":
            assert pair.stores[0].most_under_way == depth
    finally:
        pair.close()


def test_frames_that_may_go_are_read_together(scheme):
    """While the first copy runs the others wait; then they share one, up to half of what a frame may have."""
    limits = TransferLimits(64, 8192, 32768, probe_ns=200_000_000)
    pair = DevicePair(scheme, 1, limits, parts=((0, 1), (1, 1)))  # six frames of 3,200 bytes
    pair.stores[0].delay_s = 0.02
    try:
        pair.start()
        announce(pair.source, chunk=100)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
        assert np.array_equal(pair.stores[0].tokens(SOURCE_TABLE, 100), pair.stores[1].tokens(TARGET_TABLE, 100))
        staged, sizes = pair.stores[0].staged, pair.stores[0].sizes
        assert max(staged) > 1
        start = 0
        for count in staged:
            together, start = sizes[start : start + count], start + count
            assert sum(together[:-1]) < 4096, "others wait for what comes later"
    finally:
        pair.close()


def test_a_writer_sleeps_until_a_frame_may_go(scheme):
    """Not from layer to layer, while the thread that announces them computes."""
    pair = DevicePair(scheme, 1, TransferLimits(512, 12800, 51200, join_bytes=12800))
    try:
        pair.start()
        (link,) = pair.source.transport._links.values()
        eventually(lambda: link._resting == max(1, len(link._channels) - 1))
        asked, honest = [], link._in_turn
        link._in_turn = lambda which: (asked.append(which), honest(which))[1]
        for layer in range(LAYOUT.num_layers - 1):
            pair.source.transport.layer_written(7, layer, 0, 16, SOURCE_TABLE)
        time.sleep(0.1)
        woken = [which for which in asked if which is not Sender.next_control]
        pair.source.transport.layer_written(7, LAYOUT.num_layers - 1, 0, 16, SOURCE_TABLE)
        eventually(lambda: pair.stores[1].log)
        assert not woken
    finally:
        pair.close()


def test_writers_that_wait_are_counted_once_and_end_with_the_link(scheme):
    before = set(threading.enumerate())
    pair = DevicePair(scheme, 1, TransferLimits(512, 4096, 8192, probe_ns=200_000_000))
    try:
        for _ in range(5):
            pair.carry()
            assert isinstance(pair.source.event(), SendAcknowledged)
        (link,) = pair.source.transport._links.values()
        writers = max(1, len(link._channels) - 1)
        eventually(lambda: link._resting >= writers)
        assert link._resting == writers
        mine = {one for one in set(threading.enumerate()) - before if one.name.startswith("kv-send-")}
        assert len(mine) == len(link._channels)
        pair.source.transport.close()
        eventually(lambda: not any(one.is_alive() for one in mine))
    finally:
        pair.close()


def test_a_frame_leaves_when_its_copy_has_ended_though_more_may_be_begun(monkeypatch):
    pair = DevicePair("ipc", 4)
    monkeypatch.setattr(store_module, "TOGETHER", 1)
    seen = []
    stage, finish = pair.stores[0].stage, OutboundLink._finish

    def staged(frames):
        copy = stage(frames)
        assert copy.done.wait(WAIT_S)
        seen.append("begun")
        return copy

    def finished(link, channel, begun):
        seen.append("left")
        finish(link, channel, begun)

    pair.stores[0].stage = staged
    monkeypatch.setattr(OutboundLink, "_finish", finished)
    try:
        pair.carry()
        assert len(seen) >= 4
        assert seen == ["begun", "left"] * (len(seen) // 2)
    finally:
        pair.close()


def test_of_as_many_copies_as_may_run_one_has_to_end_before_the_next_begins(monkeypatch):
    """And not all of them: the device would have nothing to do while the last is waited for."""
    pair = DevicePair("ipc", 3)
    monkeypatch.setattr(store_module, "TOGETHER", 1)
    copies, stage = [], pair.stores[0].stage

    class Held:
        """Ends when it is let go."""

        def __init__(self, copy):
            self.copy, self.free = copy, threading.Event()

        def ended(self):
            return self.free.is_set() and self.copy.ended()

        def wait(self):
            assert self.free.wait(WAIT_S)
            return self.copy.wait()

    def staged(frames):
        copies.append(Held(stage(frames)))
        return copies[-1]

    pair.stores[0].stage = staged
    try:
        pair.start()
        announce(pair.source)
        eventually(lambda: len(copies) == 3)
        copies[0].free.set()
        eventually(lambda: len(copies) == 4)
    finally:
        pair.stores[0].stage = stage
        for copy in copies:
            copy.free.set()
        pair.close()


def test_what_is_waited_for_goes_first():
    """Two transfers over one link; the one whose token is drawn sends all that it has before the other's next frame."""
    target = Node("d", "shm", limits=SMALL)
    sent = []
    store = ArrayStore(seed=1)
    source = Node("p", "shm", store=store, limits=TransferLimits(512, 1024, 1 << 20))
    try:
        for transfer in (7, 8):
            target.transport.open_receive(receive_order(transfer=transfer))
        link = source.transport
        gate = threading.Event()
        honest = store.read_kv

        def read_kv(layer, table, *rest):
            gate.wait(WAIT_S)
            sent.append(int(table[0]))
            honest(layer, table, *rest)

        store.read_kv = read_kv
        for transfer in (7, 8):
            link.open_send(send_order(target, transfer=transfer))
        others = np.asarray(SOURCE_TABLE)[::-1].copy()
        for layer in range(LAYOUT.num_layers):
            link.layer_written(7, layer, 0, 100, SOURCE_TABLE)
            link.layer_written(8, layer, 0, 100, others)
        link.send_handoff(8, Handoff(token_id=1))
        time.sleep(0.1)  # both are open and the first frame is picked
        gate.set()
        assert isinstance(target.event(), ReceiveCompleted)
        mine = int(others[0])
        last = len(sent) - 1 - sent[::-1].index(mine)
        assert set(sent[1 : last + 1]) == {mine}, sent
    finally:
        source.transport.close()
        target.transport.close()


def test_frames_that_came_meanwhile_are_written_together(scheme):
    """And the digest of every one is checked: here all are right. Of TCP no one knows whether the rest of a frame has come."""
    pair = DevicePair(scheme, 6, JOINED)
    pair.stores[0].delay_s, pair.stores[1].delay_s = 0, 0.03
    try:
        pair.carry()
        assert np.array_equal(pair.stores[0].tokens(SOURCE_TABLE, 100), pair.stores[1].tokens(TARGET_TABLE, 100))
        assert (max(pair.stores[1].together) > 1) == (scheme != "tcp")
    finally:
        pair.close()


def test_a_peer_that_stops_in_the_middle_of_a_frame_holds_up_nobody_who_ends_the_transfer():
    """What arrived before is in the blocks by then, so the blocks may be given away."""
    store = FakeStream(6)
    target = Node("d", "tcp", store=store)
    channel = raw_peer(target)
    try:
        target.transport.open_receive(receive_order())
        payload = bytes(4 * LAYOUT.token_bytes)
        heads = [
            seal_over(msgspec.structs.replace(kv_header(first), flags=FLAG_DIGEST), payload_digest(payload), crc32c)
            for first in (0, 4)
        ]
        send_raw(channel, heads[0], payload)
        channel.socket.sendall(heads[1] + payload[:5])
        eventually(lambda: store.log == ["collect"])
        done = threading.Event()
        threading.Thread(target=lambda: (target.transport.abort(7, "cancelled"), done.set()), daemon=True).start()
        assert done.wait(WAIT_S)
    finally:
        channel.close()
        target.transport.close()
        store.close()


@pytest.mark.parametrize("liar", [0, 1])
def test_bytes_that_changed_on_the_way_end_the_transfer_before_anyone_sees_them(scheme, liar):
    """The digest of either end is wrong, as if the bytes had changed between them."""
    pair = DevicePair(scheme, 3, JOINED)
    store, name = pair.stores[liar], ("stage", "collect")[liar]
    honest = getattr(store, name)
    setattr(store, name, lambda *arguments: Lying(honest(*arguments)))
    try:
        pair.start()
        announce(pair.source)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        event = pair.target.event()
        assert isinstance(event, ReceiveFailed)
        assert "damaged KV frame" in event.reason
        assert isinstance(pair.source.event(), SendFailed)
    finally:
        pair.close()


def test_one_damaged_frame_of_several_that_are_written_together_ends_the_transfer():
    pair = DevicePair("shm", 6, JOINED)
    pair.stores[1].delay_s = 0.03
    honest = pair.stores[1].collect

    class LastIsWrong:
        def __init__(self, copy):
            self.copy = copy

        def wait(self):
            *others, last = self.copy.wait()
            return [*others, last ^ bool(others)]

    pair.stores[1].collect = lambda frames: LastIsWrong(honest(frames))
    try:
        pair.start()
        announce(pair.source)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        event = pair.target.event()
        assert max(pair.stores[1].together) > 1
        assert isinstance(event, ReceiveFailed)
        assert "damaged KV frame" in event.reason
    finally:
        pair.close()


class Lying:
    def __init__(self, copy):
        self.copy = copy
        self.ended = copy.ended

    def wait(self):
        return [digest ^ 1 for digest in self.copy.wait()]


def test_frames_over_tcp_lie_in_memory_of_the_device_s_choice():
    pair = DevicePair("tcp", 2)
    try:
        pair.carry()
        source, target = pair.stores
        assert source.places
        assert all(any(place is one for one in source.allocated) for place in source.places)
        assert target.allocated
    finally:
        pair.close()


def test_the_ring_is_pinned_at_both_ends_while_it_lives():
    pair = DevicePair("shm", 2)
    try:
        pair.carry()
        assert [len(store.pinned) for store in pair.stores] == [1, 1]
        assert pair.stores[0].pinned[0].nbytes == pair.stores[1].pinned[0].nbytes
    finally:
        pair.close()
    deadline = time.monotonic() + WAIT_S
    while any(store.pinned for store in pair.stores):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_blocks_are_not_taken_away_under_a_running_copy(scheme):
    pair = DevicePair(scheme, 2)
    pair.stores[0].delay_s = 0.05
    try:
        pair.start()
        announce(pair.source)
        while not pair.stores[0].log:
            time.sleep(0.001)
        pair.source.transport.abort(7, "preempted")
        pair.stores[0].blocks[:] = -1.0  # given to somebody else
        assert isinstance(pair.target.event(), ReceiveFailed)
        assert not (pair.stores[1].blocks == -1.0).any()
    finally:
        pair.close()
