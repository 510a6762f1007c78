"""Conformance of the TCP transport: order, partial reads, truncation, corruption, refusals, peer death, late writes."""

import contextlib
import queue
import socket
import threading
import time

import numpy as np
import pytest

from relay.errors import PortInUseError
from relay.transfer.channel import ChannelClosed, FrameReader, send_frame
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
from relay.transfer.frame import MAX_KV_BYTES, Abort, Handoff, Header, Kind, decode_payload, encode_payload, seal
from relay.transfer.handshake import greet
from relay.transfer.tcp import TcpTransport, dial
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


def start(source, target, first=0, transfer=7):
    target.transport.open_receive(receive_order(first, transfer))
    source.transport.open_send(send_order(target, first, transfer))


def raw_peer(target, name="p", **other):
    """A hand-driven P that has said hello."""
    channel = dial(tuple(target.transport.addresses))
    channel.set_timeout(20)
    greet(channel, identity(name, **other), crc32c, "d", 1)
    return channel, FrameReader(channel, crc32c, MAX_KV_BYTES)


def kv_header(first=0, count=4, transfer=7, epoch=1, attempt=1, layer=0):
    size = count * LAYOUT.token_bytes
    return Header(Kind.KV, transfer, epoch, attempt, layer, 0, LAYOUT.num_kv_heads, first, count, 0, size)


def eventually(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.005)


def test_two_transfers_share_a_link_and_a_third_comes_later(pair):
    source, target = pair
    for transfer in (7, 8):
        start(source, target, transfer=transfer)
    for transfer in (8, 7):
        announce(source, transfer=transfer)
        source.transport.send_handoff(transfer, Handoff(token_id=transfer))
    got = {event.transfer: event for event in (target.event(), target.event())}
    assert got == {t: ReceiveCompleted(t, Handoff(token_id=t)) for t in (7, 8)}
    assert {source.event() for _ in range(2)} == {SendAcknowledged(7), SendAcknowledged(8)}
    start(source, target, transfer=9)
    announce(source, transfer=9)
    source.transport.send_handoff(9, Handoff(token_id=1))
    assert isinstance(target.event(), ReceiveCompleted)
    assert len(source.transport._links) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_digest", "other"), ("numerics_id", "other"), ("layout", LAYOUT.__class__(3, 2, 8, "float32"))],
)
def test_unequal_peer_is_refused_with_both_fingerprints(field, value):
    source, target = Node("p", seed=1, **{field: value}), Node("d")
    try:
        start(source, target)
        event = source.event()
        assert isinstance(event, SendFailed)
        assert not event.handed_off
        if field != "layout":
            assert "other" in event.reason
            assert getattr(identity("d"), field) in event.reason
        else:
            assert "head_dim 4 here, 8 at p" in event.reason
        assert not target.store.blocks.any()
    finally:
        source.transport.close()
        target.transport.close()


def test_another_incarnation_of_the_target_is_refused(pair):
    source, target = pair
    source.transport.open_send(send_order(target, incarnation=2))
    event = source.event()
    assert event.reason.endswith("d incarnation 1 answered for d 2")


def test_a_channel_closed_by_another_thread_says_so(pair):
    channel = dial(tuple(pair[1].transport.addresses))
    channel.close()
    for use in (
        lambda: channel.set_timeout(None),
        lambda: channel.send(b"x", b""),
        lambda: channel.receive_into(memoryview(bytearray(1))),
    ):
        with pytest.raises(ChannelClosed):
            use()


def test_nobody_there(pair):
    source, target = pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    source.transport.open_send(send_order(target, addresses=[address, "tcp://bad"]))
    event = source.event()
    assert isinstance(event, SendFailed)
    assert address in event.reason
    assert "tcp://bad" in event.reason


def test_first_address_that_answers_is_used(pair):
    source, target = pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    target.transport.open_receive(receive_order())
    source.transport.open_send(send_order(target, addresses=[dead, *target.transport.addresses]))
    announce(source)
    source.transport.send_handoff(7, Handoff(token_id=1))
    assert isinstance(target.event(), ReceiveCompleted)


