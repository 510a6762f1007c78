"""Areas of device memory between two engines: what happens to them when an end goes, and what serves where they cannot be had."""

import os
import socket
import threading
import time
from collections import deque
from unittest import mock

import numpy as np
import pytest

from relay.kernels.kv_frames import SharingFailed
from relay.transfer import ring
from relay.transfer.areas import MOST_AREAS, AreaPool, Mappings
from relay.transfer.channel import ChannelClosed, read_any_frame, send_frame
from relay.transfer.checksum import crc32c
from relay.transfer.contract import ReceiveCompleted, ReceiveFailed, SendAcknowledged
from relay.transfer.frame import FrameError, Handoff, Header, Kind, seal_over
from relay.transfer.ipc import IpcWire, offer_area, take_area
from relay.transfer.shm import Descriptor
from relay.transfer.stream import StreamChannel
from relay.transfer.transport import WiredTransport
from relay.transfer.wire import ShmWire
from relay.worker.device import area_bytes, flow_of
from tests.transfer.nodes import (
    SMALL,
    SOURCE_TABLE,
    TARGET_TABLE,
    FakeDevices,
    announce,
    eventually,
    receive_order,
    send_order,
)
from tests.transfer.stores import identity
from tests.transfer.test_staged import FakeStream


class Ends:
    """P and D that both have an area wire and a ring behind it."""

    def __init__(self, devices):
        self.devices = devices
        self.stores = FakeStream(2, seed=1), FakeStream(2)
        self.events = [], []
        self.wires = [IpcWire("here", devices, 1 << 18) for _ in "pd"]
        self.transports = [
            WiredTransport(identity(name), store, events.append, [wire, ShmWire("here")], limits=SMALL)
            for name, store, events, wire in zip("pd", self.stores, self.events, self.wires, strict=True)
        ]
        self.transport = self.transports[1]  # as ``send_order`` looks for addresses

    def run(self, transfer=7):
        source, target = self.transports
        target.open_receive(receive_order(transfer=transfer))
        source.open_send(send_order(self, transfer=transfer))
        announce(Source(source), transfer=transfer)
        source.send_handoff(transfer, Handoff(token_id=1))
        eventually(lambda: len(self.events[0]) == len(self.events[1]) == 1)
        return self.events[0].pop(), self.events[1].pop()

    def close(self):
        for transport in self.transports:
            transport.close()
        for store in self.stores:
            store.close()


class Source:
    def __init__(self, transport):
        self.transport = transport


@pytest.fixture
def devices():
    return FakeDevices()


def test_an_area_carries_kv_and_is_unmapped_at_the_end(devices):
    ends = Ends(devices)
    try:
        sent, got = ends.run()
        assert (sent.stats.scheme, got.stats.scheme) == ("ipc", "ipc")
        assert np.array_equal(ends.stores[0].tokens(SOURCE_TABLE, 100), ends.stores[1].tokens(TARGET_TABLE, 100))
        assert len(devices.opened) == 1
    finally:
        ends.close()
    eventually(lambda: not devices.opened)


@pytest.mark.parametrize("problem", ["open", "allocate"])
def test_where_an_area_cannot_be_had_the_ring_serves(devices, problem, capsys):
    devices.problem = problem
    ends = Ends(devices)
    try:
        for transfer in (7, 8):
            sent, got = ends.run(transfer)
            assert isinstance(got, ReceiveCompleted)
            assert isinstance(sent, SendAcknowledged)
            assert sent.stats.scheme == "shm"
    finally:
        ends.close()
    said = capsys.readouterr().err
    assert said.count("KV over CUDA IPC is not possible") == 1
    assert {"open": "peer access", "allocate": "out of memory"}[problem] in said


def test_bytes_that_change_in_the_area_are_never_decoded(devices):
    """As by a kernel of a process that was killed, or a stray one: D's own digest says so."""
    ends = Ends(devices)
    honest = ends.stores[1].collect

    def collect(frames):
        for _, place in frames:
            place.region[place.offset] ^= 1
        return honest(frames)

    ends.stores[1].collect = collect
    try:
        ends.transports[1].open_receive(receive_order())
        ends.transports[0].open_send(send_order(ends))
        announce(Source(ends.transports[0]))
        eventually(lambda: ends.events[1])
        assert isinstance(ends.events[1][0], ReceiveFailed)
        assert "damaged KV frame" in ends.events[1][0].reason
    finally:
        ends.close()


