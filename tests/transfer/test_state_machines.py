"""Sender and receiver under a hostile network: complete only with every byte, silent after the end, and always an end."""

import dataclasses
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.transfer import receiver, sender
from relay.transfer.checksum import crc32c
from relay.transfer.contract import (
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveOrder,
    SendAcknowledged,
    SendFailed,
    SendOrder,
    TransferLimits,
)
from relay.transfer.frame import (
    Credit,
    FrameError,
    Handoff,
    Header,
    Kind,
    decode_payload,
    encode_payload,
    parse,
    seal,
    verify,
)
from relay.transfer.inproc import InprocTransport, Network
from tests.transfer.stores import LAYOUT, ArrayStore, identity

LIMITS = TransferLimits(min_frame_bytes=256, max_frame_bytes=512, window_bytes=1024)
JOINED = TransferLimits(min_frame_bytes=256, max_frame_bytes=2048, window_bytes=4096, join_bytes=1024)
TOKENS = 40
HANDOFF = Handoff(token_id=17)
SOURCE_TABLE = np.array([4, 2, 9], np.int32)
TARGET_TABLE = (1, 8, 3)


FAULTS = ("preempt", "reorder", "lose", "repeat", "stale", "damage", "abort", "silence")
ORDINARY = ("compute", "compute", "compute", "deliver", "deliver", "hand_off")
STALE = ({"epoch": 0}, {"epoch": 2}, {"attempt": 1}, {"attempt": 3})


class HostileTransfer:
    """One transfer; the moves are P's progress and what a network, a peer or a gateway may do to it."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.first = self.random.choice([0, 0, 0, 7, 16, 39, 40])
        self.faults = self.random.sample(FAULTS, self.random.randint(0, 3))
        limits = self.random.choice([LIMITS, JOINED])
        parts = self.random.choice([(), ((0, 1), (1, 1))])
        self.network = Network(crc32c)
        self.source_store, self.target_store = ArrayStore(seed=3), ArrayStore()
        self.events = {"p": [], "d": []}
        self.source = InprocTransport(
            self.network, identity("p"), self.source_store, self.events["p"].append, limits, parts
        )
        self.target = InprocTransport(self.network, identity("d"), self.target_store, self.events["d"].append, limits)
        self.target.open_receive(ReceiveOrder(1, 2, "p", 1, self.first, TOKENS, TARGET_TABLE))
        self.source.open_send(SendOrder(1, 2, "d", 1, ("inproc://d",), self.first, TOKENS))
        self.computed = self.source_store.blocks.copy()  # what P computes, again and again the same
        self.written = [self.first] * LAYOUT.num_layers
        self.aborted = set()
        self.frozen = None  # the target's blocks when the target's side ended

    def play(self, moves):
        """Random moves, then an undisturbed rest; every check after every move."""
        for _ in range(moves):
            getattr(self, self.random.choice(ORDINARY + tuple(self.faults)))()
            self.check()
        for layer in range(LAYOUT.num_layers):
            self.compute_layer(layer, TOKENS)
        self.hand_off()
        while self.network.parcels:
            self.network.deliver()
            self.check()
        for _ in range(30):  # with time and no more frames both ends are over: nothing is held for ever
            self.pass_time(0.5)
            self.network.parcels.clear()
            self.check()
        assert not self.source._senders
        assert not self.target._receivers
        for side, kinds in (("p", SendAcknowledged | SendFailed), ("d", ReceiveCompleted | ReceiveFailed)):
            assert len(self.events[side]) == (side not in self.aborted)
            assert all(isinstance(event, kinds) for event in self.events[side])
        if set(self.faults) <= {"preempt", "stale"}:
            assert self.events == {"p": [SendAcknowledged(1)], "d": [ReceiveCompleted(1, HANDOFF)]}

    def pick(self):
        """An index into what is under way, or None."""
        return self.random.randrange(len(self.network.parcels)) if self.network.parcels else None

    def compute(self):
        self.compute_layer(self.random.randrange(LAYOUT.num_layers), self.random.randint(1, 17))

    def compute_layer(self, layer, count):
        start = self.written[layer]
        end = min(start + count, TOKENS)
        if start < end:
            self.written[layer] = end
            self.source_store.blocks[layer] = self.computed[layer]
            self.source.layer_written(1, layer, start, end - start, SOURCE_TABLE)

    def hand_off(self):
        if all(count == TOKENS for count in self.written):
            self.source.send_handoff(1, HANDOFF)

    def deliver(self):
        if (index := self.pick()) is not None:
            self.network.deliver(index if "reorder" in self.faults else 0)

    reorder = deliver

    def preempt(self):
        """P's blocks go to somebody else; the same content is computed again."""
        self.source.forget_unsent(1)
        self.source_store.blocks[:] = 0
        self.written = [self.first] * LAYOUT.num_layers

    def lose(self):
        if (index := self.pick()) is not None:
            self.network.parcels.pop(index)

    def repeat(self):
        if (index := self.pick()) is not None:
            self.network.parcels.append(dataclasses.replace(self.network.parcels[index]))

    def stale(self):
        """A frame of P's of another life, with other content, which must never land."""
        if (index := self.pick()) is None or self.network.parcels[index].source == "d":
            return
        parcel = self.network.parcels[index]
        try:
            header, expected = parse(parcel.header, crc32c)
            verify(parcel.payload, expected, crc32c)
        except FrameError:
            return  # damaged already
        if (header.epoch, header.attempt) == (1, 2):
            header = msgspec.structs.replace(header, **self.random.choice(STALE))
            payload = bytes(len(parcel.payload)) if header.kind is Kind.KV else parcel.payload
            raw = seal(header, payload, crc32c)
            self.network.parcels.insert(index + 1, dataclasses.replace(parcel, header=raw, payload=payload))

    def damage(self):
        if (index := self.pick()) is not None:
            parcel = self.network.parcels[index]
            raw = bytearray(parcel.header + parcel.payload)
            raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
            parcel.header, parcel.payload = bytes(raw[: len(parcel.header)]), bytes(raw[len(parcel.header) :])

    def abort(self):
        if self.random.random() < 0.2:
            side = self.random.choice("pd")
            if not self.events[side]:
                self.aborted.add(side)
            (self.source if side == "p" else self.target).abort(1, "test")

    def silence(self):
        self.pass_time(self.random.choice([0.6, 1.2, 3.5]))

    def pass_time(self, seconds):
        self.network.now_ns += int(seconds * 1e9)
        self.source.tick(self.network.now_ns)
        self.target.tick(self.network.now_ns)

    def check(self):
        completed = [e for e in self.events["d"] if isinstance(e, ReceiveCompleted)]
        if completed and self.frozen is None:
            assert completed == [ReceiveCompleted(1, HANDOFF)]
            sent = ArrayStore(seed=3).tokens(SOURCE_TABLE, TOKENS)[:, self.first :]
            assert np.array_equal(sent, self.target_store.tokens(TARGET_TABLE, TOKENS)[:, self.first :])
        if any(isinstance(e, SendAcknowledged) for e in self.events["p"]):
            assert completed, "P freed its blocks before D had everything"
        if self.frozen is not None:
            assert np.array_equal(self.frozen, self.target_store.blocks), "written after the end"
        elif self.events["d"] or "d" in self.aborted:
            self.target_store.blocks[:] += 1  # the blocks are somebody else's now
            self.frozen = self.target_store.blocks.copy()
        for side, events in self.events.items():
            assert len(events) <= (side not in self.aborted), "more than one end"
        for open_sender in self.source._senders.values():
            assert open_sender.bytes_sent - open_sender._bytes_credited <= open_sender.limits.window_bytes