@pytest.mark.parametrize("side", ["source", "target"])
def test_abort_reaches_the_other_end_and_is_idempotent(pair, side):
    source, target = pair
    start(source, target)
    source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    eventually(lambda: target.store.blocks.any())
    first, second = (source, target) if side == "source" else (target, source)
    for _ in range(2):
        first.transport.abort(7, "cancelled")
    kind = ReceiveFailed(7, "cancelled") if side == "source" else SendFailed(7, "cancelled", False)
    assert second.event() == kind
    second.transport.abort(7, "cancelled")
    assert source.events.empty()
    assert target.events.empty()


def test_no_write_after_abort(pair):
    """While P still streams, D gives its blocks away: nothing may change them from that moment."""
    source, target = pair
    start(source, target)
    announce(source)
    eventually(lambda: target.store.blocks.any())
    target.transport.abort(7, "cancelled")
    target.store.blocks[:] = -1.0
    source.event()
    time.sleep(0.05)
    assert (target.store.blocks == -1.0).all()


def test_stale_and_unknown_frames_change_nothing(pair):
    _, target = pair
    target.transport.open_receive(receive_order(attempt=2))
    channel, reader = raw_peer(target)
    payload = bytes([255]) * (4 * LAYOUT.token_bytes)
    for header in (kv_header(attempt=1), kv_header(attempt=2, epoch=0), kv_header(attempt=3), kv_header(transfer=99)):
        send_frame(channel, header, payload, crc32c)
    header, answer = reader.read()
    assert (header.kind, header.transfer) == (Kind.ABORT, 99)
    assert decode_payload(answer, Abort).reason == "unknown transfer"
    assert not target.store.blocks.any()
    send_frame(channel, kv_header(attempt=2), payload, crc32c)
    eventually(lambda: target.store.blocks.any())
    channel.close()
    assert isinstance(target.event(), ReceiveFailed)


def test_a_foreign_worker_cannot_write_to_my_transfer(pair):
    _, target = pair
    target.transport.open_receive(receive_order())
    channel, reader = raw_peer(target, name="q")
    send_frame(channel, kv_header(), bytes([255]) * (4 * LAYOUT.token_bytes), crc32c)
    assert reader.read()[0].kind is Kind.ABORT
    assert not target.store.blocks.any()
    assert target.events.empty()
    channel.close()


def test_partial_reads(pair):
    """A frame that trickles in byte by byte is the same frame."""
    _, target = pair
    target.transport.open_receive(ReceiveOrder(7, 1, "p", 1, TOKENS - 1, TOKENS, TARGET_TABLE))
    channel, reader = raw_peer(target)
    payload = np.arange(LAYOUT.token_bytes // 4, dtype=np.float32).tobytes()
    for layer in range(LAYOUT.num_layers):
        header = kv_header(TOKENS - 1, 1, layer=layer)
        for byte in seal(header, payload, crc32c) + payload:
            channel.send(bytes([byte]), b"")
    handoff = encode_payload(Handoff(token_id=5))
    header = Header(Kind.HANDOFF, 7, 1, 1, first_token=TOKENS - 1, token_count=1, payload_bytes=len(handoff))
    send_frame(channel, header, handoff, crc32c)
    assert target.event() == ReceiveCompleted(7, Handoff(token_id=5))
    assert reader.read()[0].kind is Kind.COMPLETE
    assert (target.store.tokens(TARGET_TABLE, TOKENS)[:, -1].reshape(LAYOUT.num_layers, -1) == np.arange(16)).all()
    channel.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "oversize", "noise"])
def test_a_bad_frame_ends_the_connection_and_its_transfers(pair, damage):
    _, target = pair
    target.transport.open_receive(receive_order())
    channel, reader = raw_peer(target)
    payload = bytes([255]) * (4 * LAYOUT.token_bytes)
    probe = Header(Kind.PROBE, 7, 1, 1)
    send_frame(channel, probe, b"", crc32c)
    assert reader.read()[0].kind is Kind.CREDIT
    raw = bytearray(seal(kv_header(), payload, crc32c) + payload)
    if damage == "flip":
        raw[70] ^= 1
    elif damage == "truncate":
        del raw[-1]
    elif damage == "oversize":
        raw[44:48] = (MAX_KV_BYTES + 1).to_bytes(4, "little")
    else:
        raw = bytearray(b"GET / HTTP/1.1\r\n" * 10)
    channel.send(bytes(raw), b"")
    if damage == "truncate":
        channel.close()
    event = target.event()
    assert isinstance(event, ReceiveFailed)
    assert {"flip": "checksum", "truncate": "in the middle", "oversize": "limit", "noise": "magic"}[
        damage
    ] in event.reason
    assert not target.store.blocks.any()
    channel.close()


