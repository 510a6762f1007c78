"""The worker core over hash backends: every path yields the tokens of a run alone, every end frees everything."""

import random
from hashlib import blake2b
from itertools import pairwise

import pytest
from msgspec import structs

from relay.ids import SequenceKey
from relay.protocol.messages import (
    GATEWAY_LOST_STATUS,
    Accept,
    CacheChanged,
    Cancel,
    Drain,
    Drained,
    Load,
    Prefill,
    Refuse,
    Reserve,
    Run,
    SequenceFailed,
    Tokens,
)
from relay.transfer.frame import Kind, parse
from relay.worker import held
from relay.worker.core import DRAIN_TIMER, WorkerConfig
from relay.worker.events import DrainRequested, GatewayLost, TimerFired
from relay.worker.table import MAX_ENDED
from tests.worker.harness import TINY, World, expected, work

PROMPT = [7, 3, 9, 1, 4] * 12  # 60 tokens
LONG = [(i * i + 3 * i) % 50 for i in range(150)]


def digest(data):
    return blake2b(data, digest_size=16).digest()


@pytest.fixture
def world():
    return World()


@pytest.fixture
def pair(world):
    return world.worker("p"), world.worker("d")


def check_exact(world, request):
    tokens, finish, _, _ = expected(request)
    committed = len(request.token_ids) - request.num_prompt
    assert world.tokens(request) == tokens[committed:]
    assert world.finish(request) == finish


@pytest.mark.parametrize("prompt", [PROMPT, LONG, [5], LONG[:16], LONG[:17], LONG[:32]])
@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"repetition_penalty": 1.3}])
def test_split_equals_a_run_alone(world, pair, prompt, values):
    request = work(prompt, **values)
    world.split(*pair, request)
    world.settle()
    check_exact(world, request)
    assert not world.failures
    for worker in pair:
        worker.check_empty()


@pytest.mark.parametrize(("of_p", "of_d"), [(16, 48), (48, 16), (32, 64)])
@pytest.mark.parametrize("prompt", [LONG, LONG[:33], [5]])
def test_block_sizes_may_differ(world, prompt, of_p, of_d):
    """The wire knows tokens and no blocks. A second request then finds on D whole blocks of D's size, and gets the rest."""
    pair = world.worker("p", block_size=of_p), world.worker("d", block_size=of_d)
    for number in (1, 2):
        request = work([*prompt, *range(number)], request=number, capture=True)
        world.split(*pair, request)
        world.settle()
        check_exact(world, request)
    assert not world.failures
    for worker in pair:
        worker.check_empty()


def test_digests_cross_the_border(world, pair):
    request = work(LONG, capture=True, max_tokens=20)
    world.split(*pair, request)
    world.settle()
    tokens, _, rows, units = expected(request)
    by_position = {}
    for entry in world.entries[1, 0, 1]:
        for offset, value in enumerate(entry.logit_digests):
            assert by_position.setdefault(entry.position + offset, value) == value
    assert [by_position[i] for i in range(len(tokens))] == [digest(row) for row in rows]
    (final,) = [entry for entry in world.entries[1, 0, 1] if entry.finish]
    assert final.kv_digests == [digest(unit) for unit in units]
    assert len(units) == (150 + 19) // 16


def test_first_token_comes_from_p_at_once_and_again_from_d(world, pair):
    p, d = pair
    request = work(PROMPT)
    world.split(p, d, request)
    while not (found := p.sent(Tokens)):
        p.think()
        if p.steps:
            p.compute()
        world.network.deliver_all()
    ((first,),) = [message.entries for message in found]
    assert (first.position, first.token_ids) == (0, expected(request)[0][:1])
    world.network.deliver_all()
    d.think()
    ((again,),) = [message.entries for message in d.sent(Tokens)]
    assert again == first


@pytest.mark.parametrize("committed", [1, 5])
def test_resume_elsewhere_from_committed_tokens(world, pair, committed):
    tokens, _, _, _ = expected(work(LONG, max_tokens=12))
    request = work(LONG, attempt=2, committed=tokens[:committed], max_tokens=12, presence_penalty=0.0)
    world.split(*pair, request)
    world.settle()
    check_exact(world, request)