@given(st.integers(0, 2**32), st.integers(5, 60))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_hostile_transfer(seed, moves):
    HostileTransfer(seed).play(moves)


def test_hostile_transfers_reach_every_end():
    """The test above would prove little if its runs all ended alike."""
    ends = set()
    for seed in range(150):
        transfer = HostileTransfer(seed)
        transfer.play(30)
        for side, events in transfer.events.items():
            ends |= {(side, type(event), getattr(event, "handed_off", None)) for event in events}
    assert ends == {
        ("p", SendAcknowledged, None),
        ("p", SendFailed, True),
        ("p", SendFailed, False),
        ("d", ReceiveCompleted, None),
        ("d", ReceiveFailed, None),
    }


@pytest.mark.parametrize("module", [sender, receiver])
def test_end_states_absorb_everything_and_abort_is_legal_everywhere(module):
    table = module.TRANSITIONS
    states = module.SenderState if module is sender else module.ReceiverState
    events = module.SenderEvent if module is sender else module.ReceiverEvent
    ends = {state for state in states if not any(source is state for source, _ in table)}
    assert {state.value for state in ends} == (
        {"acknowledged", "failed"} if module is sender else {"complete", "failed"}
    )
    for state in set(states) - ends:
        for event in (events.ABORTED, events.ABORT_RECEIVED, events.LEASE_EXPIRED):
            assert table[state, event] is states.FAILED


