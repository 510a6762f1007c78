"""NIXL's own: staging areas in quarantine, records between two rings, agent processes. With a fake agent, as NIXL may be absent."""

import gc
import os
import random
import signal
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.errors import UsageError
from relay.transfer.channel import ChannelClosed
from relay.transfer.checksum import crc32c
from relay.transfer.contract import ReceiveCompleted, ReceiveFailed, SendFailed, TransferLimits
from relay.transfer.frame import HEADER_BYTES, FrameError, Handoff, seal
from relay.transfer.nixl import wire as nixl_wire
from relay.transfer.nixl.bridge import SourceBridge, TargetBridge, payload_bytes
from relay.transfer.nixl.memory import StagingMemory
from relay.transfer.nixl.process import environment
from relay.transfer.nixl.staging import TRANSITIONS, AreaEvent, AreaState, NoArea, StagingAreas
from relay.transfer.nixl.talk import Failed, Joined, Lane, Offer, decode, encode
from relay.transfer.ring import ALIGNMENT, MIN_RING_BYTES, SLOT_BYTES, place, slot_bytes
from relay.transfer.wire import TcpWire, open_wires
from tests.transfer.fake_nixl import Fabric, FakeAgent, fake_wire
from tests.transfer.nodes import (
    NO_NIXL,
    SOURCE_TABLE,
    Node,
    Pair,
    announce,
    eventually,
    kv_header,
    receive_order,
    send_order,
)
from tests.transfer.stores import LAYOUT

