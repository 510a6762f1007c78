"""The seam for devices, with a fake copy stream: copies are queued, overlapped, and waited for before memory goes."""

import threading
import time
from collections import deque

import numpy as np
import pytest

from relay.transfer.contract import ReceiveCompleted, ReceiveFailed, SendAcknowledged, read_frame_kv, write_frame_kv
from relay.transfer.frame import Handoff, Header, Kind
from tests.transfer.nodes import SOURCE_TABLE, TARGET_TABLE, WAIT_S, Node, announce, receive_order, send_order
from tests.transfer.stores import ArrayStore


class FakeCopy:
    def __init__(self, work):
        self.work = work
        self.done = threading.Event()

    def wait(self):
        assert self.done.wait(WAIT_S)


class FakeStream(ArrayStore):
    """A device's blocks behind one copy stream: copies run in order on a thread of their own, some time after they were queued."""

    def __init__(self, depth=2, delay_s=0.002, seed=None):
        super().__init__(seed=seed)
        self.stage_depth = depth
        self.delay_s = delay_s
        self.pinned = []
        self.log = []
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

    def stage(self, layer, block_table, first, count, out, layers=1):
        header = Header(
            Kind.KV, layer=layer, first_token=first, token_count=count, payload_bytes=len(out), layers=layers
        )
        return self._enqueue("stage", lambda: read_frame_kv(self, header, block_table, out))

    def collect(self, layer, block_table, first, count, data, layers=1):
        header = Header(
            Kind.KV, layer=layer, first_token=first, token_count=count, payload_bytes=len(data), layers=layers
        )
        return self._enqueue("collect", lambda: write_frame_kv(self, header, block_table, data))

    def _enqueue(self, name, work):
        copy = FakeCopy(work)
        with self._lock:
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
                    return
                copy = self._queue[0]
            time.sleep(self.delay_s)
            copy.work()
            copy.done.set()
            with self._lock:
                self._queue.popleft()

    def close(self):
        with self._lock:
            self._ended = True
            self._lock.notify()
        self._thread.join(WAIT_S)


class DevicePair:
    def __init__(self, scheme, depth):
        self.stores = FakeStream(depth, seed=1), FakeStream(depth)
        self.source = Node("p", scheme, store=self.stores[0])
        self.target = Node("d", scheme, store=self.stores[1])

    def close(self):
        self.source.transport.close()
        self.target.transport.close()
        for store in self.stores:
            store.close()

    def start(self):
        self.target.transport.open_receive(receive_order())
        self.source.transport.open_send(send_order(self.target))


@pytest.fixture(params=["shm", "tcp"])
def scheme(request):
    return request.param


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_byte_arrives_through_streams(scheme, depth):
    pair = DevicePair(scheme, depth)
    try:
        pair.start()
        announce(pair.source)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
        assert isinstance(pair.source.event(), SendAcknowledged)
        sent = pair.stores[0].tokens(SOURCE_TABLE, 100)
        assert np.array_equal(sent, pair.stores[1].tokens(TARGET_TABLE, 100))
        assert set(pair.stores[0].log) == {"stage"}
        assert set(pair.stores[1].log) == {"collect"}
        if scheme == "shm":
            assert pair.stores[0].most_under_way == depth
    finally:
        pair.close()


def test_the_ring_is_pinned_at_both_ends_while_it_lives():
    pair = DevicePair("shm", 2)
    try:
        pair.start()
        announce(pair.source)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
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
