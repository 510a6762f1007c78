"""Breakers with slow start, token buckets, and what the router and the queue do with them."""

from world import World

from relay.config import SECOND
from relay.control import commands as c
from relay.control import events as e
from relay.control.breaker import EVERYTHING, Breaker, BreakerState
from relay.control.budget import TokenBucket
from relay.control.transitions import AttemptState
from relay.control_config import BreakerConfig, ControlConfig, RetryConfig
from relay.ids import WorkerKey
from relay.protocol.block_hash import root_hash, unit_hashes
from relay.protocol.messages import CacheChanged, Reserve, Run, SequenceFailed, TokenEntry, Tokens

CONFIG = BreakerConfig(
    window_s=10.0,
    min_failures=4,
    failure_per_mille=500,
    open_s=1.0,
    max_open_s=4.0,
    slow_start_s=2.0,
    slow_start_seqs=2,
)
LONG = list(range(100))


def first(n: int) -> int:
    return 0


def opened(now_ns: int = 0) -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(4):
        breaker.failed(now_ns)
    return breaker


def test_it_opens_when_half_of_enough_outcomes_are_failures() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0)
    assert breaker.at(0) is BreakerState.CLOSED, "too few"
    for _ in range(5):
        breaker.succeeded(0)
    breaker.failed(0)
    assert breaker.at(0) is BreakerState.CLOSED, "four of nine"
    breaker.failed(0)
    assert breaker.at(0) is BreakerState.OPEN
    assert breaker.allowance(0, 64) == 0


def test_the_window_slides() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0)
    breaker.failed(10 * SECOND)
    assert breaker.at(10 * SECOND) is BreakerState.CLOSED
    for _ in range(3):
        breaker.failed(19 * SECOND)
    assert breaker.at(19 * SECOND) is BreakerState.OPEN


def test_slow_start_grows_to_everything() -> None:
    breaker = opened()
    assert [breaker.allowance(int(at * SECOND), 64) for at in (0.5, 1.0, 2.0, 2.9, 3.0)] == [0, 2, 33, 60, EVERYTHING]
    assert breaker.at(3 * SECOND) is BreakerState.CLOSED


def test_a_failure_in_slow_start_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breaker, now_ns = opened(), 0
    for seconds in (1, 2, 4, 4):
        assert breaker.at(now_ns + seconds * SECOND - 1) is BreakerState.OPEN
        now_ns += seconds * SECOND
        assert breaker.at(now_ns) is BreakerState.HALF_OPEN
        breaker.failed(now_ns)
    now_ns += 4 * SECOND + 2 * SECOND
    assert breaker.at(now_ns) is BreakerState.CLOSED
    for _ in range(4):
        breaker.failed(now_ns)
    assert breaker.at(now_ns + SECOND) is BreakerState.HALF_OPEN, "a whole slow start forgives"


def test_a_restarted_worker_starts_slowly_but_one_failure_does_not_open_it() -> None:
    breaker = Breaker(CONFIG)
    breaker.start_slowly(0)
    assert breaker.allowance(0, 64) == 2
    breaker.failed(1)
    assert breaker.at(1) is BreakerState.HALF_OPEN
    assert breaker.at(2 * SECOND) is BreakerState.CLOSED


def test_a_restart_does_not_close_an_open_breaker() -> None:
    breaker = opened()
    breaker.start_slowly(1)
    assert breaker.at(2) is BreakerState.OPEN


# --- in the router ----------------------------------------------------------------------------------------------------


def world_of(slots: list, **settings) -> World:
    return World(first, slots, ControlConfig(breaker=CONFIG, **settings)).ready()


def trip(world: World, *workers: str) -> None:
    for worker in workers:
        for _ in range(4):
            world.core.state.breakers.workers[worker].failed(world.now_ns)


def placed(commands: list) -> list[str]:
    return [
        command.worker.worker
        for command in commands
        if isinstance(command, c.SendToEngine) and isinstance(command.message, Run | Reserve)
    ]


def submit(world: World, prompt: list[int]) -> list[str]:
    """Where a new request goes."""
    before = {key: len(orders) for key, orders in world.to_engine.items()}
    world.submit(prompt)
    return [k.worker for k, orders in world.to_engine.items() if len(orders) > before.get(k, 0)]


def test_dead_affinity_the_worker_with_the_prefix_is_left_alone_while_its_breaker_is_open() -> None:
    world = world_of([("a", "both"), ("b", "both")])
    units = unit_hashes(root_hash("numerics", ""), LONG)
    world.handle(e.WorkerMessage(WorkerKey("b", 1), CacheChanged(0, added=units)))
    assert submit(world, LONG) == ["b"], "affinity"
    trip(world, "b")
    assert submit(world, LONG) == ["a"]
    world.now_ns += SECOND
    assert submit(world, LONG) == ["b"], "half open: it may have two"
    assert submit(world, LONG) == ["a"], "and no third"


