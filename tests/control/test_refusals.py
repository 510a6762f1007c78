"""Work refused for lack of room: who is asked again, when, and how often."""

from itertools import pairwise

from world import World

from relay.control import events as e
from relay.control.refusals import FREE_REFUSALS, MAX_HINT_NS, Refusals, choice_delay_ns, hint_ns
from relay.control_config import ControlConfig, RetryConfig
from relay.ids import WorkerKey
from relay.protocol.messages import Cancel, Load, Prefill, Refuse, Reserve, Run, SequenceFailed

SPLIT = [("prefill-0", "prefill"), ("decode-0", "decode")]
P, D = WorkerKey("prefill-0", 1), WorkerKey("decode-0", 1)
MS = 1_000_000
RETRY = RetryConfig()
NEVER_PARKS = ControlConfig(retry=RetryConfig(park_lease_s=0.0))


def first(n: int) -> int:
    return 0


def asked(world: World, key: WorkerKey, kind: type) -> list:
    """Take the orders for ``key`` that wait, and return those of ``kind``."""
    orders = list(world.to_engine[key])
    world.to_engine[key].clear()
    return [order for order in orders if isinstance(order, kind)]


def refuse(world: World, key: WorkerKey, order, hint_ms: int = 0) -> None:
    work = order.work
    world.handle(e.WorkerMessage(key, Refuse(work.request, work.choice, work.attempt, "full", hint_ms)))


def d_accepts(world: World) -> None:
    world._hear(D)
    while world.workers[D].out:
        world._speak(world.workers[D])


def prompt(start: int) -> list[int]:
    return [start + 3 * i for i in range(100)]


def test_a_prefill_worker_that_is_full_is_not_asked_again_at_once() -> None:
    """Found by `relay sim --seed 389311759583`: two requests took turns, 24,000 attempts in a second."""
    world = World(first, SPLIT).ready()
    for start in range(2):
        world.submit(prompt(start))
    for _ in range(2):
        d_accepts(world)
    orders = asked(world, P, Prefill)
    assert len(orders) == 2
    for order in orders:
        refuse(world, P, order, hint_ms=250)
    assert not asked(world, D, Reserve), "what P has no room for needs none on D"
    world.advance(until_ns=world.now_ns + 240 * MS)
    assert not asked(world, D, Reserve), "before the time that P named"
    world.advance(until_ns=world.now_ns + 200 * MS)
    assert asked(world, D, Reserve)


def test_a_refusal_of_one_is_no_news_for_another() -> None:
    """D is full for one request, P for another: each refusal frees what was booked at the other worker, where nothing was."""
    world = World(first, SPLIT).ready()
    world.submit(prompt(0))
    d_accepts(world)
    (order,) = asked(world, P, Prefill)
    world.submit(prompt(1))
    (reserve,) = asked(world, D, Reserve)
    refuse(world, P, order, hint_ms=250)
    world.to_engine[D].clear()
    refuse(world, D, reserve, hint_ms=250)
    assert world.core.state.workers["prefill-0"].queueing_refused.blocked
    assert not asked(world, D, Reserve)


def test_news_of_room_ends_the_wait() -> None:
    world = World(first, SPLIT, NEVER_PARKS).ready()
    world.handle(e.WorkerMessage(D, Load(60, 64, 8, 0, 0)))
    world.submit(prompt(0))
    (order,) = asked(world, D, Reserve)
    refuse(world, D, order, hint_ms=10_000)
    assert not asked(world, D, Reserve)
    world.handle(e.WorkerMessage(D, Load(40, 64, 7, 0, 0)))
    assert asked(world, D, Reserve)


