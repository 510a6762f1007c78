"""Transports with threads and real wires: damage, strangers, other addresses, late writes, silence."""

import contextlib
import gc
import os
import socket
import threading
import time

import numpy as np
import pytest

from relay.errors import PortInUseError
from relay.transfer.channel import ChannelClosed, send_frame
from relay.transfer.checksum import crc32c
from relay.transfer.contract import (
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveOrder,
    SendAcknowledged,
    SendFailed,
    TransferLimits,
)
from relay.transfer.frame import (
    HEADER_BYTES,
    MAX_KV_BYTES,
    VERSION,
    Abort,
    Handoff,
    Header,
    Kind,
    Probe,
    decode_payload,
    encode_payload,
    seal,
    seal_over,
)
from relay.transfer.handshake import welcome
from relay.transfer.inbound import Reception
from relay.transfer.transport import WiredTransport
from relay.transfer.wire import ShmWire, TcpWire, open_wires
from tests.transfer.nodes import (
    EVERY_WIRE,
    SOURCE_TABLE,
    TARGET_TABLE,
    TOKENS,
    WAIT_S,
    WIRES,
    Pair,
    announce,
    answer,
    eventually,
    kv_header,
    raw_peer,
    receive_order,
    send_order,
    send_raw,
)
from tests.transfer.stores import LAYOUT, ArrayStore, identity

PAYLOAD = bytes([255]) * (4 * LAYOUT.token_bytes)


@pytest.fixture(params=[name for name in EVERY_WIRE if name != "nixl"])
def scheme(request):
    return request.param


@pytest.fixture
def pair(scheme):
    pair = Pair(scheme)
    yield pair
    pair.close()


