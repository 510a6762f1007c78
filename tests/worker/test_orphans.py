"""A gateway dies: what it ordered is kept, taken over by another one token for token, or freed in time."""

import pytest

from relay.protocol.messages import (
    GATEWAY_LOST_STATUS,
    Accept,
    CacheChanged,
    Cancel,
    Load,
    Orphans,
    Prefill,
    Refuse,
    Reserve,
    Run,
    Tokens,
    Work,
)
from relay.worker.core import WorkerConfig
from relay.worker.events import DrainRequested, GatewayLost
from tests.worker.harness import World, expected, params

PROMPT = [7, 3, 9, 1, 4] * 12
KEY, OTHER = b"k" * 16, b"o" * 16
HOLD_S = 10


def keyed(request, key=KEY, attempt=1, choice=0, prompt=PROMPT, committed=(), capture=False, **values) -> Work:
    wanted = params(**({"max_tokens": 24} | values))
    ids = [*prompt, *committed]
    return Work(request, choice, attempt, ids, len(prompt), wanted, capture=capture, resume_key=key)


@pytest.fixture
def world():
    return World(config=WorkerConfig(orphan_hold_ns=HOLD_S * 10**9))


@pytest.fixture
def w(world):
    """A worker with two gateways, connections 0 and 1."""
    worker = world.worker("w")
    worker.connect(1, "gateway-1", 2)
    worker.think()
    return worker


def steps(worker, count):
    for _ in range(count):
        worker.think()
        if worker.steps:
            worker.compute()
    worker.think()


def lose(worker, connection):
    worker.events.append(GatewayLost(connection, "EOF"))
    worker.think()


def check_empty(worker):
    steps(worker, 4)  # blocks come back when the steps in flight have ended
    worker.check_empty()


def listed(worker):
    """The last list of orphans that all gateways were told."""
    lists = [message for message in worker.heard.get(None, []) if isinstance(message, Orphans)]
    return lists[-1].keys if lists else None


def entries(worker, connection):
    found = [m for m in worker.heard.get(connection, []) if isinstance(m, Tokens)]
    return [entry for message in found for entry in message.entries]


def tokens_of(worker, connection, request):
    """All tokens told on a connection of one request; positions without hole or repetition."""
    tokens, first = [], None
    for entry in entries(worker, connection):
        if entry.request == request:
            first = entry.position if first is None else first
            assert entry.position == first + len(tokens)
            tokens += entry.token_ids
    return tokens


@pytest.mark.parametrize("before", [0, 1, 3, 7, 12])
@pytest.mark.parametrize("orphaned", [0, 1, 5, 40])
@pytest.mark.parametrize("values", [{}, {"logprobs": 3}])
def test_another_gateway_takes_over_with_all_tokens_from_the_start(world, w, before, orphaned, values):
    w.order(Run(keyed(1, **values)))
    steps(w, before)
    lose(w, 0)
    assert listed(w) == [(KEY, 0)]
    steps(w, orphaned)
    w.order(Run(keyed(900, **values)), 1)
    w.think()
    assert listed(w) == []
    steps(w, 60)
    want, finish, _, _ = expected(keyed(900, **values))
    told = entries(w, 1)
    assert tokens_of(w, 1, 900) == want
    assert told[-1].finish == finish
    assert {(entry.request, entry.choice, entry.attempt) for entry in told} == {(900, 0, 1)}
    if values:
        drawn = [pair for entry in told for pair in entry.logprobs]
        assert [logprob for logprob, _ in drawn] == [-float(token) for token in want]
    assert w.core.held.by_key == {}
    assert w.scheduler.load().counters["prefill_tokens"] == len(PROMPT)  # it was computed once
    check_empty(w)