def test_an_open_worker_is_still_used_when_no_other_has_room() -> None:
    world = world_of([("a", "both"), ("b", "both")])
    trip(world, "a")
    for key in ("a", "b"):
        world.core.state.workers[key].engine.max_num_seqs = 1
    assert [submit(world, [index]) for index in range(3)] == [["b"], ["a"], []]


def test_more_than_half_open_is_not_believed() -> None:
    world = world_of([(name, "both") for name in "abc"])
    units = unit_hashes(root_hash("numerics", ""), LONG)
    world.handle(e.WorkerMessage(WorkerKey("a", 1), CacheChanged(0, added=units)))
    trip(world, "a")
    assert submit(world, LONG) == ["b"]
    trip(world, "b")
    assert submit(world, LONG) == ["a"], "two of three: the fault is elsewhere"


def test_losses_of_a_worker_count_and_its_return_is_slow() -> None:
    world = world_of([("a", "both"), ("b", "both")])
    world.kill(WorkerKey("a", 1), 9)
    for event in world.endings.pop(WorkerKey("a", 1)):
        world.handle(event)
    world.ready()
    breaker = world.core.state.breakers.workers["a"]
    assert breaker.at(world.now_ns) is BreakerState.HALF_OPEN
    assert [submit(world, [index] * 30) for index in range(5)] == [["a"], ["b"], ["a"], ["b"], ["b"]]
    assert sum(slot[1] for slot in breaker._slots.values()) == 1


def test_drained_workers_have_not_failed() -> None:
    world = world_of([("a", "both"), ("b", "both")])
    worker = world.core.state.workers["a"]
    world.core._membership.leaving.said(worker, 0)
    world.handle(e.ConnectionLost(WorkerKey("a", 1), "engine", "EOF"))
    assert not world.core.state.breakers.workers["a"]._slots


SPLIT = [("p", "prefill"), ("q", "prefill"), ("d", "decode")]


def fail_transfer(world: World, request: int) -> None:
    choice = world.core.state.requests[request].choices[0]
    (attempt,) = choice.attempts
    assert attempt.prefill is not None
    message = SequenceFailed(request, 0, attempt.number, "connection reset", True)
    world.handle(e.WorkerMessage(attempt.decode.key, message))


def test_a_bad_link_is_avoided_and_the_workers_at_its_ends_are_not() -> None:
    world = world_of(SPLIT)
    for _ in range(4):
        world.core.state.breakers.link_failed("p", "d", world.now_ns)
    world.submit(LONG)
    attempt = world.core.state.requests[1].choices[0].attempts[0]
    assert (attempt.prefill.id, attempt.decode.id) == ("q", "d")
    for _ in range(4):
        world.core.state.breakers.link_failed("q", "d", world.now_ns)
    world.submit(LONG[::-1])
    attempt = world.core.state.requests[2].choices[0].attempts[0]
    assert (attempt.prefill, attempt.decode.id) == (None, "d"), "no link is left: D computes"


def test_transfers_are_counted_by_link() -> None:
    world = world_of(SPLIT)
    for request in range(1, 6):
        world.submit([request, *LONG])
        choice = world.core.state.requests[request].choices[0]
        if choice.attempts[0].prefill.id != "p":
            continue
        fail_transfer(world, request)
    links = world.core.state.breakers.links
    assert ("p", "d") in links
    assert not world.core.state.breakers.workers["d"]._slots


def test_answers_that_never_come_count() -> None:
    world = world_of([("p", "prefill"), ("d", "decode")])
    detector = world.core.state.config.detector
    world.submit(LONG)
    (attempt,) = world.core.state.requests[1].choices[0].attempts
    world.core._detector._answers(world.now_ns + int(detector.answer_deadline_s * SECOND))
    assert list(world.core.state.breakers.workers["d"]._slots.values()) == [[0, 1]]
    (attempt,) = world.core.state.requests[1].choices[0].attempts or [None]
    if attempt is None:
        world.handle(e.TimerFired(("tick", "")))
        (attempt,) = world.core.state.requests[1].choices[0].attempts
    attempt.state = AttemptState.HANDOFF
    world.core.state.workers["d"].reserving -= 1
    world.core._detector._answers(attempt.changed_ns + int(detector.handoff_deadline_s * SECOND))
    assert list(world.core.state.breakers.links["p", "d"]._slots.values()) == [[0, 1]]
    assert world.core.state.requests[1].choices[0].transfer_failures == 1


def test_a_half_open_link_takes_few_transfers_at_once() -> None:
    world = world_of([("p", "prefill"), ("d", "decode")])
    for _ in range(4):
        world.core.state.breakers.link_failed("p", "d", world.now_ns)
    world.now_ns += SECOND
    for request in range(1, 5):
        world.submit([request, *LONG])
    with_p = [r.id for r in world.core.state.requests.values() if r.choices[0].attempts[0].prefill is not None]
    assert with_p == [1, 2]