def test_d_caches_what_came_and_p_sends_only_the_rest(world, pair):
    first, second = work(LONG, request=1), work([*LONG[:96], *PROMPT], request=2)
    assert world.split(*pair, first, transfer=1).cached_tokens == 0
    world.settle()
    assert world.split(*pair, second, transfer=2).cached_tokens == 96
    world.settle()
    check_exact(world, second)
    again = work(LONG[:144], request=3)
    assert world.split(*pair, again, transfer=3).cached_tokens == 144, "all 9 units: nothing to send"
    world.settle()
    check_exact(world, again)
    for worker in pair:
        worker.check_empty()


def test_p_sends_what_it_had_cached(world, pair):
    p, d = pair
    p.order(Run(work(LONG, request=1)))
    world.settle()
    before = p.backend.tokens_computed
    request = work(LONG, request=2)
    assert world.split(p, d, request).cached_tokens == 0
    world.settle()
    check_exact(world, request)
    assert p.backend.tokens_computed - before <= 150 - 144, "cached tokens are not recomputed"
    assert world.entries[2, 0, 1][0].cached_tokens == 144


def test_first_token_that_finishes_frees_d(world, pair):
    p, d = pair
    request = work(PROMPT, max_tokens=1)
    world.split(p, d, request)
    world.settle()
    check_exact(world, request)
    assert not world.failures
    assert len(world.entries[1, 0, 1]) == 1
    p.check_empty()
    d.check_empty()


def test_full_d_refuses_with_a_time_and_holds_nothing(world):
    d = world.worker("d", num_blocks=12)
    d.order(Reserve(work(LONG, request=1), 1, "p", 1))
    d.order(Reserve(work(LONG, request=2), 2, "p", 1))
    d.think()
    assert [accept.request for accept in d.sent(Accept)] == [1]
    (refusal,) = d.sent(Refuse)
    assert (refusal.request, refusal.reason) == (2, "full")
    assert refusal.retry_after_ms > 0
    d.order(Cancel(1, 0, 1))
    d.think()
    d.check_empty()


@pytest.mark.parametrize("kind", ["run", "reserve", "prefill"])
def test_what_can_never_fit_is_refused_at_once(world, kind):
    w = world.worker("w", num_blocks=4)
    request = work(LONG)
    w.order(
        {"run": Run(request), "reserve": Reserve(request, 1, "p", 1), "prefill": Prefill(request, 1, 0, [], "d", 1)}[
            kind
        ]
    )
    w.think()
    (refusal,) = w.sent(Refuse)
    assert refusal.reason == "too_long"
    w.check_empty()


@pytest.mark.parametrize("kind", ["run", "prefill"])
def test_what_fits_but_finds_the_queue_full_is_refused_for_now(world, kind):
    """Found by `relay sim --seed 1`: the refusal was "too_long", and the gateway failed the request for good."""
    w = world.worker("w", max_num_waiting=1)
    w.order(Run(work(LONG)))
    request = work(LONG, request=2)
    w.order({"run": Run(request), "prefill": Prefill(request, 1, 0, [], "d", 1)}[kind])
    while w.events:
        w._carry_out(w.core.handle(w.events.popleft(), 0))
    (refusal,) = w.sent(Refuse)
    assert (refusal.reason, refusal.request) == ("full", 2)
    assert refusal.retry_after_ms > 0
    world.settle()
    w.check_empty()


@pytest.mark.parametrize("steps", range(0, 14, 2))
@pytest.mark.parametrize("who", ["p", "d", "both"])
def test_cancel_frees_in_every_state(world, pair, steps, who):
    p, d = pair
    request = work(LONG, max_tokens=30)
    world.split(p, d, request)
    for _ in range(steps):
        for worker in pair:
            worker.think()
            if worker.steps:
                worker.compute()
        if world.network.parcels:
            world.network.deliver()
    for worker in pair:
        if who in (worker.name, "both"):
            for _ in range(2):
                worker.order(Cancel(1, 0, 1))
    world.settle()
    if who != "d":
        p.check_empty()
    if who != "p":
        d.check_empty()
    world.pass_time(20)  # the other end hears by abort, at the latest by its lease
    world.settle()
    if world.finish(request):
        check_exact(world, request)
    for worker in pair:
        worker.check_empty()