def test_an_adopted_sequence_is_its_new_owners_in_every_way(world, w):
    w.order(Run(keyed(1)))
    steps(w, 5)
    lose(w, 0)
    w.order(Run(keyed(900, attempt=3)), 1)
    w.think()
    w.order(Cancel(1, 0, 9), 1)  # the old name means nothing any more
    w.order(Cancel(900, 0, 2), 1)  # an older attempt of the new one neither
    w.think()
    assert len(w.core.held) == 1
    w.order(Cancel(900, 0, 3), 1)
    w.think()
    check_empty(w)


def test_a_cancel_counts_only_from_the_owner(world, w):
    w.order(Run(keyed(1)))
    steps(w, 2)
    w.order(Cancel(1, 0, 9), 1)
    w.think()
    assert len(w.core.held) == 1
    w.order(Cancel(1, 0, 1), 0)
    w.think()
    check_empty(w)


def test_nobody_takes_a_name_that_is_somebody_elses(world, w):
    w.order(Run(keyed(1)))
    steps(w, 2)
    w.order(Run(keyed(1, attempt=2, key=OTHER)), 1)
    steps(w, 60)
    assert tokens_of(w, 0, 1) == expected(keyed(1))[0]
    assert entries(w, 1) == []


def test_orders_of_a_connection_that_has_ended_change_nothing(world, w):
    lose(w, 0)
    w.order(Run(keyed(1)), 0)
    w.think()
    check_empty(w)


def test_without_a_key_nobody_can_ask_so_it_is_freed_at_once(world, w):
    w.order(Run(keyed(1, key=b"")))
    steps(w, 3)
    lose(w, 0)
    check_empty(w)
    assert listed(w) is None


def test_an_orphan_is_dropped_when_its_time_is_over(world, w):
    w.order(Run(keyed(1, max_tokens=100)))
    steps(w, 3)
    lose(w, 0)
    world.pass_time(HOLD_S - 1)
    steps(w, 3)
    assert listed(w) == [(KEY, 0)]
    world.pass_time(1)
    steps(w, 3)
    assert listed(w) == []
    check_empty(w)


def test_a_finished_orphan_keeps_its_tokens_and_no_block(world, w):
    w.order(Run(keyed(1)))
    steps(w, 3)
    lose(w, 0)
    steps(w, 60)
    assert w.scheduler.load().kv_used == 0
    assert len(w.core.held) == 0
    w.order(Run(keyed(900)), 1)
    w.think()
    (entry,) = entries(w, 1)
    want, finish, _, _ = expected(keyed(1))
    assert (entry.position, entry.token_ids, entry.finish) == (0, want, finish)
    check_empty(w)


def test_an_order_that_took_a_finished_orphan_and_comes_again_begins_nothing(world, w):
    """`relay sim --seed 389311759335`: the second copy was computed, for nobody, and spoke of other cached tokens."""
    w.order(Run(keyed(1)))
    steps(w, 3)
    lose(w, 0)
    steps(w, 60)
    w.order(Run(keyed(900)), 1)
    w.think()
    told = entries(w, 1)
    assert told[-1].finish is not None
    w.order(Run(keyed(900)), 1)
    w.think()
    assert w.core.held.by_key == {}
    steps(w, 60)
    assert entries(w, 1) == told
    w.order(Run(keyed(900, attempt=2)), 1)
    steps(w, 60)
    assert [entry.attempt for entry in entries(w, 1)[len(told) :]] == [2] * 24
    check_empty(w)


def test_a_refused_order_that_comes_again_takes_no_orphan(world, w):
    """The gateway went on elsewhere after the refusal: it would never cancel what took the orphan."""
    w.order(Run(keyed(1)))
    w.order(Run(keyed(2, key=OTHER, prompt=[5] * 300)), 1)  # too long
    w.think()
    assert any(isinstance(message, Refuse) for message in w.heard[1])
    w.order(Run(keyed(900)), 1)
    w.order(Cancel(900, 0, 1), 1)
    lose(w, 0)
    w.order(Run(keyed(900)), 1)
    w.think()
    assert listed(w) == [(KEY, 0)]