RING = -(-MIN_RING_BYTES // 4096) * 4096


# Staging areas


@given(st.lists(st.tuples(st.sampled_from(["lend", "released", "agent_gone"]), st.integers(0, 2)), max_size=60))
def test_an_area_is_lent_again_only_when_it_is_read_and_written_by_nobody(steps):
    areas = StagingAreas(3)
    missing = {}  # what an area that was lent still waits for
    for step, number in steps:
        if step == "lend":
            try:
                lent = areas.lend()
            except NoArea:
                assert len(missing) == 3
                continue
            assert lent not in missing
            missing[lent] = {"released", "agent_gone"}
        elif step in missing.get(number, ()):
            getattr(areas, step)(number)
            missing[number].remove(step)
            if not missing[number]:
                del missing[number]
                assert areas.state(number) is AreaState.FREE
        load = areas.load()
        assert load.lent + load.quarantined == len(missing)
        assert load.lent == sum(len(left) == 2 for left in missing.values())


def test_a_quarantined_area_becomes_free_by_the_end_of_its_agent_alone():
    ways = [event for (state, event) in TRANSITIONS if state is AreaState.QUARANTINED]
    assert ways == [AreaEvent.AGENT_GONE]
    areas = StagingAreas(1)
    areas.released(areas.lend())
    assert areas.state(0) is AreaState.QUARANTINED
    with pytest.raises(NoArea, match="all 1 staging areas are taken, 1 of them in quarantine"):
        areas.lend()
    areas.agent_gone(0)
    assert areas.lend() == 0


def test_an_event_that_cannot_be_is_no_transition():
    areas = StagingAreas(1)
    areas.agent_gone(areas.lend())
    with pytest.raises(AssertionError, match="unwritable"):
        areas.agent_gone(0)


# Records between two rings


class Bridges:
    """P's and D's bridge, and the engines' part of each ring."""

    def __init__(self, fabric):
        self.rings = memoryview(bytearray(RING)), memoryview(bytearray(RING))
        agents = [FakeAgent(fabric, ring) for ring in self.rings]
        for agent, other in (agents, agents[::-1]):
            agent.join(other.metadata(), other.address)
        self.source_agent, self.target_agent = agents
        self.source, self.target = SourceBridge(agents[0], self.rings[0]), TargetBridge(agents[1], self.rings[1])
        self.position, self.number = [0, 0], [0, 0]

    def put(self, payload):
        placement = place(self.position[0], len(payload), RING)
        self.rings[0][placement.payload : placement.payload + len(payload)] = payload
        self.rings[0][placement.slot : placement.slot + SLOT_BYTES] = slot(self.number[0], len(payload))
        self.position[0], self.number[0] = placement.next, self.number[0] + 1
        return placement.occupied

    def take(self, size):
        placement = place(self.position[1], size, RING)
        found = bytes(self.rings[1][placement.slot : placement.slot + SLOT_BYTES])
        assert found == slot(self.number[1], size)
        self.position[1], self.number[1] = placement.next, self.number[1] + 1
        return bytes(self.rings[1][placement.payload : placement.payload + size])


def slot(number, size):
    header = bytearray(HEADER_BYTES)
    header[44:48] = struct.pack("<I", size)
    return struct.pack("<Q", number) + bytes(header)


@pytest.mark.parametrize("latest_first", [False, True])
def test_records_of_every_size_arrive_in_order_over_many_laps(latest_first):
    fabric = Fabric()
    fabric.latest_first = latest_first
    bridges, rng = Bridges(fabric), random.Random(1)
    sizes = [0, 1, 63, 64, 65, 1000, 300_000, 1 << 20]
    for _ in range(60):
        batch = [rng.randbytes(rng.choice(sizes)) for _ in range(3)]
        if sum(len(payload) for payload in batch) > RING // 2:
            batch = batch[:1]
        occupied = 0
        for payload in batch:
            occupied += bridges.put(payload)
            bridges.source.advance(1)
        arrived = 0
        while arrived < len(batch):
            arrived += bridges.target.poll()
        assert [bridges.take(len(payload)) for payload in batch] == batch
        bridges.target.advance(occupied // ALIGNMENT)
        assert bridges.source.poll() == occupied // ALIGNMENT
        assert bridges.source.resting
        assert not bridges.target.busy


def test_a_slot_says_how_long_its_payload_is():
    raw = slot_bytes(3, seal(kv_header(count=4), bytes(4 * LAYOUT.token_bytes), crc32c))
    assert payload_bytes(raw) == 4 * LAYOUT.token_bytes


def test_a_record_shows_only_after_those_before_it():
    fabric = Fabric()
    bridges = Bridges(fabric)
    for payload in (b"a", b"b", b"c"):
        bridges.put(payload)
    first, *rest = (slot(number, 1) for number in range(3))
    bridges.target_agent.inbox = list(rest)
    assert bridges.target.poll() == 0
    assert bridges.target.busy
    bridges.target_agent.inbox = [first]
    assert bridges.target.poll() == 3


@pytest.mark.parametrize(
    "notes",
    [
        [b""],
        [bytes(SLOT_BYTES - 1)],
        [slot(0, 1), slot(0, 1)],
        [slot(RING // ALIGNMENT, 1)],
        [slot(0, RING)],
    ],
)
def test_a_notification_that_is_none_ends_the_connection(notes):
    bridges = Bridges(Fabric())
    bridges.target_agent.inbox = notes
    with pytest.raises(FrameError):
        bridges.target.poll()


@pytest.mark.parametrize("note", [b"", bytes(9), struct.pack("<Q", 3), struct.pack("<Q", 1 << 60)])
def test_more_space_than_there_is_ends_the_connection(note):
    bridges = Bridges(Fabric())
    bridges.put(bytes(ALIGNMENT))
    bridges.source.advance(1)
    assert not bridges.source.resting
    bridges.source_agent.inbox = [note]
    with pytest.raises(FrameError):
        bridges.source.poll()


# Connections


class Fake:
    """P and D on a fabric of their own."""

    def __init__(self, max_areas=64):
        self.fabric = Fabric()
        self.processes = {"p": [], "d": []}
        self.source = self.node("p", seed=1)
        self.target = self.node("d")
        self.target.wire.memory = StagingMemory(self.target.wire._ring_bytes, max_areas)

    def node(self, name, **other):
        return Node(name, lambda: fake_wire(self.fabric, self.processes[name]), **other)

    def close(self):
        self.fabric.held = False
        for process in [*self.processes["p"], *self.processes["d"]]:
            process.may_end.set()
        self.source.transport.close()
        self.target.transport.close()


@pytest.fixture
def fake():
    fake = Fake()
    yield fake
    fake.close()


def begin(fake, transfer=7):
    fake.target.transport.open_receive(receive_order(transfer=transfer))
    fake.source.transport.open_send(send_order(fake.target, transfer=transfer))
    announce(fake.source, transfer=transfer)


def lost_with_a_write_under_way(fake):
    """The connection ends while P's writes are on their way, and D's agent process does not end yet."""
    fake.fabric.held = True
    begin(fake)
    eventually(lambda: fake.fabric.pending)
    eventually(lambda: fake.target.transport._table.get(7).links)  # P's probe has tied the connection to the transfer
    fake.processes["d"][0].may_end.clear()
    fake.processes["p"][0].may_end.clear()
    next(iter(fake.target.transport._accepted)).close()
    assert isinstance(fake.target.event(), ReceiveFailed)
    assert isinstance(fake.source.event(), SendFailed)
    eventually(lambda: fake.processes["d"][0].killed)


def test_a_late_write_lands_in_a_quarantined_area_and_nowhere_else(fake):
    lost_with_a_write_under_way(fake)
    late = list(fake.fabric.pending)
    fake.fabric.pending = []
    fake.fabric.held = False
    begin(fake, transfer=8)  # over a new connection, in another area
    fake.source.transport.send_handoff(8, Handoff(token_id=1))
    assert isinstance(fake.target.event(), ReceiveCompleted)
    before = fake.target.store.blocks.copy()
    regions = [bytes(process.agent.region) for process in fake.processes["d"]]
    for write in late:
        write.land()
    assert [bytes(p.agent.region) == r for p, r in zip(fake.processes["d"], regions, strict=True)] == [False, True]
    assert np.array_equal(fake.target.store.blocks, before)
    assert fake.target.wire.memory.load().lent == 2  # the thread that plays the process still maps the first
    fake.processes["d"][0].may_end.set()
    eventually(lambda: (gc.collect(), fake.target.wire.memory.load().free)[1] == 1)


def test_with_the_areas_all_in_quarantine_a_transfer_is_refused_with_the_reason():
    fake = Fake(max_areas=1)
    try:
        lost_with_a_write_under_way(fake)
        fake.fabric.held = False
        begin(fake, transfer=8)
        event = fake.source.event()
        assert isinstance(event, SendFailed)
        assert "all 1 staging areas are taken" in event.reason
        fake.target.transport.abort(8, "over")
        fake.processes["d"][0].may_end.set()
        eventually(lambda: (gc.collect(), fake.target.wire.memory.load().free)[1] == 1)
        begin(fake, transfer=9)
        fake.source.transport.send_handoff(9, Handoff(token_id=1))
        assert isinstance(fake.target.event(), ReceiveCompleted)
        assert len(fake.target.wire.memory._memory) == 1
    finally:
        fake.close()


@pytest.mark.parametrize("who", ["p", "d"])
def test_the_end_of_an_agent_process_ends_its_transfers_at_both_ends(fake, who):
    begin(fake)
    eventually(fake.target.got)
    fake.processes[who][0].kill()
    assert isinstance(fake.target.event(), ReceiveFailed)
    assert isinstance(fake.source.event(), SendFailed)
    begin(fake, transfer=8)
    fake.source.transport.send_handoff(8, Handoff(token_id=1))
    assert isinstance(fake.target.event(), ReceiveCompleted)


def test_closing_ends_every_agent_process(fake):
    begin(fake)
    eventually(fake.target.got)
    fake.target.transport.close()
    fake.source.transport.close()
    eventually(lambda: all(process.killed for side in fake.processes.values() for process in side))


def test_rings_of_unequal_size_are_refused(fake):
    fake.source.wire._ring_bytes *= 2
    begin(fake)
    event = fake.source.event()
    assert isinstance(event, SendFailed)
    assert "8388608 bytes at P, 4194304 at D" in event.reason
    assert not fake.processes["d"]


def test_an_engine_without_the_extra_says_so(fake):
    other = Node("p", TcpWire, seed=1)
    try:
        other.transport.open_send(send_order(fake.target))
        event = other.event()
        assert isinstance(event, SendFailed)
        assert "not reachable from here over tcp" in event.reason
        assert "nixl://" in event.reason
    finally:
        other.transport.close()


def test_without_the_extra_the_flag_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(nixl_wire, "installed", lambda: None)
    with pytest.raises(UsageError, match="relay-serving") as caught:
        open_wires("nixl", "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x80", encode(Joined()), encode(Lane(1)), b"\x82\xa4type\xa5Offer\xa1z" + b"\x91" * 60000]
)
def test_anything_but_the_expected_message_is_refused(raw):
    with pytest.raises(FrameError):
        decode(raw, Offer)


def test_the_reason_of_the_other_end_is_passed_on():
    with pytest.raises(ChannelClosed, match="no UCX"):
        decode(encode(Failed("no UCX backend")), Joined)


def test_loopback_is_pinned_unless_the_user_says_otherwise(monkeypatch):
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    pinned = environment(loopback=True)
    assert (pinned["UCX_NET_DEVICES"], pinned["UCX_TLS"]) == ("lo", "tcp,posix,sysv,self")
    assert "UCX_NET_DEVICES" not in environment(loopback=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert environment(loopback=True)["UCX_NET_DEVICES"] == "mlx5_0:1"


@NO_NIXL
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_frozen_agent_process_ends_the_transfer_by_the_byte_watchdog(side):
    """NIXL itself would wait for ever; the engines still answer each other."""
    pair = Pair("nixl", limits=TransferLimits(512, 1024, 4096, probe_ns=100_000_000, stall_ns=800_000_000))
    try:
        pair.start()
        pair.source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
        eventually(pair.target.got)
        (process,) = agent_processes(getattr(pair, side))
        process.send_signal(signal.SIGSTOP)
        announce(pair.source)
        while pair.source.events.empty() or pair.target.events.empty():
            for node in (pair.source, pair.target):
                node.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
        assert isinstance(pair.source.event(), SendFailed)
        assert isinstance(pair.target.event(), ReceiveFailed)
        assert process.poll() is None, "it was not asked to end"
    finally:
        pair.close()
    assert process.wait(10) == -9


def agent_processes(node):
    transport = node.transport
    streams = list(transport._accepted)
    streams += [channel._stream for link in transport._links.values() for channel in link._channels[1:]]
    return [stream._process._process for stream in streams if stream._process is not None]


@NO_NIXL
def test_the_end_of_a_real_agent_process_leaves_no_process_and_no_file():
    before = sorted(os.listdir("/dev/shm"))
    pair = Pair("nixl")
    try:
        pair.start()
        announce(pair.source)
        eventually(pair.target.got)
        (child,) = agent_processes(pair.target)
        child.kill()
        assert isinstance(pair.target.event(), ReceiveFailed)
        assert isinstance(pair.source.event(), SendFailed)
        assert child.wait(10) == -9
        eventually(lambda: (gc.collect(), pair.target.wire.memory.load().free)[1] == 1)
        assert sorted(os.listdir("/dev/shm")) == before
    finally:
        pair.close()
