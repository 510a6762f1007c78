import queue

import numpy as np
import pytest

from relay.transfer.contract import (
    ReceiveCompleted,
    ReceiveOrder,
    SendAcknowledged,
    SendOrder,
    TransferLimits,
)
from relay.transfer.frame import Handoff
from relay.transfer.tcp import TcpTransport
from tests.transfer.stores import LAYOUT, ArrayStore, identity

TOKENS = 100
SOURCE_TABLE = np.array([3, 1, 0, 5, 2, 7, 9], np.int32)
TARGET_TABLE = (11, 4, 6, 2, 0, 1, 15)
SMALL = TransferLimits(min_frame_bytes=512, max_frame_bytes=1024, window_bytes=4096, probe_ns=200_000_000)


class Node:
    def __init__(self, name, seed=None, incarnation=1, limits=SMALL, **other):
        self.store = ArrayStore(seed=seed)
        self.events = queue.Queue()
        self.transport = TcpTransport(identity(name, incarnation, **other), self.store, self.events.put, limits=limits)

    def event(self):
        return self.events.get(timeout=20)


@pytest.fixture
def pair(request):
    source, target = Node("p", seed=1), Node("d")
    yield source, target
    source.transport.close()
    target.transport.close()


def send_order(target, first=0, transfer=7, attempt=1, incarnation=1, addresses=None):
    return SendOrder(transfer, attempt, "d", incarnation, tuple(addresses or target.transport.addresses), first, TOKENS)


def receive_order(first=0, transfer=7, attempt=1):
    return ReceiveOrder(transfer, attempt, "p", 1, first, TOKENS, TARGET_TABLE)


def announce(source, first=0, transfer=7, chunk=33):
    for start in range(first, TOKENS, chunk):
        for layer in range(LAYOUT.num_layers):
            source.transport.layer_written(transfer, layer, start, min(chunk, TOKENS - start), SOURCE_TABLE)


@pytest.mark.parametrize("first", [0, 1, 48, 99])
def test_every_byte_arrives_and_both_ends_hear(pair, first):
    source, target = pair
    target.transport.open_receive(receive_order(first))
    source.transport.open_send(send_order(target, first))
    announce(source, first)
    source.transport.send_handoff(7, Handoff(token_id=42, logprob=-0.5, top=[(42, -0.5)]))
    assert target.event() == ReceiveCompleted(7, Handoff(token_id=42, logprob=-0.5, top=[(42, -0.5)]))
    assert source.event() == SendAcknowledged(7)
    sent, got = source.store.tokens(SOURCE_TABLE, TOKENS), target.store.tokens(TARGET_TABLE, TOKENS)
    assert np.array_equal(sent[:, first:], got[:, first:])
    assert not got[:, :first].any()
