"""The shared ring: placement, laps, what a hostile or broken other end may do to it."""

import fcntl
import mmap
import os
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.transfer.channel import ChannelClosed, read_any_frame, read_frame, send_frame
from relay.transfer.checksum import crc32c
from relay.transfer.frame import HEADER_BYTES, FrameError, Header, Kind, seal, seal_over
from relay.transfer.ring import (
    DEFAULT_RING_BYTES,
    MIN_RING_BYTES,
    SLOT_BYTES,
    check_capacity,
    header_of,
    largest_payload,
    place,
    slot_bytes,
)
from relay.transfer.shm import offer_ring, take_ring
from relay.transfer.stream import StreamChannel

CAPACITY = -(-MIN_RING_BYTES // 4096) * 4096
LARGEST = largest_payload(CAPACITY)


class Ends:
    """Both ends of one ring in one process."""

    def __init__(self, capacity=CAPACITY):
        ours, theirs = socket.socketpair()
        self.receiver = offer_ring(StreamChannel(ours, "p", "shm"), capacity)
        self.sender = take_ring(StreamChannel(theirs, "d", "shm"))
        for end in (self.receiver, self.sender):
            end.set_timeout(10)

    def send(self, payload, transfer=1):
        send_frame(self.sender, Header(Kind.KV, transfer, payload_bytes=len(payload)), payload, crc32c)

    def receive(self, hold=False):
        header, payload, expected = read_any_frame(self.receiver, crc32c)
        assert crc32c(payload) == expected
        found = header.transfer, bytes(payload)
        if not hold:
            self.receiver.done()
        return found

    def close(self):
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


@settings(deadline=None)
@given(st.lists(st.integers(0, LARGEST), max_size=60))
def test_records_never_overlap_what_is_not_given_back(sizes):
    """Whatever the sizes: as long as the occupied bytes in use fit, no two records share a byte."""
    position, used = 0, []
    for size in sizes:
        placed = place(position, size, CAPACITY)
        while used and sum(record.occupied for record, _ in used) + placed.occupied > CAPACITY:
            used.pop(0)
        assert placed.occupied <= CAPACITY
        mine = [(placed.slot, placed.slot + SLOT_BYTES), (placed.payload, placed.payload + size)]
        for begin, end in mine:
            assert 0 <= begin <= end <= CAPACITY
        for other, other_size in used:
            for begin, end in [(other.slot, other.slot + SLOT_BYTES), (other.payload, other.payload + other_size)]:
                assert all(end <= first or last <= begin for first, last in mine if first < last and begin < end)
        assert placed.next % SLOT_BYTES == 0
        assert placed.next < CAPACITY
        used.append((placed, size))
        position = placed.next


def test_a_payload_over_the_limit_has_no_place():
    with pytest.raises(FrameError, match="takes"):
        place(0, LARGEST + 1, CAPACITY)


@pytest.mark.parametrize("capacity", [0, 4096, MIN_RING_BYTES - 4096, DEFAULT_RING_BYTES + 1, 1 << 40])
def test_capacities_that_are_refused(capacity):
    with pytest.raises(FrameError, match="ring of"):
        check_capacity(capacity)


def test_many_laps_in_order(ends):
    sizes = [0, 1, 63, 64, 65, 300_000, LARGEST, 4096] * 8
    thread = threading.Thread(target=lambda: [ends.send(bytes([i % 251]) * size, i) for i, size in enumerate(sizes)])
    thread.start()
    for i, size in enumerate(sizes):
        assert ends.receive() == (i, bytes([i % 251]) * size)
    thread.join()


def test_answers_go_the_other_way(ends):
    send_frame(ends.receiver, Header(Kind.COMPLETE, 5), b"", crc32c)
    assert read_frame(ends.sender, crc32c)[0].transfer == 5


def test_a_full_ring_waits_and_does_not_overwrite(ends):
    for i in range(2):
        ends.send(bytes([i]) * LARGEST, i)
    done = threading.Event()
    threading.Thread(target=lambda: (ends.send(bytes(LARGEST), 2), done.set()), daemon=True).start()
    assert not done.wait(0.2)
    assert ends.receive(hold=True) == (0, bytes(LARGEST))
    assert ends.receive(hold=True) == (1, bytes([1]) * LARGEST)
    assert not done.wait(0.2)  # both are held
    assert not ends.receiver.ready()
    ends.receiver.done()
    assert done.wait(10)
    assert ends.receiver.ready()
    ends.receiver.done()
    assert ends.receive() == (2, bytes(LARGEST))


def test_a_peer_that_takes_nothing_is_given_up(ends):
    ends.sender.set_timeout(0.2)
    for _ in range(2):
        ends.send(bytes(LARGEST))
    with pytest.raises(ChannelClosed, match=r"nothing for 0\.2 s"):
        ends.send(bytes(LARGEST))


def test_what_was_sent_before_the_end_arrives(ends):
    ends.send(b"last words")
    ends.sender.close()
    assert ends.receive() == (1, b"last words")
    with pytest.raises(ChannelClosed, match="closed"):
        ends.receive()


def test_close_wakes_both_ends(ends):
    ends.receiver.set_timeout(None)
    failures = []

    def wait():
        try:
            ends.receive()
        except ChannelClosed as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ends.receiver.close()
    thread.join(10)
    assert failures


def write_record(ends, number, raw_header, payload=b""):
    """What a broken P might leave in the ring."""
    view = ends.sender._ring.bytes
    view[:SLOT_BYTES] = slot_bytes(number, raw_header)
    view[SLOT_BYTES : SLOT_BYTES + len(payload)] = payload
    os.eventfd_write(ends.sender._ring.frames.number, 1)


def test_a_lying_length_stays_inside_the_ring(ends):
    write_record(ends, 0, seal_over(Header(Kind.KV, payload_bytes=LARGEST), 0, crc32c))
    header, payload, expected = read_any_frame(ends.receiver, crc32c)
    assert len(payload) == header.payload_bytes
    assert crc32c(payload) != expected


def test_a_frame_counted_and_never_written_is_no_frame(ends):
    ends.send(b"one")
    ends.receive()
    for _ in range(2):
        os.eventfd_write(ends.sender._ring.frames.number, 1)
        with pytest.raises(FrameError, match="in the ring instead of 1"):
            ends.receive()


def test_a_record_of_an_earlier_lap_is_no_frame():
    head = seal(Header(Kind.PROBE), b"", crc32c)
    assert header_of(slot_bytes(7, head), 7) == head
    with pytest.raises(FrameError, match="record 7 in the ring instead of 8"):
        header_of(slot_bytes(7, head), 8)


def test_noise_in_the_slot(ends):
    write_record(ends, 0, b"\xff" * HEADER_BYTES)
    with pytest.raises(FrameError, match="magic"):
        ends.receive()


def test_the_header_is_copied_before_it_is_looked_at(ends):
    """A header that changes after it was read changes nothing: what was checked is what is used."""
    ends.send(b"x" * 64)
    raw = ends.receiver.receive_header()
    ends.sender._ring.bytes[:SLOT_BYTES] = bytes(SLOT_BYTES)
    assert raw[:4] == b"RLKV"


def test_space_that_was_never_taken(ends):
    os.eventfd_write(ends.receiver._ring.space.number, 1 << 40)
    for _ in range(2):
        ends.send(bytes(LARGEST))
    with pytest.raises(FrameError, match="more of the ring than there is"):
        ends.send(bytes(LARGEST))


def memory(size, seals):
    number = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, size)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return number


