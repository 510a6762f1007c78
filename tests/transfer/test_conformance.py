"""What every transport must do alike: order, coverage, refusals, aborts in every state, silence, death."""

import time

import numpy as np
import pytest

from relay.transfer.contract import ReceiveCompleted, ReceiveFailed, SendAcknowledged, SendFailed, TransferLimits
from relay.transfer.frame import Handoff
from tests.transfer.nodes import (
    EVERY_WIRE,
    SOURCE_TABLE,
    TOKENS,
    Pair,
    announce,
    eventually,
    receive_order,
    send_order,
)
from tests.transfer.stores import LAYOUT, identity

SECOND = 1_000_000_000
QUICK = TransferLimits(512, 1024, 4096, probe_ns=SECOND // 10, lease_ns=SECOND // 2, open_lease_ns=SECOND)
HANDOFF = Handoff(token_id=42, logprob=-0.5, top=[(42, -0.5)], cached_tokens=16, logit_digest=b"x" * 16)


@pytest.fixture(params=["inproc", *EVERY_WIRE])
def scheme(request):
    return request.param


@pytest.fixture
def pair(scheme):
    pair = Pair(scheme)
    yield pair
    pair.close()


@pytest.mark.parametrize("first", [0, 1, 48, 99, 100])
def test_every_byte_arrives_and_both_ends_hear(pair, first):
    """Blocks that D has are not sent; with all of them there, the handoff alone is."""
    pair.start(first)
    announce(pair.source, first)
    pair.source.transport.send_handoff(7, HANDOFF)
    assert pair.target.event() == ReceiveCompleted(7, HANDOFF)
    assert pair.source.event() == SendAcknowledged(7)
    sent, got = pair.whole(first)
    assert np.array_equal(sent, got)
    assert not pair.target.store.tokens(pair.ends()[1][1], first).any()


def test_cached_ranges_announced_late_and_twice_are_sent_once(pair):
    """As a sink does for a prompt cached on P: all layers of the cached part, then the rest; then the step again."""
    pair.start()
    for _ in range(2):
        for layer in range(LAYOUT.num_layers):
            pair.source.transport.layer_written(7, layer, 0, 96, SOURCE_TABLE)
    announce(pair.source)
    pair.source.transport.send_handoff(7, HANDOFF)
    assert isinstance(pair.target.event(), ReceiveCompleted)
    sent, got = pair.whole()
    assert np.array_equal(sent, got)


def test_many_transfers_at_once_keep_apart(pair):
    transfers = range(20, 28)
    for transfer in transfers:
        pair.start(transfer=transfer)
    for transfer in reversed(transfers):
        announce(pair.source, transfer=transfer)
        pair.source.transport.send_handoff(transfer, Handoff(token_id=transfer))
    got = sorted((pair.target.event() for _ in transfers), key=lambda event: event.transfer)
    assert got == [ReceiveCompleted(t, Handoff(token_id=t)) for t in transfers]
    assert {pair.source.event() for _ in transfers} == {SendAcknowledged(t) for t in transfers}


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_digest", "other"), ("numerics_id", "other"), ("layout", LAYOUT.__class__(3, 2, 8, "float32"))],
)
def test_unequal_peer_is_refused_with_both_fingerprints(scheme, field, value):
    pair = Pair(scheme, source={field: value})
    try:
        pair.start()
        event = pair.source.event()
        assert isinstance(event, SendFailed)
        assert not event.handed_off
        if field == "layout":
            assert "head_dim" in event.reason
            assert "4" in event.reason
            assert "8" in event.reason
        else:
            assert "other" in event.reason
            assert getattr(identity("d"), field) in event.reason
        assert not pair.target.got()
    finally:
        pair.close()


def test_a_refusal_is_one_short_line_whatever_the_peer_said(scheme, capfd):
    pair = Pair(scheme, source={"numerics_id": "x\n\x1b[31m" * 5000})
    try:
        pair.start()
        event = pair.source.event()
        assert isinstance(event, SendFailed)
        assert "numerics_id" in event.reason
        assert len(event.reason) < 500
        assert event.reason.isprintable()
        told = ""
        while scheme != "inproc" and "KV connection refused" not in told:  # D says so after P was told
            time.sleep(0.01)
            told += capfd.readouterr().err
    finally:
        pair.close()


def test_another_incarnation_of_the_target_is_refused(pair):
    pair.source.transport.open_send(send_order(pair.target, incarnation=2))
    event = pair.source.event()
    assert isinstance(event, SendFailed)
    assert "incarnation 1" in event.reason


