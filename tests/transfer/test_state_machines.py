"""Sender and receiver under a hostile network: complete only with every byte, silent after the end, and always an end."""

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from relay.transfer.frame import Handoff, parse, seal
from relay.transfer.inproc import InprocTransport, Network
from tests.transfer.stores import LAYOUT, ArrayStore, identity

LIMITS = TransferLimits(min_frame_bytes=256, max_frame_bytes=512, window_bytes=1024)
TOKENS = 40
HANDOFF = Handoff(token_id=17)
SOURCE_TABLE = np.array([4, 2, 9], np.int32)
TARGET_TABLE = (1, 8, 3)


class HostileTransfer(RuleBasedStateMachine):
    """One transfer; the rules are P's progress and everything a network, a peer or a gateway may do to it."""

    @initialize(first=st.integers(0, TOKENS))
    def begin(self, first):
        self.first = first
        self.network = Network(crc32c)
        self.source_store, self.target_store = ArrayStore(seed=3), ArrayStore()
        self.events = {"p": [], "d": []}
        self.source = InprocTransport(self.network, identity("p"), self.source_store, self.events["p"].append, LIMITS)
        self.target = InprocTransport(self.network, identity("d"), self.target_store, self.events["d"].append, LIMITS)
        self.target.open_receive(ReceiveOrder(1, 2, "p", 1, first, TOKENS, TARGET_TABLE))
        self.source.open_send(SendOrder(1, 2, "d", 1, ("inproc://d",), first, TOKENS))
        self.written = [first] * LAYOUT.num_layers
        self.aborted = set()
        self.damaged = {}  # kept alive, so that an id stays one parcel's
        self.frozen = None  # the target's blocks when the target's side ended

    @rule(layer=st.integers(0, LAYOUT.num_layers - 1), count=st.integers(1, 17))
    def compute(self, layer, count):
        start = self.written[layer]
        end = min(start + count, TOKENS)
        if start < end:
            self.written[layer] = end
            self.source.layer_written(1, layer, start, end - start, SOURCE_TABLE)

    @rule()
    def preempt(self):
        """P's blocks go to somebody else and come back with the same content elsewhere."""
        self.source.forget_unsent(1)
        self.written = [self.first] * LAYOUT.num_layers

    @precondition(lambda self: all(count == TOKENS for count in self.written))
    @rule()
    def hand_off(self):
        self.source.send_handoff(1, HANDOFF)

    @precondition(lambda self: self.network.parcels)
    @rule(data=st.data(), in_order=st.booleans())
    def deliver(self, data, in_order):
        index = 0 if in_order else data.draw(st.integers(0, len(self.network.parcels) - 1))
        self.network.deliver(index)

    @precondition(lambda self: self.network.parcels)
    @rule(data=st.data())
    def lose(self, data):
        self.network.parcels.pop(data.draw(st.integers(0, len(self.network.parcels) - 1)))

    @precondition(lambda self: self.network.parcels)
    @rule(data=st.data())
    def repeat(self, data):
        self.network.parcels.append(dataclasses.replace(data.draw(st.sampled_from(self.network.parcels))))

    @precondition(lambda self: self.network.parcels)
    @rule(data=st.data(), field=st.sampled_from(["epoch", "attempt"]), value=st.sampled_from([0, 1, 2, 3]))
    def stale(self, data, field, value):
        """The same frame of another life: with other content, which must never land."""
        parcel = data.draw(st.sampled_from(self.network.parcels))
        if id(parcel) in self.damaged:
            return
        header = dataclasses.replace(parse(parcel.header), **{field: value})
        if header == parse(parcel.header):
            return
        payload = bytes(len(parcel.payload)) if header.kind == 2 else parcel.payload
        self.network.parcels.append(dataclasses.replace(parcel, header=seal(header, payload, crc32c), payload=payload))

    @precondition(lambda self: self.network.parcels)
    @rule(data=st.data(), position=st.integers(0, 500), bit=st.integers(0, 7))
    def damage(self, data, position, bit):
        parcel = data.draw(st.sampled_from(self.network.parcels))
        self.damaged[id(parcel)] = parcel
        raw = bytearray(parcel.header + parcel.payload)
        raw[position % len(raw)] ^= 1 << bit
        parcel.header, parcel.payload = bytes(raw[: len(parcel.header)]), bytes(raw[len(parcel.header) :])

    @rule()
    def finish_undisturbed(self):
        for layer in range(LAYOUT.num_layers):
            self.compute(layer, TOKENS)
        self.hand_off()
        self.network.deliver_all()

    @rule(side=st.sampled_from(["p", "d"]))
    def abort(self, side):
        (self.source if side == "p" else self.target).abort(1, "test")
        self.aborted.add(side)

    @rule(seconds=st.sampled_from([0.5, 1.1, 3.5]))
    def wait(self, seconds):
        self.network.now_ns += int(seconds * 1e9)
        self.source.tick(self.network.now_ns)
        self.target.tick(self.network.now_ns)

    @invariant()
    def complete_means_every_byte(self):
        if not hasattr(self, "events"):
            return
        completed = [e for e in self.events["d"] if isinstance(e, ReceiveCompleted)]
        if completed:
            assert completed == [ReceiveCompleted(1, HANDOFF)]
            sent = self.source_store.tokens(SOURCE_TABLE, TOKENS)[:, self.first :]
            assert np.array_equal(sent, self.target_store.tokens(TARGET_TABLE, TOKENS)[:, self.first :])
        if any(isinstance(e, SendAcknowledged) for e in self.events["p"]):
            assert completed, "P freed its blocks before D had everything"

    @invariant()
    def nothing_is_written_after_the_end(self):
        if not hasattr(self, "events"):
            return
        if self.frozen is not None:
            assert np.array_equal(self.frozen, self.target_store.blocks)
        elif self.events["d"] or "d" in self.aborted:
            self.target_store.blocks[:] += 1 if not self.events["d"] else 0  # somebody else's content now
            self.frozen = self.target_store.blocks.copy()

    @invariant()
    def at_most_one_end_a_side(self):
        if not hasattr(self, "events"):
            return
        for side, events in self.events.items():
            assert len(events) + (side in self.aborted and not events) <= 1

    @invariant()
    def window_is_kept(self):
        if hasattr(self, "source"):
            for open_sender in self.source._senders.values():
                assert open_sender.bytes_sent - open_sender._bytes_credited <= LIMITS.window_bytes

    def teardown(self):
        """With time and no more frames both ends are over: nothing is held for ever."""
        if not hasattr(self, "events"):
            return
        for _ in range(30):
            self.network.now_ns += 500_000_000
            self.network.parcels.clear()
            self.source.tick(self.network.now_ns)
            self.target.tick(self.network.now_ns)
        assert not self.source._senders
        assert not self.target._receivers
        for side, kinds in (("p", SendAcknowledged | SendFailed), ("d", ReceiveCompleted | ReceiveFailed)):
            assert all(isinstance(event, kinds) for event in self.events[side])
            assert self.events[side] or side in self.aborted


HostileTransfer.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHostileTransfer = HostileTransfer.TestCase


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
    assert parse(network.parcels[-1].header).flags == 1
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
        while (frame := machine.next_frame()) is not None:
            counts.append(frame.header.token_count)
            machine._bytes_credited = machine.bytes_sent
    assert counts == expected


def test_a_hole_in_what_p_announces_ends_the_transfer():
    machine = sender.Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, LIMITS, 0)
    machine.written(1, 4, 4)
    assert machine.state is sender.SenderState.FAILED
    assert "0..3 were never announced" in machine.reason


@pytest.mark.parametrize("limits", [(0, 1, 8), (2, 1, 8), (1, 4, 5), (1, 1 << 21, 1 << 30)])
def test_limits_that_could_stall_are_refused(limits):
    with pytest.raises(ValueError, match="bytes"):
        TransferLimits(*limits)