def test_cancel_of_an_older_attempt_leaves_the_newer(world):
    w = world.worker("w")
    request = work(PROMPT, attempt=3)
    w.order(Run(request))
    w.order(Cancel(1, 0, 2))
    w.order(Run(request))  # said twice
    w.order(Run(work(LONG, attempt=2)))
    world.settle()
    check_exact(world, request)
    assert (1, 0, 2) not in world.streams
    w.check_empty()


def test_newer_attempt_supersedes_the_older(world):
    w = world.worker("w")
    w.order(Run(work(LONG, attempt=1, max_tokens=50)))
    w.think()
    w.compute()
    newer = work(LONG, attempt=2)
    w.order(Run(newer))
    world.settle()
    check_exact(world, newer)
    assert world.finish(work(LONG, attempt=1)) is None
    w.check_empty()


@pytest.mark.parametrize("steps", range(0, 16, 3))
def test_death_of_p_is_reported_by_d_unless_it_has_everything(world, pair, steps):
    p, d = pair
    request = work(LONG)
    world.split(p, d, request)
    for _ in range(steps):
        for worker in pair:
            worker.think()
            world.collect(worker)
            if worker.steps:
                worker.compute()
        for _ in range(3):
            if world.network.parcels:
                world.network.deliver()
    del world.workers["p"]
    world.network.remove("p")
    world.settle()
    for _ in range(2):  # a timer that looks this late asks first
        world.pass_time(20)
        world.settle()
    if world.failures:
        assert [(f.request, f.attempt, f.retry) for f in world.failures] == [(1, 1, True)]
    else:
        check_exact(world, request)
    d.check_empty()


def test_death_of_d_is_reported_by_p(world, pair):
    p, d = pair
    world.split(p, d, work(LONG))
    p.think()
    p.compute()
    del world.workers["d"]
    world.network.remove("d")
    world.settle()
    (failure,) = world.failures
    assert failure.retry
    p.check_empty()


def test_target_of_another_incarnation_fails_at_once(world, pair):
    p, d = pair
    p.order(Prefill(work(LONG), 1, 0, d.transport.addresses, "d", 7))
    world.settle()
    (failure,) = world.failures
    assert failure.retry
    assert "incarnation" in failure.reason
    p.check_empty()


def test_handoff_lost_to_a_dead_p_after_all_was_sent_is_ds_word(world, pair):
    """P may not know whether D has it; then P says nothing and D decides."""
    p, d = pair
    request = work(PROMPT)
    world.split(p, d, request)
    while not any(sender.handed_off for sender in p.transport._senders.values()):
        p.think()
        world.collect(p)
        if p.steps:
            p.compute()
        while (
            world.network.parcels
            and parse(world.network.parcels[0].header, world.network.checksum)[0].kind is not Kind.HANDOFF
        ):
            world.network.deliver()
    p.transport.peer_lost("d")  # the link breaks, the handoff is under way
    p.think()
    world.collect(p)
    assert not world.failures
    p.check_empty()
    world.settle()
    check_exact(world, request)
    d.check_empty()


def test_a_failed_step_fails_its_request_only(world):
    w = world.worker("w")
    w.backend.poison = 49
    good, bad = work(PROMPT, request=1), work([*PROMPT, 49], request=2)
    w.order(Run(good))
    w.order(Run(bad))
    world.settle()
    check_exact(world, good)
    ((failure,),) = (world.failures,)
    assert (failure.request, failure.retry) == (2, False)
    assert "poison" in failure.reason
    w.check_empty()