def test_a_stranger_is_dropped_and_costs_nobody_else(pair):
    source, target = pair
    host, port = target.transport.addresses[0].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(20)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    start(source, target)
    announce(source)
    source.transport.send_handoff(7, Handoff(token_id=1))
    assert isinstance(target.event(), ReceiveCompleted)


def test_death_of_p_fails_d_and_death_of_d_fails_p(pair):
    source, target = pair
    start(source, target)
    source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    eventually(lambda: target.store.blocks.any())
    source.transport.close()
    assert isinstance(target.event(), ReceiveFailed)
    assert source.event().reason == "engine closes"

    source, target = Node("p", seed=1), Node("d")
    start(source, target)
    source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    eventually(lambda: target.store.blocks.any())
    target.transport.close()
    event = source.event()
    assert isinstance(event, SendFailed)
    assert not event.handed_off
    source.transport.close()


def test_a_silent_peer_expires_on_both_sides():
    quick = TransferLimits(512, 1024, 4096, probe_ns=100_000_000, lease_ns=400_000_000, open_lease_ns=400_000_000)
    source, target = Node("p", seed=1, limits=quick), Node("d", limits=quick)
    try:
        target.transport.open_receive(receive_order())
        while target.events.empty():  # P never dials
            target.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
        assert "source silent" in target.event().reason
        # A target that accepts, says hello and then hangs: no answer to any probe.
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            threading.Thread(target=hang, args=(server,), daemon=True).start()
            source.transport.open_send(send_order(target, addresses=[address]))
            while source.events.empty():
                source.transport.tick(time.monotonic_ns())
                time.sleep(0.02)
        assert "peer silent" in source.event().reason
    finally:
        source.transport.close()
        target.transport.close()


def hang(server):
    from relay.transfer.handshake import welcome
    from relay.transfer.tcp import TcpChannel

    sock, _ = server.accept()
    channel = TcpChannel(sock, "p")
    welcome(channel, identity("d"), crc32c)
    reader = FrameReader(channel, crc32c, MAX_KV_BYTES)
    try:
        while True:
            reader.read()
    except ChannelClosed:
        channel.close()


def test_a_waiting_transfer_lives_by_probes():
    """P's prompt waits in a queue for longer than the lease: probes keep both ends."""
    quick = TransferLimits(512, 1024, 4096, probe_ns=50_000_000, lease_ns=2_000_000_000, open_lease_ns=2_000_000_000)
    source, target = Node("p", seed=1, limits=quick), Node("d", limits=quick)
    try:
        start(source, target)
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            source.transport.tick(time.monotonic_ns())
            target.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
        assert source.events.empty()
        assert target.events.empty()
        announce(source)
        source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(target.event(), ReceiveCompleted)
    finally:
        source.transport.close()
        target.transport.close()


def test_forget_unsent_waits_for_the_copy_that_runs(pair):
    """Preemption on P: after it returns no block is read until ranges are announced anew."""
    source, target = pair
    reading, go_on = threading.Event(), threading.Event()
    read_kv = source.store.read_kv

    def slow_read(*arguments):
        reading.set()
        go_on.wait(20)
        read_kv(*arguments)

    source.store.read_kv = slow_read
    start(source, target)
    source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    assert reading.wait(20)
    done = threading.Event()
    threading.Thread(target=lambda: (source.transport.forget_unsent(7), done.set()), daemon=True).start()
    assert not done.wait(0.1)
    go_on.set()
    assert done.wait(20)
    reading.clear()
    time.sleep(0.05)
    assert not reading.is_set()
    announce(source)
    source.transport.send_handoff(7, Handoff(token_id=1))
    assert isinstance(target.event(), ReceiveCompleted)
    sent, got = source.store.tokens(SOURCE_TABLE, TOKENS), target.store.tokens(TARGET_TABLE, TOKENS)
    assert np.array_equal(sent, got)


def test_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            TcpTransport(identity("p"), ArrayStore(), lambda event: None, port=port)