def special_descriptors():
    """How many memfds of these tests and eventfds this process has open; other threads may come and go."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(name) for name in names if os.path.lexists(name)]
    return sum("memfd:test" in link for link in links), sum("eventfd" in link for link in links)


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: [memory(CAPACITY, SEALED), os.eventfd(0)], "2 descriptors"),
        (lambda: [memory(CAPACITY, 0), os.eventfd(0), os.eventfd(0)], "not sealed"),
        (lambda: [memory(CAPACITY, fcntl.F_SEAL_GROW), os.eventfd(0), os.eventfd(0)], "not sealed"),
        (lambda: [memory(8192, SEALED), os.eventfd(0), os.eventfd(0)], "ring of 8192"),
        (lambda: [memory(CAPACITY, SEALED), os.eventfd(0), memory(8, 0)], "no eventfd"),
        (lambda: [os.open("/dev/null", os.O_RDWR), os.eventfd(0), os.eventfd(0)], "ring of 0"),
    ],
)
def test_a_ring_that_is_none_is_refused_and_nothing_stays_open(make, text):
    before = special_descriptors()
    ours, theirs = socket.socketpair()
    descriptors = make()
    socket.send_fds(ours, [b"R"], descriptors)
    for number in descriptors:
        os.close(number)
    with pytest.raises(FrameError, match=text):
        take_ring(StreamChannel(theirs, "d", "shm"))
    ours.close()
    theirs.close()
    assert all(now <= was for now, was in zip(special_descriptors(), before, strict=True))


def test_a_target_that_goes_instead_of_passing_a_ring():
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(ChannelClosed, match="instead of passing a ring"):
        take_ring(StreamChannel(theirs, "d", "shm"))
    theirs.close()


def test_mapped_memory_cannot_be_taken_away(ends):
    """Without the seals a peer could truncate the file, and the next access here would be SIGBUS."""
    for size in (0, 4096, CAPACITY * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(ends.receiver._ring.memory.number, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(ends.receiver._ring.memory.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert mmap.PAGESIZE == 4096


def test_an_engine_that_closes_while_it_passes_a_ring(monkeypatch):
    """``close`` is another thread's: what it interrupts ends like any lost connection, also between two calls."""
    ours, theirs = socket.socketpair()
    stream = StreamChannel(ours, "p", "shm")
    send = socket.send_fds

    def send_and_close(*args):
        send(*args)
        stream.close()

    monkeypatch.setattr(socket, "send_fds", send_and_close)
    with pytest.raises(ChannelClosed):
        offer_ring(stream)
    theirs.close()