def test_a_failed_step_on_p_frees_d(world, pair):
    p, d = pair
    p.backend.poison = 49
    world.split(p, d, work([*LONG, 49]))
    world.settle()
    assert {failure.retry for failure in world.failures} == {False, True}  # P: the request; D: its transfer
    p.check_empty()
    d.check_empty()


@pytest.mark.parametrize("plan_ahead", [0, 1])
def test_a_passing_fault_on_p_costs_nothing(world, plan_ahead):
    p = world.worker("p", config=WorkerConfig(plan_ahead=plan_ahead), max_num_batched_tokens=40)
    d = world.worker("d")
    requests = [work(LONG, request=1), work(LONG[3:], request=2)]  # a step of one row would blame that row
    for request in requests:
        world.split(p, d, request, transfer=request.request)
    while not (p.steps and len(p.steps[0].plan.rows) == 2):
        p.think()
        world.collect(p)
        if len(p.steps[0].plan.rows) < 2:
            p.compute()
    p.backend.raises = 1
    p.compute()
    world.settle()
    assert not world.failures
    for request in requests:
        check_exact(world, request)
    p.check_empty()
    d.check_empty()


def test_preempted_prompt_is_never_read_from_blocks_it_lost(world):
    """P's prompt loses its blocks while most of it is computed and not yet sent (D takes nothing off the wire)."""
    p = world.worker("p", num_blocks=12, growth_tokens=0, max_num_batched_tokens=6)
    d = world.worker("d")
    older = work(PROMPT[:30], request=1, max_tokens=100)
    p.order(Run(older))
    while not world.entries:
        p.think()
        world.collect(p)
        p.compute()
    younger = work(LONG[:140], request=2, attempt=1)
    world.split(p, d, younger)
    while not p.scheduler.load().counters["preemptions"]:
        p.think()
        world.collect(p)
        p.compute()
    (sender,) = p.transport._senders.values()
    assert sender.bytes_sent > TINY.window_bytes - TINY.max_frame_bytes  # stalled
    assert world.finish(older) is None
    while not world.finish(older):  # it grows into the blocks that the prompt lost
        p.compute()
        p.think()
        world.collect(p)
    world.network.deliver_all()  # credit comes back: now the sender would read
    world.settle()
    assert not world.failures
    check_exact(world, older)
    check_exact(world, younger)
    p.check_empty()
    d.check_empty()


@pytest.mark.parametrize("seed", range(12))
def test_many_requests_on_small_pools_with_preemption(seed):
    """Both workers take every kind of order, blocks are short: exact all the same, and empty at the end."""
    rng = random.Random(seed)
    world = World(
        num_blocks=rng.choice([18, 24, 40]),
        max_num_batched_tokens=rng.choice([8, 24, 64]),
        growth_tokens=rng.choice([0, 16, 128]),
    )
    workers = [world.worker("a"), world.worker("b")]
    waiting = []
    for number in range(8):
        prompt = [*LONG[: rng.choice([0, 16, 40, 64])], *[rng.randrange(50) for _ in range(rng.randint(1, 60))]]
        waiting.append(work(prompt, request=number, max_tokens=rng.randint(1, 30), seed=rng.randrange(99)))
    requests = list(waiting)
    for turn in range(4000):
        if waiting and turn % 5 == 0:
            request = waiting.pop()
            one, other = rng.sample(workers, 2)
            if rng.random() < 0.4:
                one.order(Run(request))
            else:
                other.order(Reserve(request, request.request + 1, one.name, 1))
                other.think()
                accepted = [a for a in other.sent(Accept) if a.request == request.request]
                if accepted:
                    world.prefill(one, other, request, request.request + 1, accepted[0].cached_tokens)
                else:
                    assert [r.reason for r in other.sent(Refuse)] == ["full"]
                    again = structs.replace(request, attempt=request.attempt + 1)
                    requests[requests.index(request)] = again
                    waiting.insert(0, again)
        worker = rng.choice(workers)
        worker.think()
        world.collect(worker)
        if worker.steps and rng.random() < 0.7:
            worker.compute()
        if world.network.parcels and rng.random() < 0.8:
            world.network.deliver()
        if not waiting and len(world.finishes) == len(requests):
            break
    world.settle()
    assert not world.failures
    for request in requests:
        check_exact(world, request)
    for worker in workers:
        worker.check_empty()