def test_attempts_grow_with_the_logarithm_of_the_time() -> None:
    """Both workers say again and again that something has left, and refuse all the same."""
    world = World(first, SPLIT, ControlConfig(retry=RetryConfig(max_backoff_s=100.0, full_patience_s=1000.0))).ready()
    world.submit(prompt(0))
    choice = world.core.state.requests[1].choices[0]
    counts = []
    for step in range(3000):
        for order in asked(world, D, Reserve):
            refuse(world, D, order, hint_ms=1)
        for order in asked(world, P, Run):
            refuse(world, P, order, hint_ms=1)
        for key in (P, D):
            world.handle(e.WorkerMessage(key, Load(60 - step % 2, 64, 8, 0, 0)))
        world.advance(until_ns=world.now_ns + 10 * MS)
        if step in (374, 749, 1499, 2999):
            counts.append(choice.num_attempts)
    assert counts[0] <= 2 * FREE_REFUSALS + 10
    assert all(later - earlier <= 2 for earlier, later in pairwise(counts)), counts


def test_a_token_starts_anew() -> None:
    world = World(first, SPLIT, NEVER_PARKS).ready()
    world.submit(prompt(0), max_tokens=5)
    choice = world.core.state.requests[1].choices[0]
    for _ in range(FREE_REFUSALS + 1):
        refuse(world, D, asked(world, D, Reserve)[0])
        world.handle(e.WorkerMessage(D, Load(0, 64, 0, 0, 0)))
        world.core.state.workers["decode-0"].has_news()
        world.core.state.changed = True
        world.handle(e.RequestCancelled(999))  # any event
    assert choice.refusals == FREE_REFUSALS + 1
    assert not asked(world, D, Reserve), "news is not enough any more"
    world.advance(until_ns=world.now_ns + 110 * MS)
    assert asked(world, D, Reserve)
    choice.progressed()
    assert choice.refusals == choice.reserve_after_ns == 0


def test_what_p_gives_up_is_not_waited_for() -> None:
    """The parked KV is gone: the choice is computed by a full D's queue as one that was never parked."""
    world = World(first, SPLIT).ready()
    world.submit(prompt(0), max_tokens=5)
    refuse(world, D, asked(world, D, Reserve)[0], hint_ms=60_000)
    while world.core.state.counters["parked"] == 0:
        while world.to_engine[P]:
            world._hear(P)
        world.workers[P].step()
        while world.workers[P].out:
            world._speak(world.workers[P])
    parked = world.core.state.requests[1].choices[0].parked
    world.handle(e.WorkerMessage(P, SequenceFailed(1, 0, parked.attempt + 1, "not that one", True)))
    assert world.core.state.parked
    world.handle(e.WorkerMessage(P, SequenceFailed(1, 0, parked.attempt, "its room is needed", True)))
    assert not world.core.state.parked
    choice = world.core.state.requests[1].choices[0]
    choice.full_since_ns = world.now_ns - 600 * MS
    world.core.state.workers["decode-0"].reserving_refused.blocked = True
    world.core.state.changed = True
    world.handle(e.RequestCancelled(999))
    assert asked(world, D, Run), "it waits for no lease"
    assert not asked(world, P, Cancel)


def test_delays() -> None:
    assert [choice_delay_ns(count, RETRY) // MS for count in range(1, 14)] == (
        [0] * FREE_REFUSALS + [25, 50, 100, 200, 400, 800, 1000, 1000, 1000]
    )
    assert choice_delay_ns(10_000, RETRY) == 1000 * MS
    assert hint_ns(-5) == 0
    assert hint_ns(1 << 40) == MAX_HINT_NS
    refusals = Refusals()
    delays = []
    for _ in range(6):
        refusals.refused(250 * MS, RETRY, 7)
        refusals.refused(250 * MS, RETRY, 8)  # it was on its way
        delays.append((refusals.until_ns - 7) // MS)
        refusals.pass_time(refusals.until_ns - 1)
        assert refusals.blocked
        refusals.pass_time(refusals.until_ns)
        assert not refusals.blocked
    assert delays == [250, 500, 1000, 1000, 1000, 1000]
    refusals.taken(6)
    assert refusals.in_a_row == 6, "asked before the refusal"
    refusals.taken(7)
    refusals.refused(0, RETRY, 9)
    assert refusals.until_ns - 9 == 25 * MS
