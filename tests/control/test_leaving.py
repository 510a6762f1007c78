"""Drains and rolling restarts: nothing is lost, and the last of its numerics waits for its streams (I17)."""

import random

import pytest
from world import World

from relay.control import commands as c
from relay.control import events as e
from relay.control.transitions import WorkerState
from relay.ids import WorkerKey
from relay.protocol.messages import Cancel, Drain, Drained, EngineExited, Heartbeat, Run, SequenceFailed

SECOND = 1_000_000_000
TWO = [("a", "both"), ("b", "both")]
SPLIT = [("p", "prefill"), ("d", "decode"), ("e", "decode")]


def first(n: int) -> int:
    return 0


def busy(slots=TWO, requests: int = 6, max_tokens: int = 60) -> World:
    """Every request has tokens and goes on."""
    world = World(random.Random(4).randrange, slots).ready()
    for index in range(requests):
        world.submit([10 + index] * 20, max_tokens=max_tokens, min_tokens=max_tokens, seed=index)
    for _ in range(400):
        world.run(1)
        if all(client.tokens[0] for client in world.clients.values()):
            return world
    raise AssertionError("not all have tokens")


def refused(said: list) -> str:
    return next((command.reason for command in said if isinstance(command, c.LeaveRefused)), "")


def order(world: World, *workers: str, **how: bool) -> str:
    return refused(world.handle(e.LeaveOrdered(workers, **how)))


def tick(world: World) -> None:
    """The next tick, 0.1 s on; everybody beats."""
    world.advance(until_ns=world.timers["tick", ""])


def state(world: World, name: str) -> WorkerState:
    return world.core.state.workers[name].state


def finish(world: World) -> None:
    world.settle()
    assert all(client.failure is None and client.finished for client in world.clients.values())
    counters = world.core.state.counters
    assert counters["workers_lost"] == 0
    assert counters["resumed"] == 0


@pytest.mark.parametrize("slots", [TWO, SPLIT])
def test_sequences_move_at_once_and_the_worker_comes_back(slots) -> None:
    world = busy(slots)
    victim = slots[-1][0]
    key = WorkerKey(victim, 1)
    had = len(world.core.state.workers[victim].live)
    assert had
    committed = {request: len(client.tokens[0]) for request, client in world.clients.items()}
    assert order(world, victim) == ""
    worker = world.core.state.workers[victim]
    assert worker.state is WorkerState.DRAINING
    assert not worker.live
    messages = list(world.to_engine[key])
    assert sum(isinstance(message, Cancel) for message in messages) == had
    assert isinstance(messages[-1], Drain), "told when it is empty"
    for queue in world.to_engine.values():
        for message in queue:
            if isinstance(message, Run) and message.work.attempt > 1:
                start = len(message.work.token_ids) - message.work.num_prompt
                assert start == committed[message.work.request], "goes on after the last committed token"
    finish(world)
    while worker.incarnation == 1 or worker.state is not WorkerState.READY:
        world.run(1)
    assert world.core.state.counters["workers_drained"] == 1
    assert world.core.state.counters["moved"] == had


def test_what_has_nowhere_to_go_finishes_where_it_is() -> None:
    world = busy(TWO, requests=16)  # both are full
    world.submit([1])  # and whatever place gets free is taken
    assert order(world, "b") == ""
    worker = world.core.state.workers["b"]
    assert len(worker.live) == 8
    assert not any(isinstance(m, Drain) for m in world.to_engine[WorkerKey("b", 1)]), "not yet: it still computes"
    finish(world)
    while worker.incarnation == 1:
        world.run(1)


def test_the_only_worker_is_told_at_once_and_its_streams_wait_for_its_next_life() -> None:
    world = busy([("a", "both")], requests=2)
    assert order(world, "a") == ""
    assert isinstance(world.to_engine[WorkerKey("a", 1)][-1], Drain)
    assert world.submit([1, 2, 3]) is None or True
    finish(world)