def test_an_area_is_given_out_again_only_once_its_writer_is_gone(devices):
    pool = AreaPool(devices, 4096, grace_s=0.05)
    first, _ = pool.take()
    ours, theirs = (Descriptor(number) for number in os.pipe())
    pool.retire(first, ours)
    time.sleep(0.06)
    second, _ = pool.take()
    assert second is not first, "its writer may still write"
    del theirs  # the lease ends: unmapped, or dead
    third, _ = pool.take()
    assert third is not first, "what a killed process had queued may still run"
    time.sleep(0.06)
    assert pool.take()[0] is first


def test_the_grace_begins_when_the_writer_ends_and_not_with_the_next_connection(devices):
    pool = AreaPool(devices, 4096, grace_s=0.2)
    first, _ = pool.take()
    ours, theirs = (Descriptor(number) for number in os.pipe())
    pool.retire(first, ours)
    del theirs
    time.sleep(0.5)
    assert pool.take()[0] is first


def test_an_area_without_a_handle_is_given_back(devices):
    pool = AreaPool(devices, 4096)
    honest, devices.handle = devices.handle, mock.Mock(side_effect=SharingFailed("not supported (801)"))
    closed = []
    devices.close = closed.append
    for _ in range(MOST_AREAS + 1):
        with pytest.raises(SharingFailed, match="not supported"):
            pool.take()
    assert len(closed) == MOST_AREAS + 1
    devices.handle = honest
    pool.take()


def test_a_target_without_an_area_for_now_is_asked_again(devices, capsys):
    ends = Ends(devices)
    pool = ends.wires[1]._pool
    taken = [pool.take() for _ in range(MOST_AREAS)]
    try:
        sent, _ = ends.run()
        assert sent.stats.scheme == "shm"
        assert "not possible" not in capsys.readouterr().err
        assert ends.wires[0].reaches(ends.wires[1].address)
        assert len(taken) == MOST_AREAS
    finally:
        ends.close()


def test_areas_are_bounded(devices):
    pool = AreaPool(devices, 4096)
    for _ in range(MOST_AREAS):
        pool.take()
    with pytest.raises(SharingFailed, match="in use or quarantined"):
        pool.take()


