"""Every decode worker full: P computes the prompt, the client has its first token, and the KV waits under a lease."""

import random

import pytest
from world import World

from relay.control import events as e
from relay.control_config import ControlConfig, RetryConfig
from relay.ids import WorkerKey
from relay.protocol.messages import Cancel, Load, Refuse, Reserve, Run

SPLIT = [("prefill-0", "prefill"), ("decode-0", "decode")]
WIDE = [("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]
P, D = WorkerKey("prefill-0", 1), WorkerKey("decode-0", 1)
LONG = list(range(100, 260))
SECOND = 1_000_000_000


def first(n: int) -> int:
    return 0


def sent(world: World, worker: str) -> list:
    return [message for key, queue in world.to_engine.items() if key.worker == worker for message in queue]


def refuse_all(world: World) -> None:
    """Every D that is asked is full."""
    for key, queue in list(world.to_engine.items()):
        while key.worker.startswith("decode") and queue and not isinstance(queue[0], Run):
            message = queue.popleft()
            if isinstance(message, Reserve):
                work = message.work
                world.handle(e.WorkerMessage(key, Refuse(work.request, work.choice, work.attempt, "full")))


def until_full(world: World) -> None:
    """Ask and refuse until nobody is asked any more."""
    while any(isinstance(message, Reserve) for name in world.roles for message in sent(world, name)):
        refuse_all(world)


def parked(world: World, **how) -> int:
    """A request whose first token is out and whose KV is on P."""
    world.submit(LONG, max_tokens=5, **how)
    until_full(world)
    while world.core.state.counters["parked"] == 0:
        while world.to_engine[P]:
            world._hear(P)
        world.workers[P].step()
        while world.workers[P].out:
            world._speak(world.workers[P])
        until_full(world)
    return world.next_request - 1


@pytest.mark.parametrize("slots", [SPLIT, WIDE])
def test_with_every_d_full_p_computes_and_keeps(slots) -> None:
    world = World(first, slots).ready()
    world.submit(LONG, max_tokens=5)
    until_full(world)
    (order,) = [message for message in sent(world, "prefill-0") if isinstance(message, Run)]
    assert order.park_ms == 10_000
    assert order.work.token_ids == LONG


def test_the_client_has_its_first_token_and_the_rest_follows_when_there_is_room() -> None:
    world = World(first, SPLIT).ready()
    request = parked(world)
    assert len(world.clients[request].tokens[0]) == 1
    choice = world.core.state.requests[request].choices[0]
    assert choice.parked is not None
    assert not choice.attempts
    assert world.workers[P].sequences
    world.handle(e.WorkerMessage(D, Load(0, 64, 0, 0, 0)))  # there is room
    (reserve,) = [message for message in sent(world, "decode-0") if isinstance(message, Reserve)]
    assert len(reserve.work.token_ids) == len(LONG) + 1
    assert reserve.source == "prefill-0"
    world.settle()
    assert world.clients[request].finished
    assert not world.workers[P].sequences, "P keeps nothing"
    story = "\n".join(world.core.story(request))
    assert "is parked on prefill-0" in story


def test_a_refused_reservation_leaves_what_p_keeps() -> None:
    world = World(first, SPLIT).ready()
    parked(world)
    world.handle(e.WorkerMessage(D, Load(0, 64, 0, 0, 0)))
    world.to_engine[P].clear()
    refuse_all(world)
    assert not [message for message in sent(world, "prefill-0") if isinstance(message, Cancel)]
    assert world.workers[P].sequences


def test_p_hears_of_the_end_of_what_it_keeps() -> None:
    world = World(first, SPLIT).ready()
    request = parked(world)
    world.handle(e.RequestCancelled(request))
    assert [m.request for m in sent(world, "prefill-0") if isinstance(m, Cancel)] == [request]
    assert not world.core.state.parked


def test_it_goes_on_from_the_p_that_keeps_it() -> None:
    world = World(first, WIDE).ready()
    request = parked(world)
    world.core.state.workers["prefill-0"].slow = True  # the other one looks far better
    world.handle(e.WorkerMessage(D, Load(0, 64, 0, 0, 0)))
    sources = {m.source for name in ("decode-0", "decode-1") for m in sent(world, name) if isinstance(m, Reserve)}
    assert sources == {"prefill-0"}
    world.settle()
    assert world.clients[request].finished


def test_after_the_lease_d_computes() -> None:
    world = World(first, SPLIT, ControlConfig(retry=RetryConfig(park_lease_s=1.0, full_patience_s=0.5))).ready()
    request = parked(world)
    for _ in range(30):
        world.advance(until_ns=world.timers["tick", ""])
        refuse_all_reservations = [m for m in sent(world, "decode-0") if isinstance(m, Reserve)]
        if [m for m in sent(world, "decode-0") if isinstance(m, Run)]:
            break
        assert len(refuse_all_reservations) <= 1
        refuse_all(world)
    assert [m.work.request for m in sent(world, "decode-0") if isinstance(m, Run)] == [request]
    assert not [m for m in sent(world, "prefill-0") if isinstance(m, Run)], "it is parked once"


def test_p_that_keeps_enough_is_asked_again_later() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG, max_tokens=5)
    until_full(world)
    order = next(m for m in sent(world, "prefill-0") if isinstance(m, Run))
    world.to_engine[P].clear()
    world.handle(e.WorkerMessage(P, Refuse(order.work.request, 0, order.work.attempt, "full")))
    until_full(world)
    assert not [m for m in sent(world, "prefill-0") if isinstance(m, Run)]
    for _ in range(4):
        world.advance(until_ns=world.timers["tick", ""])
        until_full(world)
    assert [m for m in sent(world, "prefill-0") if isinstance(m, Run)]


def test_the_loss_of_p_costs_only_time() -> None:
    world = World(first, SPLIT).ready()
    request = parked(world)
    world.kill(P, 9)
    world.settle()
    assert world.clients[request].finished


def test_one_token_is_all() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG, max_tokens=1)
    until_full(world)
    world.settle()
    assert world.clients[1].finished
    assert world.core.state.counters["parked"] == 0


def test_others_wait_for_nothing() -> None:
    """While one D is full for good, prompts go on getting their first tokens."""
    world = World(first, SPLIT).ready()
    for start in range(6):
        world.submit([start + 7 * i for i in range(80)], max_tokens=5)
        until_full(world)
    for _ in range(40):
        while world.to_engine[P]:
            world._hear(P)
        world.workers[P].step()
        while world.workers[P].out:
            world._speak(world.workers[P])
        until_full(world)
    assert world.core.state.counters["parked"] == 6
    assert all(len(client.tokens[0]) == 1 for client in world.clients.values())


@pytest.mark.parametrize("seed", range(10))
def test_a_small_d_under_load_fails_nothing(seed: int) -> None:
    """Refusals, parking and leases at random moments; the oracle of the world compares every token."""
    rng = random.Random(seed)
    world = World(lambda n: rng.randrange(n), rng.choice([SPLIT, WIDE]), kv_blocks=16).ready()
    for _ in range(25):
        world.run(5)
        world.submit([rng.randrange(100) for _ in range(rng.randint(1, 90))], max_tokens=rng.randint(1, 30))
    world.settle()
    assert all(client.failure is None and client.finished for client in world.clients.values())
    assert not world.core.state.parked