def test_empty_transfer_says_so():
    network = Network(crc32c)
    events = []
    target = InprocTransport(network, identity("d"), ArrayStore(), events.append, LIMITS)
    source = InprocTransport(network, identity("p"), ArrayStore(), events.append, LIMITS)
    target.open_receive(ReceiveOrder(1, 1, "p", 1, TOKENS, TOKENS, TARGET_TABLE))
    source.open_send(SendOrder(1, 1, "d", 1, (), TOKENS, TOKENS))
    network.deliver_all()
    assert not events, "an empty range is not complete before the handoff"
    source.send_handoff(1, HANDOFF)
    assert parse(network.parcels[-1].header, crc32c)[0].flags == 1
    network.deliver_all()
    assert events == [ReceiveCompleted(1, HANDOFF), SendAcknowledged(1)]


@pytest.mark.parametrize(
    ("limits", "chunk", "expected"),
    [
        (TransferLimits(1024, 2048, 8192), 4, [16, 16, 8]),  # 64 bytes a token: coalesced up to 1,024, the end at once
        (TransferLimits(1, 512, 8192), 40, [8, 8, 8, 8, 8]),  # split at 512
        (TransferLimits(64, 64, 8192), 3, [1] * 40),
    ],
)
def test_frames_are_split_and_coalesced(limits, chunk, expected):
    machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, limits, 0)
    counts = []
    for first in range(0, TOKENS, chunk):
        machine.written(0, first, min(chunk, TOKENS - first))
        while machine.kv_due:
            counts.append(machine.next_frame().header.token_count)
            machine._bytes_credited = machine.bytes_sent
        assert machine.next_frame() is None
    assert counts == expected


def joined(limits, announced):
    """(layer, layers, first token, token count) of the frames after each announcement of (layer, first, count)."""
    machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, limits, 0)
    frames = []
    for layer, first, count in announced:
        machine.written(layer, first, count)
        frames.append([])
        while True:
            due, frame = machine.kv_due, machine.next_frame()
            assert due == (frame is not None), "writers sleep while it says no"
            if frame is None:
                break
            header = frame.header
            frames[-1].append((header.layer, header.layers, header.first_token, header.token_count))
            assert header.payload_bytes == header.layers * header.token_count * LAYOUT.token_bytes
            machine._bytes_credited = machine.bytes_sent
    return frames


@pytest.mark.parametrize(
    ("join_bytes", "max_bytes", "expected"),
    [
        (0, 4096, [[(0, 1, 0, 16)], [(1, 1, 0, 16)], [(2, 1, 0, 16)]]),  # 1,024 bytes a layer
        (1024, 4096, [[(0, 1, 0, 16)], [(1, 1, 0, 16)], [(2, 1, 0, 16)]]),
        (2048, 4096, [[], [(0, 2, 0, 16)], [(2, 1, 0, 16)]]),  # the last layer waits for none
        (4096, 4096, [[], [], [(0, 3, 0, 16)]]),
        (
            2048,
            8192,
            [[], [(0, 2, 0, 16)], [(2, 1, 0, 16)]],
        ),  # not more than asked for: the first would wait for the last
        (2048, 2048, [[], [(0, 2, 0, 16)], [(2, 1, 0, 16)]]),
        (1024, 1024, [[(0, 1, 0, 16)], [(1, 1, 0, 16)], [(2, 1, 0, 16)]]),
    ],
)
def test_layers_join_in_one_frame(join_bytes, max_bytes, expected):
    limits = TransferLimits(256, max_bytes, 16384, join_bytes=join_bytes)
    assert joined(limits, [(0, 0, 16), (1, 0, 16), (2, 0, 16)]) == expected


def test_no_kv_is_due_beyond_the_window_and_after_the_end():
    machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, TransferLimits(512, 1024, 2048), 0)
    assert not machine.kv_due
    machine.written(0, 0, TOKENS)
    for _ in range(2):
        assert machine.kv_due
        machine.next_frame()
    assert not machine.kv_due
    credit = encode_payload(Credit(machine.bytes_sent))
    machine.receive(Header(Kind.CREDIT, 1, 1, 1, payload_bytes=len(credit)), credit, 0)
    assert machine.kv_due
    machine.abort("test")
    assert not machine.kv_due


def test_layers_that_are_not_alike_do_not_join():
    """Cached positions of one layer left before, as after a preemption: each layer goes from where it stands."""
    limits = TransferLimits(256, 8192, 16384, join_bytes=4096)
    machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, limits, 0)
    for layer in range(2):
        machine.written(layer, 0, 16)
    assert machine.next_frame() is None
    machine.written(2, 0, 16)
    assert machine.next_frame().header.layers == 3
    machine.written(0, 16, 16)
    machine.forget_unsent()
    for layer in range(3):
        machine.written(layer, 0, TOKENS)
    frame = machine.next_frame().header
    assert (frame.layer, frame.layers, frame.first_token, frame.token_count) == (0, 2, 16, 24)