def test_a_stale_attempt_changes_nothing(pair):
    """D waits for attempt 2; attempt 1 still streams."""
    pair.target.transport.open_receive(receive_order(attempt=2))
    pair.source.transport.open_send(send_order(pair.target, attempt=1))
    announce(pair.source)
    pair.source.transport.send_handoff(7, HANDOFF)
    pair.start(transfer=8)  # a later transfer on the same link: the frames before it were handled
    announce(pair.source, transfer=8)
    pair.source.transport.send_handoff(8, HANDOFF)
    assert pair.target.event() == ReceiveCompleted(8, HANDOFF)
    assert pair.source.event() == SendAcknowledged(8)
    assert pair.target.quiet()


def before_anything(pair):
    pass


def streaming(pair):
    pair.source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    eventually(pair.target.got)


def all_written(pair):
    announce(pair.source)
    eventually(pair.target.got)


def partly_covered_with_handoff_missing(pair):
    for layer in range(LAYOUT.num_layers - 1):
        pair.source.transport.layer_written(7, layer, 0, TOKENS, SOURCE_TABLE)
    eventually(pair.target.got)


STATES = [before_anything, streaming, all_written, partly_covered_with_handoff_missing]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("state", STATES)
def test_abort_is_legal_in_every_state_idempotent_and_reaches_both_ends(pair, state, side):
    pair.start()
    state(pair)
    first, second = (pair.source, pair.target) if side == "source" else (pair.target, pair.source)
    for _ in range(2):
        first.transport.abort(7, "cancelled")
    event = second.event()
    assert isinstance(event, ReceiveFailed if side == "source" else SendFailed)
    assert event.transfer == 7
    assert event.reason in ("cancelled", "unknown transfer")
    second.transport.abort(7, "cancelled")
    assert first.quiet()
    pair.start(transfer=8)  # and the link is as good as before
    announce(pair.source, transfer=8)
    pair.source.transport.send_handoff(8, HANDOFF)
    assert pair.target.event() == ReceiveCompleted(8, HANDOFF)


@pytest.mark.parametrize("side", ["source", "target"])
def test_abort_after_the_end_changes_nothing(pair, side):
    pair.start()
    announce(pair.source)
    pair.source.transport.send_handoff(7, HANDOFF)
    assert isinstance(pair.target.event(), ReceiveCompleted)
    assert isinstance(pair.source.event(), SendAcknowledged)
    (pair.source if side == "source" else pair.target).transport.abort(7, "late")
    assert pair.source.quiet()
    assert pair.target.quiet()


def test_no_write_after_abort(pair):
    """While P still streams, D gives its blocks away: nothing may change them from that moment."""
    pair.start()
    announce(pair.source)
    eventually(pair.target.got)
    pair.target.transport.abort(7, "cancelled")
    pair.target.store.blocks[:] = -1.0
    pair.source.event()
    pair.start(transfer=8, first=TOKENS)
    pair.source.transport.send_handoff(8, HANDOFF)
    assert pair.target.event() == ReceiveCompleted(8, HANDOFF)  # behind everything of 7
    assert (pair.target.store.blocks == -1.0).all()


def test_a_handoff_before_all_ranges_fails_at_once(pair):
    pair.start()
    pair.source.transport.layer_written(7, 0, 0, 33, SOURCE_TABLE)
    pair.source.transport.send_handoff(7, HANDOFF)
    event = pair.source.event()
    assert isinstance(event, SendFailed)
    assert "announced to 33 only" in event.reason


@pytest.mark.parametrize("who", ["source", "target"])
def test_the_end_of_an_engine_fails_the_other(pair, who):
    pair.start()
    streaming(pair)
    dead, alive = (pair.source, pair.target) if who == "source" else (pair.target, pair.source)
    dead.transport.close()
    event = alive.event()
    assert isinstance(event, ReceiveFailed if who == "source" else SendFailed)
    assert not getattr(event, "handed_off", False)


def test_a_source_that_never_comes_expires(scheme):
    pair = Pair(scheme, limits=QUICK)
    try:
        pair.target.transport.open_receive(receive_order())
        now_ns = 0 if scheme == "inproc" else time.monotonic_ns()
        pair.target.tick(now_ns + SECOND // 2)
        assert pair.target.quiet()
        pair.target.tick(now_ns + 2 * SECOND)
        event = pair.target.event()
        assert isinstance(event, ReceiveFailed)
        assert "source silent" in event.reason
    finally:
        pair.close()