def test_a_handoff_counts_for_its_link() -> None:
    world = world_of([("p", "prefill"), ("d", "decode")])
    world.core.state.breakers.link_failed("p", "d", world.now_ns)
    world.submit(LONG)
    world.settle()
    assert world.clients[1].finished
    (slot,) = world.core.state.breakers.links["p", "d"]._slots.values()
    assert slot == [1, 1]


def test_nonsense_of_a_worker_counts_against_it() -> None:
    world = world_of([("a", "both"), ("b", "both")])
    world.submit(LONG)
    world.handle(e.WorkerMessage(WorkerKey("a", 1), Tokens([TokenEntry(1, 0, 1, 0, [99999])])))
    assert list(world.core.state.breakers.workers["a"]._slots.values()) == [[0, 1]]


def test_breakers_are_in_status_and_metrics() -> None:
    world = world_of(SPLIT)
    trip(world, "p")
    for _ in range(4):
        world.core.state.breakers.link_failed("q", "d", world.now_ns)
    samples = {(name, labels.get("worker"), labels.get("link")): v for name, labels, v in world.core.metrics(0)}
    assert samples["relay_breaker_open", "p", ""] == 1.0
    assert samples["relay_breaker_open", "q", ""] == 0.0
    assert samples["relay_breaker_open", "", "q>d"] == 1.0
    assert samples["relay_hedges_total", None, None] == samples["relay_token_disagreements_total", None, None] == 0
    status = world.core.status(0)
    assert [worker["breaker"] for worker in status["workers"]] == ["open", "closed", "closed"]
    assert status["links"] == {"q>d": "open"}


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_bucket_earns_a_share_and_no_more_than_its_burst() -> None:
    bucket = TokenBucket(50, 100)
    bucket.earn(19)
    assert bucket.tokens == 0
    bucket.earn(1)
    assert bucket.tokens == 1
    bucket.earn(1 << 30)
    assert bucket.tokens == 100
    bucket.spend(130)
    assert bucket.tokens == -30


def test_a_bucket_loses_nothing_to_rounding() -> None:
    bucket = TokenBucket(0, 100, per_second=3)
    for now_ns in range(0, SECOND + 1, SECOND // 1000):
        bucket.pass_time(now_ns)
    assert bucket.tokens == 3
    assert bucket.wait_ns(6) == SECOND


def test_what_costs_more_than_the_burst_is_had_for_all_of_it() -> None:
    bucket = TokenBucket(0, 100, per_second=1, full=True)
    assert bucket.affords(1000)
    bucket.spend(1000)
    assert not bucket.affords(1)


STORM = RetryConfig(budget_per_mille=0, budget_tokens_per_s=40, budget_burst_tokens=50)


def lose(world: World, worker: str) -> list:
    return world.handle(
        e.ConnectionLost(WorkerKey(worker, world.core.state.workers[worker].incarnation), "agent", "EOF")
    )


def test_resumes_beyond_the_budget_wait_in_order_and_do_not_fail() -> None:
    world = world_of([("a", "both"), ("b", "both")], retry=STORM)
    world.core.state.workers["b"].suspect = True
    for request in range(1, 6):
        world.submit([request] * 40)
    world.core.state.workers["b"].suspect = False
    assert placed(lose(world, "a")) == ["b"], "the burst pays for one"
    assert world.core.state.counters["resumes_delayed"] == 1
    assert [choice.request.id for choice in world.core.state.queue] == [2, 3, 4, 5]
    assert submit(world, [9]) == ["b"], "new requests are not held up"
    world.now_ns += SECOND
    for worker in world.core.state.workers.values():
        worker.heard_ns = world.now_ns
    world.handle(e.TimerFired(("tick", "")))
    assert [choice.request.id for choice in world.core.state.queue] == [3, 4, 5]
    world.settle()
    assert all(client.failure is None and client.finished for client in world.clients.values())


def test_accepted_work_pays_for_resumes() -> None:
    config = RetryConfig(budget_per_mille=500, budget_tokens_per_s=1, budget_burst_tokens=1000)
    world = world_of([("a", "both")], retry=config)
    world.core.state.retry_budget.spend(1000)
    world.submit([1] * 60)
    world.handle(e.TimerFired(("tick", "")))
    assert world.core.state.retry_budget.tokens == 30


def test_a_first_placement_and_a_refusal_cost_nothing() -> None:
    world = world_of([("a", "both"), ("b", "both")], retry=STORM)
    for request in range(1, 4):
        world.submit([request] * 40)
    assert world.core.state.retry_budget.tokens == 50
    assert not len(world.core.state.queue)
