"""Frames with some of the heads: complete only with every (layer, head, token), in any order, and then the same KV."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.transfer.contract import (
    Layout,
    ReceiveCompleted,
    ReceiveOrder,
    SendAcknowledged,
    SendOrder,
    TransferLimits,
    read_frame_kv,
    write_frame_kv,
)
from relay.transfer.frame import Handoff, Header, Kind, encode_payload
from relay.transfer.receiver import Receiver, ReceiverState
from relay.transfer.sender import Sender
from tests.transfer.nodes import SOURCE_TABLE as NODE_SOURCE
from tests.transfer.nodes import TARGET_TABLE as NODE_TARGET
from tests.transfer.nodes import TOKENS as NODE_TOKENS
from tests.transfer.nodes import Node, announce, receive_order, send_order
from tests.transfer.stores import LAYOUT as STORE_LAYOUT
from tests.transfer.stores import ArrayStore

LAYOUT = Layout(num_layers=3, num_kv_heads=5, head_dim=2, dtype="float32")
LIMITS = TransferLimits(256, 512, 1 << 20)
HANDOFF = Handoff(token_id=3)
BLOCK = 16


class Blocks:
    """[layer, position, K or V, head, dim], one block table for all."""

    def __init__(self, tokens, seed=None):
        shape = (LAYOUT.num_layers, tokens, 2, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        self.values = np.full(shape, np.nan, np.float32)
        if seed is not None:
            self.values[:] = np.random.default_rng(seed).standard_normal(shape, np.float32)

    def part(self, layer, first, count, heads):
        first_head, many = heads or (0, LAYOUT.num_kv_heads)
        return self.values[layer, first : first + count, :, first_head : first_head + many]

    def read_kv(self, layer, block_table, first, count, out, heads=None):
        out[:] = self.part(layer, first, count, heads).swapaxes(0, 1).tobytes()

    def write_kv(self, layer, block_table, first, count, data, heads=None):
        part = self.part(layer, first, count, heads)
        part[:] = np.frombuffer(data, np.float32).reshape(2, count, -1, LAYOUT.head_dim).swapaxes(0, 1)


def frame(layer, layers, heads, first, count):
    size = layers * count * heads[1] * LAYOUT.head_bytes
    return Header(Kind.KV, 1, 1, 2, layer, *heads, first, count, 0, size, layers)


def ranges(draw, size):
    """[0, size) in pieces."""
    cuts = draw(st.lists(st.integers(1, size - 1), max_size=3, unique=True)) if size > 1 else []
    ends = [0, *sorted(cuts), size]
    return list(itertools.pairwise(ends))


@st.composite
def deliveries(draw):
    """(first token, tokens, frames that are a partition, frames on top of it), the partition in any order."""
    first = draw(st.sampled_from([0, 0, 7, 16]))
    tokens = first + draw(st.integers(1, 40))
    whole = [
        frame(low_layer, high_layer - low_layer, (low_head, high_head - low_head), first + low, high - low)
        for low_layer, high_layer in ranges(draw, LAYOUT.num_layers)
        for low_head, high_head in ranges(draw, LAYOUT.num_kv_heads)
        for low, high in ranges(draw, tokens - first)
    ]
    more = []
    for _ in range(draw(st.integers(0, 4))):
        layer, head, at = draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(first, tokens - 1))
        heads = (head, draw(st.integers(1, LAYOUT.num_kv_heads - head)))
        layers = draw(st.integers(1, LAYOUT.num_layers - layer))
        more.append(frame(layer, layers, heads, at, draw(st.integers(1, tokens - at))))
    more += [one for one in whole if draw(st.booleans())]
    return first, tokens, draw(st.permutations(whole)), more


@given(deliveries(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_complete_exactly_when_everything_was_written(delivery, data):
    first, tokens, whole, more = delivery
    source, target = Blocks(tokens, seed=1), Blocks(tokens)
    machine = Receiver(ReceiveOrder(1, 2, "p", 1, first, tokens, (0, 1, 2, 3)), LAYOUT, LIMITS, 0)
    handoff = Header(Kind.HANDOFF, 1, 1, 2, first_token=first, token_count=tokens - first)
    # The last of the partition comes last: what is in it and in no frame before must be missing until then.
    order = [*data.draw(st.permutations([*whole[:-1], *more, handoff])), whole[-1]]
    written = np.zeros((LAYOUT.num_layers, tokens, LAYOUT.num_kv_heads), bool)
    written[:, :first] = True
    handed = False
    for header in order:
        if header.kind is Kind.HANDOFF:
            machine.receive(header, encode_payload(HANDOFF), 0)
            handed = True
        elif machine.admit(header, 0):
            raw = memoryview(bytearray(header.payload_bytes))
            read_frame_kv(source, header, None, raw, LAYOUT.heads_of(header))
            write_frame_kv(target, header, None, raw, LAYOUT.heads_of(header))
            machine.written(header, 0)
            layers, heads = slice(header.layer, header.layer + header.layers), header.first_head
            last = header.first_token + header.token_count
            written[layers, header.first_token : last, heads : heads + header.head_count] = True
        else:
            assert written.all(), "refused though something was missing"
        assert machine.covered == bool(written.all())
        assert (machine.state is ReceiverState.COMPLETE) == (machine.covered and handed)
    assert machine.state is ReceiverState.COMPLETE
    assert np.array_equal(source.values[:, first:], target.values[:, first:])
    assert np.isnan(target.values[:, :first]).all()


@pytest.mark.parametrize("left_out", range(6))
def test_one_part_of_one_layer_that_is_missing(left_out):
    """All tokens of every layer have come, of some heads: nothing is complete."""
    machine = Receiver(ReceiveOrder(1, 2, "p", 1, 0, 30, (0, 1)), LAYOUT, LIMITS, 0)
    machine.receive(Header(Kind.HANDOFF, 1, 1, 2, token_count=30), encode_payload(HANDOFF), 0)
    frames = [frame(layer, 1, heads, 0, 30) for layer in range(3) for heads in ((0, 2), (2, 3))]
    missing = frames.pop(left_out)
    for header in frames * 2:
        assert machine.admit(header, 0)
        machine.written(header, 0)
    assert machine.state is ReceiverState.RECEIVING
    short = msgspec.structs.replace(
        missing, head_count=missing.head_count - 1, payload_bytes=30 * (missing.head_count - 1) * LAYOUT.head_bytes
    )
    for header in (short, missing):
        assert machine.state is ReceiverState.RECEIVING
        assert machine.admit(header, 0)
        machine.written(header, 0)
    assert machine.state is ReceiverState.COMPLETE


@given(
    parts=st.sampled_from(
        [((0, 5),), ((0, 2), (2, 3)), ((0, 1), (1, 1), (2, 3)), tuple((head, 1) for head in range(5))]
    ),
    join=st.booleans(),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    forget=st.integers(0, 8),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_frame_has_heads_of_one_part_and_together_they_are_everything(parts, join, steps, forget):
    limits = TransferLimits(128, 1024, 1 << 20, join_bytes=512 if join else 0)
    tokens = sum(steps)
    machine = Sender(SendOrder(1, 2, "d", 1, (), 0, tokens), 1, LAYOUT, limits, 0, parts)
    counts = np.zeros((LAYOUT.num_layers, tokens, LAYOUT.num_kv_heads), int)

    def send():
        while (outgoing := machine.next_frame()) is not None:
            header = outgoing.header
            if header.kind is Kind.KV:
                assert (header.first_head, header.head_count) in parts
                assert header.payload_bytes <= limits.max_frame_bytes
                size = header.layers * header.token_count * header.head_count * LAYOUT.head_bytes
                assert header.payload_bytes == size
                layers = slice(header.layer, header.layer + header.layers)
                last = header.first_token + header.token_count
                counts[
                    layers, header.first_token : last, header.first_head : sum((header.first_head, header.head_count))
                ] += 1

    at = 0
    for number, step in enumerate(steps):
        if number == forget:
            machine.forget_unsent()
            for layer in range(LAYOUT.num_layers):
                machine.written(layer, 0, at)
        for layer in range(LAYOUT.num_layers):
            machine.written(layer, at, step)
            send()
        at += step
    machine.hand_off(HANDOFF, 0)
    send()
    assert machine.handed_off
    assert (counts == 1).all()


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize("ends", ["source", "target", "both"])
def test_ends_whose_heads_lie_apart(scheme, ends):
    """Each end cuts by its own places; the other stores what comes."""
    stores = ArrayStore(seed=1), ArrayStore()
    for store, name in zip(stores, ("source", "target"), strict=True):
        if ends in (name, "both"):
            store.kv_parts = ((0, 1), (1, 1))
    source, target = Node("p", scheme, store=stores[0]), Node("d", scheme, store=stores[1])
    try:
        target.transport.open_receive(receive_order())
        source.transport.open_send(send_order(target))
        announce(source)
        source.transport.send_handoff(7, HANDOFF)
        assert isinstance(source.event(), SendAcknowledged)
        completed = target.event()
        assert isinstance(completed, ReceiveCompleted)
        assert completed.stats.bytes == STORE_LAYOUT.num_layers * NODE_TOKENS * STORE_LAYOUT.token_bytes
        assert np.array_equal(stores[1].tokens(NODE_TARGET, NODE_TOKENS), stores[0].tokens(NODE_SOURCE, NODE_TOKENS))
    finally:
        source.transport.close()
        target.transport.close()