def test_one_connection_serves_all_transfers_of_a_pair(pair):
    for transfer in (7, 8, 9):
        pair.start(transfer=transfer)
        announce(pair.source, transfer=transfer)
        pair.source.transport.send_handoff(transfer, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
        assert pair.source.event() == SendAcknowledged(transfer)
    assert len(pair.source.transport._links) == 1


def test_a_channel_closed_by_another_thread_says_so(pair):
    stream = pair.target.wire.dial(pair.target.wire.address)
    stream.close()
    for use in (
        lambda: stream.set_timeout(None),
        lambda: send_raw(stream, b"x", b""),
        stream.receive_header,
    ):
        with pytest.raises(ChannelClosed):
            use()


def dead_address(scheme):
    wire = WIRES[scheme]()
    wire.close()
    return wire.address


def test_nobody_there(pair, scheme):
    dead = dead_address(scheme)
    name = pair.source.wire.scheme
    pair.source.transport.open_send(send_order(pair.target, addresses=[dead, f"{name}://bad", "carrier-pigeon://x"]))
    event = pair.source.event()
    assert isinstance(event, SendFailed)
    assert dead.rpartition("/")[2] in event.reason
    assert f"{name}://bad" in event.reason
    assert f"carrier-pigeon://x: not reachable from here over {name}" in event.reason


def test_first_address_that_answers_is_used(pair, scheme):
    addresses = [dead_address(scheme), *pair.target.transport.addresses]
    pair.target.transport.open_receive(receive_order())
    pair.source.transport.open_send(send_order(pair.target, addresses=addresses))
    announce(pair.source)
    pair.source.transport.send_handoff(7, Handoff(token_id=1))
    assert isinstance(pair.target.event(), ReceiveCompleted)


def test_frames_of_others_and_of_the_past_change_nothing(pair):
    target = pair.target
    target.transport.open_receive(receive_order(attempt=2))
    channel = raw_peer(target)
    for header in (kv_header(attempt=1), kv_header(attempt=2, epoch=0), kv_header(attempt=3), kv_header(transfer=99)):
        send_frame(channel, header, PAYLOAD, crc32c)
    header, payload = answer(channel)
    assert (header.kind, header.transfer) == (Kind.ABORT, 99)
    assert decode_payload(payload, Abort).reason == "unknown transfer"
    assert not target.got()
    send_frame(channel, kv_header(attempt=2), PAYLOAD, crc32c)
    eventually(target.got)
    channel.close()
    assert isinstance(target.event(), ReceiveFailed)


def test_a_foreign_worker_cannot_write_to_my_transfer(pair):
    pair.target.transport.open_receive(receive_order())
    channel = raw_peer(pair.target, name="q")
    send_frame(channel, kv_header(), PAYLOAD, crc32c)
    assert answer(channel)[0].kind is Kind.ABORT
    assert not pair.target.got()
    assert pair.target.quiet()
    channel.close()


def test_partial_reads():
    """A frame that trickles in byte by byte is the same frame."""
    pair = Pair("tcp")
    target = pair.target
    target.transport.open_receive(ReceiveOrder(7, 1, "p", 1, TOKENS - 1, TOKENS, TARGET_TABLE))
    channel = raw_peer(target)
    payload = np.arange(LAYOUT.token_bytes // 4, dtype=np.float32).tobytes()
    for layer in range(LAYOUT.num_layers):
        for byte in seal(kv_header(TOKENS - 1, 1, layer=layer), payload, crc32c) + payload:
            channel.socket.sendall(bytes([byte]))
    handoff = encode_payload(Handoff(token_id=5))
    header = Header(Kind.HANDOFF, 7, 1, 1, first_token=TOKENS - 1, token_count=1, payload_bytes=len(handoff))
    send_frame(channel, header, handoff, crc32c)
    assert target.event() == ReceiveCompleted(7, Handoff(token_id=5))
    assert answer(channel)[0].kind is Kind.COMPLETE
    assert (target.store.tokens(TARGET_TABLE, TOKENS)[:, -1].reshape(LAYOUT.num_layers, -1) == np.arange(16)).all()
    channel.close()
    pair.close()


def damaged(pair, head, payload, *, then_close=False):
    """D's verdict on a frame that follows a good one."""
    pair.target.transport.open_receive(receive_order())
    channel = raw_peer(pair.target)
    probe = encode_payload(Probe(0))
    send_frame(channel, Header(Kind.PROBE, 7, 1, 1, payload_bytes=len(probe)), probe, crc32c)
    assert answer(channel)[0].kind is Kind.CREDIT
    send_raw(channel, head, payload)
    if then_close:
        channel.close()
    event = pair.target.event()
    channel.close()
    assert isinstance(event, ReceiveFailed)
    assert not pair.target.got()
    return event.reason


@pytest.mark.parametrize("position", range(0, HEADER_BYTES + 64, 3))
def test_a_flipped_bit_anywhere_ends_the_connection_and_its_transfers(pair, position):
    payload = bytes(range(64))
    raw = bytearray(seal(kv_header(count=1), payload, crc32c) + payload)
    raw[position] ^= 1 << position % 8
    reason = damaged(pair, raw[:HEADER_BYTES], raw[HEADER_BYTES:])
    assert "magic" in reason or "version" in reason or "checksum" in reason


def test_too_large_a_payload_is_refused_by_its_header(pair):
    head = bytearray(seal(kv_header(), PAYLOAD, crc32c))
    head[44:48] = (MAX_KV_BYTES + 1).to_bytes(4, "little")
    head[-4:] = crc32c(head[:-4]).to_bytes(4, "little")
    verdict = damaged(pair, head, PAYLOAD)
    assert refused_by_own_agent(pair, verdict) or "limit" in verdict


def test_noise(pair):
    verdict = damaged(pair, b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES), b"x" * 100)
    assert refused_by_own_agent(pair, verdict) or "magic" in verdict


def refused_by_own_agent(pair, verdict):
    """P's agent process sends nothing that could not lie in a ring: it ends, and D sees no more than that."""
    return pair.source.wire.scheme == "nixl" and "closed the connection" in verdict


def test_truncation(pair, scheme):
    """The end comes before the payload does. On a ring the missing part holds what lay there before."""
    head = seal(kv_header(), PAYLOAD, crc32c)
    reason = damaged(pair, head, PAYLOAD[:-1], then_close=scheme == "tcp")
    assert ("in the middle" if scheme == "tcp" else "checksum") in reason


def test_damage_with_a_fused_copy_leaves_no_transfer_behind(pair):
    """Such a store has written the bytes when it sees that they are wrong: the transfer they belong to must not live on."""
    store = pair.target.store

    def write_kv_crc(layer, block_table, first, count, data):
        store.write_kv(layer, block_table, first, count, data)
        return crc32c(data)

    pair.target.transport._store._fused = type(
        "Fused", (), {"read_kv_crc": None, "write_kv_crc": staticmethod(write_kv_crc)}
    )()
    pair.target.transport.open_receive(receive_order())
    channel = raw_peer(pair.target)
    send_raw(channel, seal_over(kv_header(), 1, crc32c), PAYLOAD)
    event = pair.target.event()
    assert isinstance(event, ReceiveFailed)
    assert "damaged" in event.reason
    assert pair.target.transport._table.get(7) is None
    channel.close()


def test_a_stranger_is_dropped_and_costs_nobody_else(pair):
    stream = pair.target.wire.dial(pair.target.wire.address)
    stream.set_timeout(WAIT_S)
    stream.socket.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    with contextlib.suppress(ConnectionResetError):
        assert stream.socket.recv(100) == b""
    stream.close()
    pair.start()
    announce(pair.source)
    pair.source.transport.send_handoff(7, Handoff(token_id=1))
    assert isinstance(pair.target.event(), ReceiveCompleted)


def test_a_hello_of_another_version_is_answered_with_both(pair):
    """Whatever that version's hello looks like: the version is where it ever was, and our answer begins with ours."""
    stream = pair.target.wire.dial(pair.target.wire.address)
    stream.set_timeout(WAIT_S)
    head = bytearray(seal(Header(Kind.HELLO, payload_bytes=1), b"x", crc32c))
    head[4] = VERSION - 1
    stream.socket.sendall(head + b"x")
    header, payload = answer(stream)
    assert header.kind is Kind.ABORT
    reason = decode_payload(payload, Abort).reason
    assert f"version {VERSION - 1}" in reason
    assert f"speaks {VERSION}" in reason
    stream.close()


def test_a_hello_byte_by_byte_is_given_up_as_a_whole(pair, monkeypatch):
    monkeypatch.setattr("relay.transfer.transport.HANDSHAKE_TIMEOUT_S", 0.3)
    stream = pair.target.wire.dial(pair.target.wire.address)
    eventually(lambda: pair.target.transport._accepted)
    sent = 0
    with contextlib.suppress(OSError):
        for byte in seal(Header(Kind.HELLO), b"", crc32c)[:HEADER_BYTES]:
            stream.socket.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert sent < HEADER_BYTES
    eventually(lambda: not pair.target.transport._accepted)
    stream.close()


def hang(wire, until):
    """A target that accepts, says hello and then answers nothing."""
    channels = []
    for _ in range(wire.connections):
        stream = wire.accept()
        welcome(stream, identity("d"), crc32c)
        channels.append(wire.upgrade(stream, dialled=False))
    until.wait(WAIT_S)
    for channel in channels:
        channel.close()


def test_a_silent_target_expires(scheme):
    quick = TransferLimits(512, 1024, 4096, probe_ns=100_000_000, lease_ns=400_000_000, open_lease_ns=400_000_000)
    pair = Pair(scheme, limits=quick)
    wire, until = WIRES[scheme](), threading.Event()
    thread = threading.Thread(target=hang, args=(wire, until), daemon=True)
    thread.start()
    try:
        pair.source.transport.open_send(send_order(pair.target, addresses=[wire.address]))
        while pair.source.events.empty():
            pair.source.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
        assert "peer silent" in pair.source.event().reason
    finally:
        until.set()
        thread.join(WAIT_S)
        wire.close()
        pair.close()


def test_a_stuck_bulk_connection_ends_the_transfer_while_the_other_one_answers():
    """Credits come, the control connection lives, and no byte of KV arrives: the byte watchdog sees that and silence does not."""
    quick = TransferLimits(512, 1024, 4096, probe_ns=50_000_000, lease_ns=20_000_000_000, stall_ns=400_000_000)
    pair = Pair("tcp", limits=quick)
    stuck = threading.Event()
    write_kv = pair.target.store.write_kv
    try:
        pair.start()
        for node in (pair.source, pair.target):
            node.transport.tick(time.monotonic_ns())
        pair.target.store.write_kv = lambda *arguments: (stuck.wait(WAIT_S), write_kv(*arguments))
        announce(pair.source)
        while pair.source.events.empty():
            pair.source.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
        assert "no byte arrived" in pair.source.event().reason
    finally:
        stuck.set()
        pair.close()


def test_connections_of_a_pair_do_not_mix_kv_and_control(pair, scheme):
    kinds = {}
    heard_on = Reception.heard_on

    def spy(self, link, header):
        kinds.setdefault(link, set()).add(header.kind)
        heard_on(self, link, header)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reception, "heard_on", spy)
        pair.start()
        announce(pair.source)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
    assert len(pair.source.transport._links[("d", 1)]._channels) == pair.source.wire.connections
    if scheme != "shm":
        assert {Kind.KV} in kinds.values()
        assert all(Kind.KV not in seen or seen == {Kind.KV} for seen in kinds.values())
        assert len(kinds) > 1
    else:
        assert len(kinds) == 1


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_end_of_one_connection_is_the_end_of_all(index):
    pair = Pair("tcp")
    try:
        pair.start()
        announce(pair.source)
        eventually(pair.target.got)
        (link,) = pair.source.transport._links.values()
        link._channels[index].close()
        assert isinstance(pair.source.event(), SendFailed)
        assert isinstance(pair.target.event(), ReceiveFailed)
        pair.start(transfer=8)
        announce(pair.source, transfer=8)
        pair.source.transport.send_handoff(8, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
    finally:
        pair.close()


def test_a_transfer_that_ends_waits_for_the_copy_that_runs(pair):
    """Nobody may get D's blocks while a frame is being written to them."""
    target = pair.target
    writing, go_on = threading.Event(), threading.Event()
    write_kv = target.store.write_kv

    def slow_write(*arguments):
        writing.set()
        go_on.wait(WAIT_S)
        write_kv(*arguments)

    target.store.write_kv = slow_write
    pair.start()
    pair.source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    assert writing.wait(WAIT_S)
    done = threading.Event()
    threading.Thread(target=lambda: (target.transport.abort(7, "cancelled"), done.set()), daemon=True).start()
    assert not done.wait(0.1)
    go_on.set()
    assert done.wait(WAIT_S)
    target.store.blocks[:] = -1.0
    time.sleep(0.05)
    assert (target.store.blocks == -1.0).all()


def test_a_waiting_transfer_lives_by_probes(scheme):
    """P's prompt waits in a queue for longer than the lease: probes keep both ends."""
    quick = TransferLimits(512, 1024, 4096, probe_ns=50_000_000, lease_ns=1_500_000_000, open_lease_ns=1_500_000_000)
    pair = Pair(scheme, limits=quick)
    try:
        pair.start()
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pair.source.transport.tick(time.monotonic_ns())
            pair.target.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
        assert pair.source.quiet()
        assert pair.target.quiet()
        announce(pair.source)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
    finally:
        pair.close()


def test_forget_unsent_waits_for_the_copy_that_runs(pair):
    """Preemption on P: after it returns no block is read until ranges are announced anew."""
    source, target = pair.source, pair.target
    reading, go_on = threading.Event(), threading.Event()
    read_kv = source.store.read_kv

    def slow_read(*arguments):
        reading.set()
        go_on.wait(WAIT_S)
        read_kv(*arguments)

    source.store.read_kv = slow_read
    pair.start()
    source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    assert reading.wait(WAIT_S)
    done = threading.Event()
    threading.Thread(target=lambda: (source.transport.forget_unsent(7), done.set()), daemon=True).start()
    assert not done.wait(0.1)
    go_on.set()
    assert done.wait(WAIT_S)
    reading.clear()
    time.sleep(0.05)
    assert not reading.is_set()
    announce(source)
    source.transport.send_handoff(7, Handoff(token_id=1))
    assert isinstance(target.event(), ReceiveCompleted)
    sent, got = pair.whole()
    assert np.array_equal(sent, got)


def test_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            TcpWire(port=port)


@pytest.mark.parametrize(
    ("source", "target", "same_host", "expected"),
    [
        ("auto", "auto", True, "shm"),
        ("auto", "auto", False, "tcp"),
        ("tcp", "auto", True, "tcp"),
        ("auto", "tcp", True, "tcp"),
        ("shm", "auto", True, "shm"),
        ("shm", "auto", False, None),
        ("shm", "tcp", True, None),
    ],
)
def test_the_transport_of_a_pair(source, target, same_host, expected):
    """Shared memory where both can, else TCP; what was asked for by name is never replaced in silence."""
    events, stores = [], [ArrayStore(seed=1), ArrayStore()]
    received = threading.Semaphore(0)

    def emit(event):
        events.append(event)
        received.release()

    p = WiredTransport(identity("p"), stores[0], emit, open_wires(source, "host-a"))
    d = WiredTransport(identity("d"), stores[1], emit, open_wires(target, "host-a" if same_host else "host-b"))
    try:
        d.open_receive(receive_order())
        p.open_send(send_order(None, addresses=d.addresses))
        for layer in range(LAYOUT.num_layers):
            p.layer_written(7, layer, 0, TOKENS, SOURCE_TABLE)
        p.send_handoff(7, Handoff(token_id=1))
        assert received.acquire(timeout=WAIT_S)
        if expected is None:
            assert isinstance(events[0], SendFailed)
            assert "not reachable from here over shm" in events[0].reason
        else:
            assert received.acquire(timeout=WAIT_S)
            assert {type(event) for event in events} == {ReceiveCompleted, SendAcknowledged}
            assert [link.scheme for link in p._links.values()] == [expected]
    finally:
        p.close()
        d.close()


def open_descriptors():
    gc.collect()
    return sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name))


def _is_open(name):
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_nothing_is_left_open(scheme):
    """Threads, descriptors and mapped rings of a pair end with it."""
    before = len(open_descriptors())
    for _ in range(3):
        pair = Pair(scheme)
        pair.start()
        announce(pair.source)
        pair.source.transport.send_handoff(7, Handoff(token_id=1))
        assert isinstance(pair.target.event(), ReceiveCompleted)
        pair.close()
        del pair
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("kv-")])
    eventually(lambda: len(open_descriptors()) <= before)
    with open("/proc/self/maps") as maps:
        assert "relay-kv" not in maps.read()


def test_an_abstract_name_says_nothing_to_another_host():
    wire = ShmWire("host-a")
    other = ShmWire("host-b")
    assert wire.reaches(wire.address)
    assert not wire.reaches(other.address)
    assert not wire.reaches("tcp://127.0.0.1:1")
    assert not any("relay-kv" in name for name in os.listdir("/dev/shm"))
    wire.close()
    other.close()
