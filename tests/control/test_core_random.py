"""Random losses, repeated and reordered messages: every client still gets the oracle's tokens, once, and nothing is lost."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world import World

from relay.control import events as e

TOPOLOGIES = [
    [("prefill-0", "prefill"), ("decode-0", "decode")],
    [("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")],
    [("worker-0", "both"), ("worker-1", "both")],
    [("worker-0", "both")],
]


def chaos(seed: int, topology: int, faults: int, kv_blocks: int) -> World:
    rng = random.Random(seed)
    world = World(rng.randrange, TOPOLOGIES[topology], kv_blocks=kv_blocks)
    if rng.random() < 0.5:
        world.ready()
    for _ in range(12):
        world.run(rng.randrange(30))
        prompt = [rng.randrange(1000) for _ in range(rng.choice([1, 5, 63, 64, 65, 150, 200]))]
        failure = world.submit(
            prompt, max_tokens=rng.choice([1, 2, 7, 30]), n=rng.choice([1, 1, 2, 3]), seed=rng.randrange(5)
        )
        assert failure is None or failure.code == "kv_cache_exceeded"
        action = rng.randrange(6)
        if action < 2 and faults:
            faults -= 1
            alive = world.alive()
            if alive:
                world.kill(rng.choice(alive), rng.choice([9, 9, 15, 11]), engine_first=rng.random() < 0.7)
        elif action == 2 and world.history:
            for event in rng.sample(list(world.history), min(5, len(world.history))):
                world.handle(event)
        elif action == 3 and world.clients:
            request = rng.choice(list(world.clients))
            if not world.clients[request].ended:
                world.cancel(request)
        elif action == 4 and world.clients:
            request = rng.choice(list(world.clients))
            client = world.clients[request]
            if not client.ended and 0 not in client.finished:
                world.stop_choice(request, 0)
        elif action == 5:
            world.advance()
    world.settle()
    return world


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32), st.integers(0, 3), st.integers(0, 4), st.sampled_from([24, 64, 400]))
def test_exactly_once_under_chaos(seed: int, topology: int, faults: int, kv_blocks: int) -> None:
    world = chaos(seed, topology, faults, kv_blocks)
    for client in world.clients.values():
        if client.cancelled:
            continue
        assert client.failure is None or client.failure.code == "quarantined", client.failure
        if client.failure is None:
            for choice in range(client.submission.n):
                assert choice in client.finished or choice in client.stopped
    assert not world.core.state.requests
    assert not len(world.core.state.queue)
    for worker in world.workers.values():
        if worker.alive:
            assert not worker.sequences, "a sequence without an owner"
            assert not worker.prefills


@pytest.mark.parametrize("topology", range(4))
def test_all_workers_killed_at_every_step(topology: int) -> None:
    """A kill of every worker at each moment of one request's life, one moment per run."""
    for moment in range(24):
        world = World(lambda n: 0, TOPOLOGIES[topology]).ready()
        assert world.submit(list(range(100)), max_tokens=6) is None
        world.run(moment)
        for key in world.alive():
            world.kill(key, 9)
        world.settle()
        assert world.clients[1].failure is None
        assert world.clients[1].finished


def test_old_incarnation_changes_nothing() -> None:
    world = World(lambda n: 0, TOPOLOGIES[3]).ready()
    world.submit(list(range(20)), max_tokens=20)
    world.run(4)
    old = [event for event in world.history if isinstance(event, e.WorkerMessage)]
    key = world.alive()[0]
    world.kill(key, 9)
    while key in world.endings:
        world.run(1)
    before = world.core.status(0)
    dropped = world.core.state.counters["messages_dropped"]
    for event in old:
        assert world.handle(event) == []
    assert world.core.status(0) == before
    assert world.core.state.counters["messages_dropped"] == dropped + len(old)
    world.settle()
    assert world.clients[1].finished