def test_a_finished_orphan_nobody_asked_for_is_forgotten(world, w):
    w.order(Run(keyed(1)))
    steps(w, 3)
    lose(w, 0)
    steps(w, 60)
    world.pass_time(HOLD_S)
    w.think()
    check_empty(w)


@pytest.mark.parametrize(
    "asked",
    [
        {"key": OTHER},
        {"choice": 1},
        {"seed": 6},
        {"prompt": [*PROMPT[:-1], 8]},
        {"max_tokens": 25},
        {"capture": True},
    ],
)
def test_only_the_same_work_takes_it_over(world, w, asked):
    w.order(Run(keyed(1)))
    steps(w, 5)
    lose(w, 0)
    w.order(Run(keyed(900, **asked)), 1)
    steps(w, 60)
    other = keyed(900, **asked)
    assert tokens_of(w, 1, 900) == expected(other)[0][len(other.token_ids) - other.num_prompt :]


def test_an_owner_that_has_other_tokens_does_not_take_it_over(world, w):
    w.order(Run(keyed(1)))
    steps(w, 9)
    lose(w, 0)
    w.order(Run(keyed(900, committed=[1, 2, 3])), 1)
    steps(w, 2)
    assert listed(w) == [(KEY, 0)]
    assert len(w.core.held) == 2


def test_an_owner_that_has_some_tokens_hears_only_the_rest(world, w):
    want = expected(keyed(1))[0]
    w.order(Run(keyed(1)))
    steps(w, 9)
    lose(w, 0)
    w.order(Run(keyed(900, committed=want[:3])), 1)
    steps(w, 60)
    assert entries(w, 1)[0].position == 3
    assert tokens_of(w, 1, 900) == want[3:]
    assert w.scheduler.load().counters["prefill_tokens"] == len(PROMPT)


@pytest.mark.parametrize("known", [0, 4, 6])
def test_what_was_committed_before_the_attempt_is_known_by_its_ids(world, w, known):
    want = expected(keyed(1))[0]
    w.order(Run(keyed(1, attempt=2, committed=want[:4])))
    steps(w, 5)
    lose(w, 0)
    w.order(Run(keyed(900, committed=want[:known])), 1)
    steps(w, 60)
    assert tokens_of(w, 1, 900) == want[known:]


def test_logprobs_from_before_the_attempt_are_not_known_so_it_is_computed_anew(world, w):
    want = expected(keyed(1, logprobs=2))[0]
    w.order(Run(keyed(1, attempt=2, committed=want[:4], logprobs=2)))
    steps(w, 5)
    lose(w, 0)
    w.order(Run(keyed(900, logprobs=2)), 1)
    steps(w, 80)
    assert tokens_of(w, 1, 900) == want
    assert sum(len(entry.logprobs) for entry in entries(w, 1)) == len(want)
    world.pass_time(HOLD_S)
    steps(w, 2)
    check_empty(w)


def test_two_orphans_of_one_key_leave_the_longer(world, w):
    w.order(Run(keyed(1)), 0)
    steps(w, 4)
    w.order(Run(keyed(900)), 1)
    steps(w, 4)
    lose(w, 0)
    assert len(w.core.held) == 2
    lose(w, 1)
    assert [held.key.request for held in w.core.held.by_key.values()] == [1]
    assert w.exited is None


def test_a_new_life_of_a_gateway_ends_what_the_old_one_says(world, w):
    w.order(Run(keyed(1)))
    steps(w, 3)
    w.connect(7, "gateway-0", 3)
    w.think()
    assert w.closed == [0]
    assert listed(w) == [(KEY, 0)]
    w.connect(8, "gateway-0", 2)  # and one that comes even later is refused
    w.think()
    assert w.closed == [0, 8]
    w.order(Run(keyed(5, key=OTHER)), 8)
    w.think()
    assert [held.key.request for held in w.core.held.by_key.values()] == [1]