@pytest.mark.parametrize("gib", [24, 80, 141])
def test_an_area_holds_as_many_of_the_largest_frames_as_its_size_says(gib):
    capacity = area_bytes(gib << 30)
    size = min(flow_of("cuda").limits.max_frame_bytes, capacity // 4 >> 20 << 20)
    many = capacity // size
    assert many >= 4
    position, free, held = 0, capacity, deque()
    for _ in range(50):
        while len(held) < many:
            record = ring.place(position, size, capacity)
            assert record.occupied <= free, f"{len(held)} frames are under way and the next has no room"
            position, free = record.next, free - record.occupied
            held.append(record.occupied)
        free += held.popleft()


class Pair:
    """Both ends of one offer, on threads of their own."""

    def __init__(self, devices, capacity=1 << 16):
        self.devices = devices
        ours, theirs = self.sockets = socket.socketpair()
        self.pool = AreaPool(devices, capacity, grace_s=0)
        self.raw = theirs
        self.found = []
        self.thread = threading.Thread(target=self._offer, args=(StreamChannel(ours, "p", "ipc"),))
        self.thread.start()
        self.stream = StreamChannel(theirs, "d", "ipc")

    def _offer(self, stream):
        try:
            self.found.append(offer_area(stream, self.pool))
        except ChannelClosed as error:
            self.found.append(error)

    def taken(self, mappings=None):
        sender = take_area(self.stream, mappings or Mappings(self.devices))
        self.thread.join()
        return sender, self.found[0]

    def close(self):
        for end in self.sockets:
            end.close()


@pytest.fixture
def pair(devices):
    pair = Pair(devices)
    yield pair
    pair.close()


def test_p_lets_go_of_the_lease_after_the_area(pair, devices):
    sender, receiver = pair.taken()
    area = receiver._area
    receiver.close()
    receiver.release()
    assert pair.pool.take()[0] is not area
    sender.close()
    assert pair.pool.take()[0] is not area, "closed is not ended"
    sender.release()
    sender.release()
    assert not devices.opened
    assert pair.pool.take()[0] is area


def test_the_area_of_a_dead_target_stays_mapped_until_another_is(pair, devices):
    """Unmapping waits for the device, which then has the dead one's sequences to go on with."""
    mappings = Mappings(devices)
    sender, receiver = pair.taken(mappings)
    receiver.close()
    receiver._lease = None  # as its process's end does: the reading end is closed
    sender.close()
    sender.release()
    assert len(devices.opened) == 1
    second = Pair(devices)
    try:
        sender, receiver = second.taken(mappings)
        assert devices.opened == [devices.handle(receiver._area)]
    finally:
        second.close()


def test_an_area_that_cannot_be_unmapped_is_said_and_let_go_of(pair, devices, capsys):
    sender, receiver = pair.taken()
    area = receiver._area
    receiver.close()
    receiver.release()
    devices.problem = "close"
    sender.close()
    sender.release()
    assert "an area of d stays mapped: invalid argument (1)" in capsys.readouterr().err
    assert pair.pool.take()[0] is area


def test_an_offer_that_p_does_not_answer_is_quarantined(pair):
    pair.raw.recv(1)
    pair.raw.close()
    pair.thread.join()
    assert isinstance(pair.found[0], ChannelClosed)
    assert len(pair.pool._quarantined) == 1


def test_space_goes_round_and_round(pair):
    sender, receiver = pair.taken()
    for number in range(100):
        size = 64 * (1 + number * 37 % 400)
        sender.await_room(size)
        out = sender.reserve_kv(size)
        out.region[out.offset : out.offset + size] = bytes([number]) * size
        got = receiver.receive_kv(size)
        assert got == out
        receiver.done()
    os.eventfd_write(receiver._space.number, 1 << 40)
    with pytest.raises(FrameError, match="more of its area than there is"):
        sender.has_room(30_000)


def kv(number):
    return seal_over(Header(Kind.KV, number, layer=1, token_count=1, payload_bytes=64), 0, crc32c)


def test_headers_of_frames_that_go_together_go_in_one_call_and_are_read_in_one(pair):
    sender, receiver = pair.taken()
    assert not receiver.ready()
    for _ in range(3):
        sender.await_room(64)
        sender.reserve_kv(64)
    calls = []
    sender._stream.socket = Calls(sender._stream.socket, calls)
    receiver._stream.socket = Calls(receiver._stream.socket, calls)
    sender.commit(*(kv(number) for number in range(3)))
    for number in range(3):
        assert receiver.ready()
        assert read_any_frame(receiver, crc32c)[0].transfer == number
    assert calls == ["sendall", "recv_into"]
    receiver.done(3)
    assert not receiver.ready()
    assert sender.has_room(30_000)


def test_room_of_frames_that_are_done_together_comes_back(pair):
    sender, receiver = pair.taken()
    size, counts = 8_000, []
    for _ in range(3):
        counts.append(0)
        while sender.has_room(size):
            sender.reserve_kv(size)
            counts[-1] += 1
        for _ in range(counts[-1]):
            receiver.receive_kv(size)
        receiver.done(counts[-1])
    assert counts[0] > 2
    assert min(counts) >= counts[0] - 1, "less and less room"  # one may not fit before the end of the area


def test_frames_leave_in_the_order_of_their_reservation_whatever_they_carry(pair):
    sender, receiver = pair.taken()
    payload = b"first token"
    head = Header(Kind.HANDOFF, 9, payload_bytes=len(payload))
    raw = [kv(1), seal_over(head, crc32c(payload, 0), crc32c), kv(2)]
    sender.await_room(64)
    sender.reserve_kv(64)
    sender.reserve(len(payload))[:] = payload
    sender.reserve_kv(64)
    sender.commit(*raw)
    assert read_any_frame(receiver, crc32c)[0].transfer == 1
    assert bytes(read_any_frame(receiver, crc32c)[1]) == payload
    assert read_any_frame(receiver, crc32c)[0].transfer == 2


class Calls:
    """A socket that notes what it is asked."""

    def __init__(self, sock, calls):
        self._socket, self._calls = sock, calls

    def __getattr__(self, name):
        self._calls.append(name)
        return getattr(self._socket, name)


@pytest.mark.parametrize("size", [5, 4096, 30_000])
def test_control_frames_between_kv_frames(pair, size):
    sender, receiver = pair.taken()
    payload = bytes(number % 251 for number in range(size))
    for number in range(2):
        sender.await_room(64)
        sender.reserve_kv(64)
        sender.commit(kv(number))
        send_frame(sender, Header(Kind.HANDOFF, number, payload_bytes=size), payload, crc32c)
    for number in range(2):
        assert read_any_frame(receiver, crc32c)[0].transfer == number
        assert bytes(read_any_frame(receiver, crc32c)[1]) == payload


def test_a_header_of_which_a_part_has_come_is_not_ready_and_an_end_is(pair):
    sender, receiver = pair.taken()
    raw = kv(1)
    pair.raw.sendall(raw[:20])
    time.sleep(0.05)
    assert not receiver.ready()
    pair.raw.sendall(raw[20:] + raw[:30])
    assert receiver.receive_header() == raw
    assert not receiver.ready()
    sender.close()
    assert receiver.ready()
    with pytest.raises(ChannelClosed, match="in the middle of a frame \\(30 of 56 bytes\\)"):
        receiver.receive_header()