def test_once_all_is_computed_a_frame_takes_what_it_can_carry():
    limits = TransferLimits(256, 8192, 16384, join_bytes=1024)
    for most, expected in ((None, [(0, 3)]), (5120, [(0, 2), (2, 1)]), (1024, [(0, 1), (1, 1), (2, 1)])):
        machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, limits, 0)
        machine.link_opened(0, most)
        machine.next_frame()  # the probe
        for layer in range(3):
            machine.written(layer, 0, TOKENS)
        machine.hand_off(HANDOFF, 0)
        frames = [machine.next_frame().header for _ in expected]
        assert [(frame.layer, frame.layers) for frame in frames] == expected, most
        assert all(frame.payload_bytes <= (most or 8192) for frame in frames)


def test_a_hole_in_what_p_announces_ends_the_transfer():
    machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, LIMITS, 0)
    machine.written(1, 4, 4)
    assert machine.state is sender.SenderState.FAILED
    assert "0..3 were never announced" in machine.reason


def test_a_handoff_that_could_never_leave_ends_the_transfer():
    machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, LIMITS, 0)
    machine.written(0, 0, TOKENS)
    machine.written(1, 0, 5)
    machine.hand_off(HANDOFF, 0)
    assert machine.reason == "handoff, but layer 1 was announced to 5 only"


@pytest.mark.parametrize("over", [False, True])
def test_frames_that_do_not_belong(over):
    machine = sender.Sender(SendOrder(1, 2, "d", 1, (), TOKENS, TOKENS), 1, LAYOUT, LIMITS, 0)
    if over:
        machine.abort("test")
    machine.receive(Header(Kind.COMPLETE, 1, epoch=1, attempt=2), b"", 0)
    assert machine.state is sender.SenderState.FAILED
    assert machine.reason == ("test" if over else "complete before the handoff")

    machine = receiver.Receiver(ReceiveOrder(1, 2, "p", 1, 0, TOKENS, TARGET_TABLE), LAYOUT, LIMITS, 0)
    size = LAYOUT.token_bytes
    good = Header(Kind.KV, 1, 1, 2, 0, 0, LAYOUT.num_kv_heads, 0, 1, 0, size)
    if over:
        machine.abort("test")
    assert machine.admit(good, 0) is not over
    for wrong in (
        {"layer": LAYOUT.num_layers},
        {"layer": LAYOUT.num_layers - 1, "layers": 2, "payload_bytes": 2 * size},
        {"layers": 1 << 16, "payload_bytes": size << 16},
        {"layers": 2},
        {"first_head": 1},
        {"head_count": 1},  # with the bytes of two
        {"head_count": 0, "payload_bytes": 0},
        {"first_head": 2, "head_count": 0, "payload_bytes": 0},
        {"head_count": LAYOUT.num_kv_heads + 1, "payload_bytes": size // 2 * 3},
        {"first_token": TOKENS},
        {"token_count": 0},
        {"token_count": TOKENS + 1},
        {"payload_bytes": size - 1},
    ):
        machine = receiver.Receiver(ReceiveOrder(1, 2, "p", 1, 0, TOKENS, TARGET_TABLE), LAYOUT, LIMITS, 0)
        assert not machine.admit(msgspec.structs.replace(good, **wrong), 0)
        assert machine.reason.startswith("malformed KV frame")


@pytest.mark.parametrize(("credit_bytes", "credits"), [(0, [512, 1024]), (256, [256, 512, 768, 1024])])
def test_credit_comes_for_every_so_many_bytes(credit_bytes, credits):
    limits = TransferLimits(64, 256, 1024, credit_bytes=credit_bytes)
    machine = receiver.Receiver(ReceiveOrder(1, 1, "p", 1, 0, TOKENS, TARGET_TABLE), LAYOUT, limits, 0)
    size = 2 * LAYOUT.token_bytes
    for first in range(0, 16, 2):
        header = Header(Kind.KV, 1, 1, 1, 0, 0, LAYOUT.num_kv_heads, first, 2, 0, size)
        assert machine.admit(header, 0)
        machine.written(header, 0)
    assert [decode_payload(reply.payload, Credit).bytes_copied for reply in machine.take_replies()] == credits


def test_credit_for_more_than_half_a_window_could_stall():
    with pytest.raises(ValueError, match="credit for every"):
        TransferLimits(1, 4, 16, credit_bytes=9)


@pytest.mark.parametrize("limits", [(0, 1, 8), (2, 1, 8), (1, 4, 5), (1, 1 << 29, 1 << 31)])
def test_limits_that_could_stall_are_refused(limits):
    with pytest.raises(ValueError, match="bytes"):
        TransferLimits(*limits)