def test_drain_refuses_finishes_says_so_and_exits(world):
    w = world.worker("w")
    request = work(PROMPT, max_tokens=20)
    w.order(Run(request))
    w.think()
    w.order(Drain())
    w.order(Run(work(LONG, request=2)))
    w.order(Reserve(work(LONG, request=3), 1, "p", 1))
    w.order(Prefill(work(LONG, request=4), 2, 0, [], "d", 1))
    w.think()
    assert [refusal.reason for refusal in w.sent(Refuse)] == ["draining"] * 3
    assert w.exited is None
    world.settle()
    check_exact(world, request)
    assert w.exited == (0, "drained")
    assert len(w.sent(Drained)) == 1
    w.check_empty()


@pytest.mark.parametrize("drains", ["p", "d"])
def test_what_one_end_hands_back_does_not_look_like_a_drain_of_the_other(world, pair, drains):
    """`relay sim --seed 624461977268`: P drained, D passed on P's reason, and gateways had the healthy D leave too."""
    p, d = pair
    leaving, staying = (p, d) if drains == "p" else (d, p)
    world.split(p, d, work(LONG, max_tokens=90))
    leaving.events += [DrainRequested(), TimerFired(DRAIN_TIMER)]
    leaving.think()
    assert [failure.reason for failure in leaving.sent(SequenceFailed)] == ["draining"]
    world.settle()
    (passed_on,) = world.failures
    assert passed_on.retry
    assert passed_on.reason not in ("draining", "")
    assert "draining" in passed_on.reason
    assert (leaving.exited, staying.exited) == ((0, "drained"), None)
    staying.check_empty()


def test_drain_that_takes_too_long_hands_back(world, pair):
    p, d = pair
    world.split(p, d, work(LONG, max_tokens=90))
    p.events.append(DrainRequested())
    d.events.append(DrainRequested())
    p.think()
    d.think()
    world.pass_time(31)
    world.settle()
    assert world.failures
    assert all(failure.retry and failure.reason == "draining" for failure in world.failures)
    assert p.exited == d.exited == (0, "drained")
    p.check_empty()
    d.check_empty()


def test_idle_worker_drains_at_once(world):
    w = world.worker("w")
    w.order(Drain())
    w.think()
    assert w.exited == (0, "drained")


def test_lost_gateway_ends_the_engine(world):
    w = world.worker("w")
    w.order(Run(work(LONG)))
    w.events.append(GatewayLost(0, "EOF"))
    w.think()
    assert w.exited[0] == GATEWAY_LOST_STATUS
    assert "EOF" in w.exited[1]


def test_more_than_max_held_is_refused(world):
    w = world.worker("w", config=WorkerConfig(max_held=2))
    for number in range(3):
        w.order(Run(work(PROMPT, request=number)))
    w.think()
    (refusal,) = w.sent(Refuse)
    assert (refusal.request, refusal.reason) == (2, "full")


def test_load_and_cache_reports_are_bounded_in_rate_and_complete(world):
    w = world.worker("w")
    w.order(Run(work(LONG, max_tokens=40)))
    loads, changes = [], []
    for _ in range(200):
        w.think()
        loads += [(world.now_ns, load) for load in w.sent(Load)]
        changes += w.sent(CacheChanged)
        w.sent(Tokens)
        if w.steps:
            w.compute()
        world.pass_time(0.004)
    times = [at for at, _ in loads]
    assert all(later - earlier >= 50_000_000 for earlier, later in pairwise(times))
    assert len(loads) >= 3
    assert loads[-1][1] == w.scheduler.load()
    assert [change.sequence for change in changes] == list(range(len(changes)))
    assert [change.reset for change in changes] == [True] + [False] * (len(changes) - 1)
    known = set()
    for change in changes:
        known |= set(change.added)
        known -= set(change.removed)
    assert known == set(w.scheduler.cached_units())
    assert known


