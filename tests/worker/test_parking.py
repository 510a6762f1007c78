"""Parking on P: the first token is drawn, the KV stays, a newer attempt finds it, a lease ends it, and others have their half."""

from collections import Counter

import pytest

from relay.protocol.messages import Cancel, Drain, Drained, Load, Prefill, Refuse, Reserve, Run, SequenceFailed, Tokens
from relay.worker.core import WorkerConfig
from relay.worker.held import HeldState
from relay.worker.kv_counters import count_received, count_sent
from tests.worker.harness import FakeWorker, World, expected, work

PROMPT = list(range(7, 60))
LEASE_MS = 1000


@pytest.fixture
def world():
    return World()


@pytest.fixture
def pair(world):
    return FakeWorker(world, "p"), FakeWorker(world, "d")


def settle(*workers):
    for _ in range(60):
        for worker in workers:
            worker.think()
            if worker.steps:
                worker.compute()
        workers[0].world.network.deliver_all()


def parked(p, order=None):
    p.order(Run(order or work(PROMPT), park_ms=LEASE_MS))
    settle(p)
    return next(iter(p.core.held.by_key.values()))


def tokens_of(worker):
    return [entry for message in worker.sent(Tokens) for entry in message.entries]


def test_the_first_token_and_no_more(world, pair):
    p, _ = pair
    held = parked(p)
    (entry,) = tokens_of(p)
    assert entry.token_ids == expected(work(PROMPT))[0][:1]
    assert entry.finish is None
    assert held.state is HeldState.PARKED
    assert p.scheduler.block_table(held.key)


def test_a_newer_attempt_computes_next_to_nothing_and_sends_everything(world, pair):
    p, d = pair
    parked(p)
    computed = p.scheduler.load().counters["prefill_tokens"]
    first = expected(work(PROMPT))[0][:1]
    again = work(PROMPT, attempt=2, committed=first)
    d.order(Reserve(again, 9, "p", 1))
    settle(d)
    p.order(Prefill(again, 9, 0, d.transport.addresses, "d", 1))
    settle(p, d)
    assert p.scheduler.load().counters["prefill_tokens"] - computed <= 16
    got = [token for entry in tokens_of(d) for token in entry.token_ids]
    assert first + got == expected(work(PROMPT))[0]
    assert not p.core.held


def test_the_lease_ends_it(world, pair):
    p, _ = pair
    held = parked(p)
    used = p.scheduler.load().kv_used
    world.now_ns += (LEASE_MS - 1) * 1_000_000
    p.fire_timers()
    settle(p)
    assert p.core.held
    world.now_ns += 2 * 1_000_000
    p.fire_timers()
    settle(p)
    assert not p.core.held
    keys = p.scheduler.keys()
    assert held.key not in keys
    assert p.scheduler.load().kv_used < used


def test_cancel_and_drain_end_it(world, pair):
    p, _ = pair
    parked(p)
    p.order(Cancel(1, 0, 1))
    settle(p)
    assert not p.core.held
    parked(p, work(PROMPT, request=2))
    p.order(Drain())
    settle(p)
    assert p.sent(Drained)


def test_a_finish_with_the_first_token_parks_nothing(world, pair):
    p, _ = pair
    p.order(Run(work(PROMPT, max_tokens=1), park_ms=LEASE_MS))
    settle(p)
    assert tokens_of(p)[0].finish == "length"
    assert not p.core.held


def test_half_of_the_pool_stays_for_others(world):
    p = FakeWorker(world, "p", config=WorkerConfig(), num_blocks=16)  # 256 tokens
    for request in range(1, 4):
        p.order(Run(work([request + 9 * i for i in range(60)], request=request), park_ms=LEASE_MS))
        settle(p)
    assert [refusal.request for refusal in p.sent(Refuse)] == [3]
    assert len(p.core.held) == 2
    p.order(Run(work(list(range(100, 200)), request=9)))
    settle(p)
    assert {entry.request for entry in tokens_of(p)} == {1, 2, 9}
    world.now_ns += LEASE_MS * 2_000_000
    p.fire_timers()
    settle(p)
    assert not p.core.held


def test_transfers_are_counted(world, pair):
    p, d = pair
    order = work(PROMPT)
    d.order(Reserve(order, 9, "p", 1))
    settle(d)
    p.order(Prefill(order, 9, 0, d.transport.addresses, "d", 1))
    settle(p, d)
    world.now_ns += 1_000_000_000
    for worker in pair:
        worker.fire_timers()
        worker.think()
    sent, received = (worker.sent(Load)[-1].counters for worker in pair)
    assert sent["kv_transfers_sent"] == sent["kv_transfers_sent_inproc"] == 1
    assert received["kv_transfers_received"] == 1
    assert received["kv_tokens_received"] == len(PROMPT)
    assert sent["kv_bytes_sent"] > 0
    assert 0 <= sent["kv_late_bytes_sent"] <= sent["kv_bytes_sent"]


def test_counters_without_statistics():
    counters = Counter()
    count_sent(counters, None)
    count_received(counters, 5, None)
    assert counters == {"kv_transfers_sent": 1, "kv_transfers_received": 1, "kv_tokens_received": 5}


def test_who_finds_no_room_beside_what_is_parked_takes_its_room(world):
    """Found by `relay sim --seed 343`: D's room was held for a prompt that waited here for the room of one that waited for D's."""
    p = FakeWorker(world, "p", num_blocks=7)
    held = parked(p, work(PROMPT[:40]))
    assert held.state is HeldState.PARKED
    p.order(Run(work(list(range(100, 170)), request=2)))
    settle(p)
    assert held.key not in p.core.held.by_key
    assert [entry.request for entry in tokens_of(p)][1:], "the other one was computed"
    assert [(failed.request, failed.retry) for failed in p.sent(SequenceFailed)] == [(1, True)], "its gateway is told"


def test_half_of_the_places_stays_for_others(world):
    """Found by `relay sim --seed 389311759583`: P was full of one gateway's parked prompts, D of what waited for P."""
    p = FakeWorker(world, "p", config=WorkerConfig(max_held=3), num_blocks=64)
    for request in (1, 2):
        p.order(Run(work([request + 9 * i for i in range(20)], request=request), park_ms=LEASE_MS))
        settle(p)
    for request in (3, 4):
        p.order(Run(work([request + 9 * i for i in range(20)], request=request, max_tokens=9)))
    p.order(Run(work(PROMPT, request=5), park_ms=LEASE_MS))
    p.think()
    assert [refusal.request for refusal in p.sent(Refuse)] == [2, 5], "the other two places are for whoever computes"
    assert [held.name.request for held in p.core.held.by_key.values()] == [1, 3, 4]