def test_nobody_fails_for_want_of_workers_while_the_only_one_drains() -> None:
    """Found by `relay sim --seed 37` with drain_order: what it still computed was failed with no_workers."""
    world = busy([("a", "both")], requests=1, max_tokens=200)
    assert order(world, "a") == ""
    world.submit([1, 2, 3])
    for _ in range(120):
        world.advance(until_ns=world.now_ns + SECOND)
    assert [client.failure for client in world.clients.values()] == [None, None]
    finish(world)


def test_kept_out_until_it_is_asked_for() -> None:
    world = busy()
    assert order(world, "b", stay_out=True) == ""
    for _ in range(200):
        world.run(1)
    assert state(world, "b") is WorkerState.STOPPED
    assert "a is ready" in order(world, "a", stay_out=True)
    assert state(world, "a") is WorkerState.READY
    finish(world)
    assert order(world, "b") == ""
    world.ready()
    assert state(world, "b") is WorkerState.READY
    assert world.core.state.workers["b"].incarnation == 2


def test_an_engine_that_says_it_drains_is_relieved_too() -> None:
    """SIGTERM from outside: the agent's heartbeat tells."""
    world = busy()
    key = WorkerKey("b", 1)
    world.workers[key].draining = True
    world.handle(e.WorkerMessage(key, Heartbeat(5, "draining", 0, "S")))
    assert not world.core.state.workers["b"].live
    finish(world)


def test_a_drained_worker_is_not_killed_before_it_has_ended() -> None:
    """Its exit status shall be its own, 0."""
    world = World(first, TWO).ready()
    key = WorkerKey("b", 1)
    order(world, "b")
    world.workers[key].alive = False
    said = world.handle(e.WorkerMessage(key, Drained()))
    said += world.handle(e.WorkerMessage(key, EngineExited(status=0)))
    said += world.handle(e.ConnectionLost(key, "engine", "EOF"))
    said += world.handle(e.ConnectionLost(key, "agent", "EOF"))
    assert not any(isinstance(command, c.StopWorker) for command in said)
    said = world.handle(e.LauncherExited(key, status=0))
    assert any(isinstance(command, c.LaunchWorker) for command in said)


def test_an_order_that_crosses_with_the_drain_is_no_loss() -> None:
    """Found by `relay sim --seed 11` with rolling_restart: what a drained engine had not read any more counted as failed."""
    world = World(first, TWO).ready()
    world.submit([7] * 20)
    (attempt,) = world.core.state.requests[1].choices[0].attempts
    key = attempt.decode.key
    world.to_engine[key].clear()
    world.core.state.workers[key.worker].refuses = True
    world.workers[key].draining = True
    world.workers[key].alive = False
    world.handle(e.ConnectionLost(key, "engine", "EOF"))
    choice = attempt.choice
    assert (choice.losses, choice.failures, world.core.state.counters["resumed"]) == (0, 0, 0)
    assert choice.attempts[0].decode.key != key
    world.settle()
    assert world.clients[1].finished


def test_what_a_draining_engine_hands_back_has_not_failed() -> None:
    world = World(first, TWO).ready()
    world.submit([7] * 20)
    (attempt,) = world.core.state.requests[1].choices[0].attempts
    key = attempt.decode.key
    world.workers[key].draining = True
    world.to_engine[key].clear()
    world.handle(
        e.WorkerMessage(key, SequenceFailed(1, 0, 1, "draining", True))
    )  # before any heartbeat tells of the drain
    assert state(world, key.worker) is WorkerState.DRAINING
    assert (attempt.choice.failures, world.core.state.counters["resumed"]) == (0, 0)


def test_orders_that_make_no_sense() -> None:
    world = World(first, TWO).ready()
    assert order(world, "x") == "there is no worker 'x'"
    assert order(world, "a", "x") == "there is no worker 'x'"
    assert state(world, "a") is WorkerState.READY
    assert order(world, rolling=True) == ""
    assert "under way" in order(world, rolling=True)
    world.handle(e.StopRequested())
    assert order(world, "a") == "the server is shutting down"