def test_a_new_connection_is_told_everything(world, w):
    w.order(Run(keyed(1)))
    steps(w, 6)
    lose(w, 0)
    w.connect(7, "gateway-0", 3)
    w.think()
    cache, load, orphans = w.heard[7][:3]
    assert isinstance(cache, CacheChanged)
    assert cache.reset
    assert cache.added == w.scheduler.cached_units() != []
    assert isinstance(load, Load)
    assert load.running == 1
    assert orphans == Orphans([(KEY, 0)])
    sequence = cache.sequence
    world.pass_time(1)
    steps(w, 60)
    later = [m for m in w.heard[None] if isinstance(m, CacheChanged) and m.sequence > sequence]
    assert later[0].sequence == sequence + 1


def test_the_worker_lives_on_without_a_gateway_for_the_hold(world, w):
    lose(w, 0)
    lose(w, 1)
    world.pass_time(HOLD_S - 1)
    w.think()
    assert w.exited is None
    w.connect(3, "gateway-1", 4)
    world.pass_time(5)
    w.think()
    lose(w, 3)
    world.pass_time(HOLD_S - 1)
    w.think()
    assert w.exited is None
    world.pass_time(1)
    w.think()
    assert w.exited[0] == GATEWAY_LOST_STATUS


def test_connections_that_fail_do_not_prolong_the_hold(world, w):
    lose(w, 0)
    lose(w, 1)
    for number in range(10, 20):
        world.pass_time(1)
        lose(w, number)
    assert w.exited[0] == GATEWAY_LOST_STATUS


def test_a_draining_worker_keeps_no_orphan(world, w):
    w.order(Run(keyed(1)))
    steps(w, 3)
    lose(w, 0)
    w.events.append(DrainRequested())
    w.think()
    check_empty(w)
    assert w.exited == (0, "drained")


def test_a_split_goes_on_without_its_gateway_and_is_taken_over_at_the_decode_worker(world):
    p, d = world.worker("p"), world.worker("d")
    for worker in (p, d):
        worker.connect(1, "gateway-1", 2)
    d.order(Reserve(keyed(1), 5, "p", 1))
    d.think()
    (accept,) = d.sent(Accept)
    p.order(Prefill(keyed(1), 5, accept.cached_tokens, d.transport.addresses, "d", 1))
    p.think()
    for worker in (p, d):
        lose(worker, 0)
    assert listed(d) == []  # nothing to take over yet
    world.settle()
    assert listed(d) == [(KEY, 0)]
    d.order(Run(keyed(900)), 1)
    d.think()
    assert tokens_of(d, 1, 900) == expected(keyed(1))[0]
    assert d.scheduler.load().counters["prefill_tokens"] == 0
    check_empty(p)
    check_empty(d)


def test_a_reservation_nobody_fills_is_freed(world):
    d = world.worker("d")
    d.connect(1, "gateway-1", 2)
    d.order(Reserve(keyed(1), 5, "p", 1))
    d.think()
    lose(d, 0)
    for _ in range(50):
        world.pass_time(0.25)
        d.think()
    check_empty(d)


def test_orphans_are_bounded(world):
    w = world.worker("w", config=WorkerConfig(max_held=2, orphan_hold_ns=10**10))
    w.connect(1, "gateway-1", 2)
    for number in range(2):
        w.order(Run(keyed(number, key=bytes([number]) * 16, max_tokens=2)))
    steps(w, 1)
    lose(w, 0)
    steps(w, 12)
    assert len(w.core.orphans) == 2
    w.order(Run(keyed(5, key=OTHER)), 1)
    steps(w, 2)
    assert w.sent(Refuse) == []
    w.connect(2, "gateway-2", 3)
    lose(w, 1)
    assert len(w.core.orphans) == 2
    assert (OTHER, 0) in listed(w)