def test_one_tokens_message_a_step(world):
    w = world.worker("w")
    for number in range(4):
        w.order(Run(work(PROMPT[: 4 + number], request=number)))
    sizes = []
    while w.events or w.steps or w.scheduler.has_work():
        w.think()
        sent = w.sent(Tokens)
        assert len(sent) <= 1
        sizes += [len(message.entries) for message in sent]
        if w.steps:
            w.compute()
    assert max(sizes) == 4


def test_failures_name_the_attempt(world, pair):
    p, _ = pair
    p.order(Prefill(work(LONG, request=9, attempt=4), 1, 0, ["inproc://nobody"], "nobody", 1))
    world.settle()
    (failure,) = world.failures
    assert isinstance(failure, SequenceFailed)
    assert (failure.request, failure.choice, failure.attempt, failure.retry) == (9, 0, 4, True)


def test_transition_table_names_every_state():
    sources = {state for state, _ in held.TRANSITIONS}
    assert sources == {held.HeldState.PREFILLING, held.HeldState.RESERVED}
    with pytest.raises(KeyError):
        held.Held((1, 0, 1), (1, 0, 1), 0, work(PROMPT), held.HeldState.RUNNING).move(held.HeldEvent.FIRST_TOKEN_DRAWN)


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_an_order_that_comes_again_after_its_end_is_not_taken_again(world, end):
    """Found by `relay sim --seed 5` with control_repeat: nobody wanted the work, and nobody would ever have cancelled it."""
    worker = world.worker("w")
    request = work(PROMPT)
    worker.order(Run(request))
    worker.think()
    if end == "cancel":
        worker.order(Cancel(1, 0, 1))
    world.settle()
    worker.check_empty()
    worker.sent(Tokens)
    worker.order(Run(request))
    worker.order(Reserve(request, 7, "p", 1))
    worker.think()
    assert not len(worker.core.held)
    assert not worker.sent(Accept)
    later = work(PROMPT, attempt=2)
    worker.order(Run(later))
    world.settle()
    check_exact(world, later)


@pytest.mark.parametrize("order", ["run", "reserve", "prefill"])
def test_an_order_that_comes_again_after_its_refusal_is_not_taken(world, order):
    """`relay sim --seed 389311759257`: D was full, then it was not, and held the second copy for nobody."""
    worker = world.worker("w", max_num_seqs=1, max_num_waiting=1)
    others = [work(LONG, request=number) for number in (8, 9)]
    for each in others:
        worker.order(Run(each))
        worker.think()
    request = work(PROMPT)
    orders = {
        "run": Run(request),
        "reserve": Reserve(request, 7, "p", 1),
        "prefill": Prefill(request, 7, 0, ["d"], "d", 1),
    }
    worker.order(orders[order])
    worker.think()
    (refusal,) = worker.sent(Refuse)
    assert (refusal.request, refusal.attempt, refusal.reason) == (1, 1, "full")
    for each in others:
        worker.order(Cancel(each.request, 0, 1))
    world.settle()
    worker.check_empty()
    for each in (orders[order], Run(request), Reserve(request, 8, "p", 1)):
        worker.order(each)
        worker.think()
    assert not len(worker.core.held)
    assert not worker.sent(Accept)
    assert not worker.sent(Refuse)
    later = work(PROMPT, attempt=2)
    worker.order(Run(later))
    world.settle()
    check_exact(world, later)


def test_ends_are_remembered_up_to_a_bound(world):
    worker = world.worker("w")
    for number in range(1, 40):
        worker.order(Run(work([5, 6], request=number, max_tokens=1)))
        world.settle()
    assert len(worker.core.held._ended) == 39
    worker.core.held._ended.update({(-number, 0): 1 for number in range(1, MAX_ENDED - 38)})
    worker.order(Run(work([5, 6], request=99, max_tokens=1)))
    world.settle()
    assert len(worker.core.held._ended) == MAX_ENDED
    assert not worker.core.held.is_old(SequenceKey(1, 0, 1))
    assert worker.core.held.is_old(SequenceKey(99, 0, 1))