@pytest.mark.parametrize("slots", [TWO, SPLIT, [("a", "both")]])
def test_a_rolling_restart_takes_one_at_a_time_and_loses_nothing(slots) -> None:
    world = busy(slots, max_tokens=200)
    assert order(world, rolling=True) == ""
    seen = set()
    for turn in range(5000):
        world.run(1)
        out = [worker.id for worker in world.core.state.workers.values() if worker.state is not WorkerState.READY]
        assert len(out) <= 1, f"two are out: {out}"
        seen.update(out)
        if turn % 20 == 0:
            tick(world)
        if turn % 40 == 0:
            assert world.submit([turn % 90 + 1] * 20, max_tokens=20) is None
        if not world.core.state.rollout:
            break
    assert seen == {name for name, _ in slots}
    assert all(worker.incarnation == 2 for worker in world.core.state.workers.values())
    finish(world)


def test_a_rolling_restart_stops_at_the_first_that_does_not_come_back() -> None:
    world = World(first, TWO).ready()
    order(world, rolling=True)
    tick(world)
    for _ in range(100):
        key = WorkerKey("a", world.core.state.workers["a"].incarnation)
        if world.workers[key].alive:
            world.workers[key].alive = False
            world.handle(e.LauncherExited(key, status=1))
        world.advance(until_ns=world.now_ns + SECOND)
        if not world.core.state.rollout:
            break
    assert "a does not come back" in world.core.status(0)["rollout"]["problem"]
    assert state(world, "b") is WorkerState.READY
    assert world.core.state.workers["b"].incarnation == 1


def test_an_upgrade_keeps_the_last_of_the_old_numerics_until_its_streams_end() -> None:
    world = busy(TWO, max_tokens=120)
    world.numerics = "other"
    order(world, rolling=True)
    while world.core.state.workers["a"].incarnation == 1 or state(world, "a") is not WorkerState.READY:
        world.run(1)
        if not world.core.state.workers["a"].beat:
            tick(world)
    assert world.core.state.workers["a"].numerics_id == "other"
    tick(world)
    assert state(world, "b") is WorkerState.DRAINING
    last = world.core.state.workers["b"]
    assert last.live, "the streams have nowhere else to go"
    attempt = next(iter(last.live))
    world.core._dispatcher.reopen(attempt, world.now_ns, "test")  # whatever ends an attempt: it may come back here
    world.handle(e.TimerFired(("tick", "")))
    assert attempt.choice.attempts[0].decode is last
    assert world.submit([5] * 30) is None
    assert world.core.state.requests[world.next_request - 1].choices[0].attempts[0].decode.id == "a", (
        "nothing new goes there"
    )
    world.core.state.counters["resumed"] -= 1
    finish(world)
    while last.incarnation == 1:
        world.run(1)


@pytest.mark.parametrize("seed", range(12))
def test_drains_at_random_moments_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(lambda n: rng.randrange(n), rng.choice([TWO, SPLIT])).ready()
    for turn in range(300):
        world.run(2)
        if rng.random() < 0.1:
            world.submit([rng.randrange(100)] * rng.randint(1, 90), max_tokens=rng.randint(1, 40), n=rng.choice([1, 2]))
        if turn % 60 == 30:
            how = rng.choice([{"rolling": True}, {}, {"stay_out": True}])
            order(world, rng.choice(list(world.roles)), **how)
    finish(world)


def test_what_another_gateway_drains_for_good_is_not_started_again() -> None:
    world = busy()
    world.handle(e.LeaveOrdered(("a",), stay_out=True, told=True))
    assert state(world, "a") is WorkerState.DRAINING
    finish(world)
    assert state(world, "a") is WorkerState.STOPPED
    assert not any(isinstance(command, c.LaunchWorker) for command in world.handle(e.Started()))


def test_a_new_gateway_leaves_alone_what_is_kept_out() -> None:
    world = World(first, TWO)
    world.handle(e.WorkerStarted(WorkerKey("a", 3)))
    world.handle(e.LeaveOrdered(("a",), stay_out=True, told=True))
    said = world.handle(e.LauncherExited(WorkerKey("a", 3), status=0)) + world.handle(e.Started())
    assert state(world, "a") is WorkerState.STOPPED
    assert "a" not in [command.worker.worker for command in said if isinstance(command, c.LaunchWorker)]
