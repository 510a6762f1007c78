"""Silence and standstill: the pure watchdog, and both ends of a transfer with it."""

import dataclasses

import pytest

from relay.transfer.checksum import crc32c
from relay.transfer.contract import ReceiveFailed, ReceiveOrder, SendFailed, SendOrder, TransferLimits
from relay.transfer.frame import Credit, Handoff, Header, Kind, Probe, decode_payload, encode_payload, parse
from relay.transfer.inproc import InprocTransport, Network
from relay.transfer.receiver import Receiver, ReceiverState
from relay.transfer.sender import Sender, SenderState
from relay.transfer.watchdog import QUIET, Watchdog
from tests.transfer.nodes import SOURCE_TABLE, TARGET_TABLE, TOKENS
from tests.transfer.stores import LAYOUT, ArrayStore, identity

SECOND = 1_000_000_000
LIMITS = TransferLimits(min_frame_bytes=256, max_frame_bytes=512, window_bytes=1024)


def watchdog():
    return Watchdog(probe_ns=SECOND, stall_ns=3 * SECOND, now_ns=0)


def test_nothing_is_due_before_a_second():
    assert watchdog().check(SECOND - 1, 10, 3 * SECOND, "peer") is QUIET


def test_silence_is_asked_about_and_then_the_end():
    dog = watchdog()
    assert dog.check(SECOND, 0, 3 * SECOND, "peer").probe
    assert not dog.check(SECOND + SECOND // 4, 0, 3 * SECOND, "peer").probe  # not at every tick
    assert dog.check(2 * SECOND, 0, 3 * SECOND, "peer").probe
    assert dog.check(3 * SECOND, 0, 3 * SECOND, "peer").reason == "peer silent for 3.0 s"


def test_a_timer_that_slept_asks_before_it_gives_up():
    dog = watchdog()
    assert dog.check(9 * SECOND, 0, 3 * SECOND, "peer").probe, "it was we who looked late"
    assert dog.check(9 * SECOND + SECOND // 4, 0, 3 * SECOND, "peer") is QUIET
    assert dog.check(9 * SECOND + SECOND // 2, 0, 3 * SECOND, "peer").reason == "peer silent for 9.5 s"


def test_a_peer_that_answers_and_moves_no_byte_is_no_better():
    dog = watchdog()
    dog.arrived(100, 0)
    for quarter in range(1, 12):
        now_ns = quarter * SECOND // 4
        dog.heard(now_ns)
        assert not dog.check(now_ns, 400, 3 * SECOND, "peer").reason
    dog.heard(3 * SECOND)
    assert dog.check(3 * SECOND, 400, 3 * SECOND, "peer").reason == "no byte arrived for 3.0 s, 300 are under way"


def test_each_byte_starts_the_clock_again():
    dog = watchdog()
    for second in range(1, 60):
        dog.heard(second * SECOND)
        dog.arrived(second, second * SECOND)
        assert not dog.check(second * SECOND + SECOND // 2, 1000, 3 * SECOND, "peer").reason
    dog.arrived(59, 100 * SECOND)  # the same again is no progress
    dog.heard(100 * SECOND)
    assert "no byte arrived for 41.0 s" in dog.check(100 * SECOND, 1000, 3 * SECOND, "peer").reason


def test_with_nothing_under_way_there_is_no_standstill():
    """A prompt may wait in P's queue; when its first bytes leave, their clock begins then."""
    dog = watchdog()
    for second in range(1, 60):
        dog.heard(second * SECOND)
        assert not dog.check(second * SECOND, 0, 3 * SECOND, "peer").reason
    dog.heard(61 * SECOND)
    assert not dog.check(61 * SECOND, 400, 3 * SECOND, "peer").reason
    dog.heard(62 * SECOND)
    assert "no byte" in dog.check(62 * SECOND, 400, 3 * SECOND, "peer").reason


def make_sender():
    sender = Sender(SendOrder(1, 1, "d", 1, (), 0, TOKENS), 1, LAYOUT, LIMITS, 0)
    sender.link_opened(0)
    return sender


def frames(sender):
    found = []
    while (frame := sender.next_frame()) is not None:
        found.append(frame)
    return found


def test_p_gives_up_on_a_d_that_credits_nothing_new():
    """The bulk connection hangs; D answers every probe over the other one."""
    sender = make_sender()
    sender.written(0, 0, TOKENS)
    sent = frames(sender)
    assert [frame.header.kind for frame in sent] == [Kind.PROBE, Kind.KV, Kind.KV]
    probes = 0
    for quarter in range(1, 13):
        now_ns = quarter * SECOND // 4
        sender.tick(now_ns)
        for frame in frames(sender):
            if frame.header.kind is Kind.PROBE:
                probes += 1
                assert decode_payload(frame.payload, Probe).bytes_sent == sender.bytes_sent
                payload = encode_payload(Credit(0))
                sender.receive(Header(Kind.CREDIT, 1, 1, 1, payload_bytes=len(payload)), payload, now_ns)
            else:
                assert frame.header.kind is Kind.ABORT
    assert probes >= 3
    assert sender.state is SenderState.FAILED
    assert "no byte arrived for 3.0 s" in sender.reason


def test_d_gives_up_on_bytes_that_p_says_it_sent():
    receiver = Receiver(ReceiveOrder(1, 1, "p", 1, 0, TOKENS, TARGET_TABLE), LAYOUT, LIMITS, 0)
    payload = encode_payload(Probe(4096))
    for quarter in range(1, 14):
        now_ns = quarter * SECOND // 4
        receiver.receive(Header(Kind.PROBE, 1, 1, 1, payload_bytes=len(payload)), payload, now_ns)
        receiver.tick(now_ns)
    assert receiver.state is ReceiverState.FAILED
    assert receiver.reason == "no byte arrived for 3.0 s, 4096 are under way"
    assert receiver.take_replies()[-1].header.kind is Kind.ABORT


def test_d_waits_for_a_p_that_computes():
    receiver = Receiver(ReceiveOrder(1, 1, "p", 1, 0, TOKENS, TARGET_TABLE), LAYOUT, LIMITS, 0)
    payload = encode_payload(Probe(0))
    for second in range(1, 120):
        receiver.receive(Header(Kind.PROBE, 1, 1, 1, payload_bytes=len(payload)), payload, second * SECOND)
        receiver.tick(second * SECOND)
    assert receiver.state is ReceiverState.RECEIVING


def test_after_the_handoff_d_knows_what_is_missing():
    receiver = Receiver(ReceiveOrder(1, 1, "p", 1, 0, TOKENS, TARGET_TABLE), LAYOUT, LIMITS, 0)
    payload = encode_payload(Handoff(token_id=1))
    header = Header(Kind.HANDOFF, 1, 1, 1, first_token=0, token_count=TOKENS, payload_bytes=len(payload))
    receiver.receive(header, payload, 0)
    probe = encode_payload(Probe(0))
    for second in range(1, 4):
        receiver.receive(Header(Kind.PROBE, 1, 1, 1, payload_bytes=len(probe)), probe, second * SECOND)
        receiver.tick(second * SECOND)
    assert "no byte arrived" in receiver.reason


@pytest.mark.parametrize("lost", [Kind.KV, Kind.CREDIT])
def test_both_ends_hear_of_a_standstill(lost):
    """Everything passes but one kind of frame: the transfer ends at both ends and nothing is called complete."""
    network, events = Network(crc32c), {"p": [], "d": []}
    limits = dataclasses.replace(LIMITS, window_bytes=4096)
    target = InprocTransport(network, identity("d"), ArrayStore(), events["d"].append, limits)
    source = InprocTransport(network, identity("p"), ArrayStore(seed=1), events["p"].append, limits)
    target.open_receive(ReceiveOrder(1, 1, "p", 1, 0, TOKENS, TARGET_TABLE))
    source.open_send(SendOrder(1, 1, "d", 1, (), 0, TOKENS))
    for layer in range(LAYOUT.num_layers):
        source.layer_written(1, layer, 0, TOKENS, SOURCE_TABLE)
    for quarter in range(1, 20):
        network.now_ns = quarter * SECOND // 4
        while network.parcels:
            if parse(network.parcels[0].header, crc32c)[0].kind is lost:
                network.parcels.pop(0)
            else:
                network.deliver()
        for transport in (source, target):
            transport.tick(network.now_ns)
    network.deliver_all()
    assert [type(event) for event in events["p"]] == [SendFailed]
    assert [type(event) for event in events["d"]] == [ReceiveFailed]
