"""Choices of one request: on how many engines at once, so that three are enough to know that they crash engines (I11)."""

import random

import msgspec
import pytest
from world import World

from relay.control import events as e
from relay.control.transitions import ChoiceState
from relay.ids import WorkerKey
from relay.protocol.messages import ComputedRow, EngineExited

FIVE = [(name, "both") for name in "abcde"]
SPLIT = [("p", "prefill"), ("q", "prefill"), *((name, "decode") for name in "abcde")]


def placed(world: World, request: int = 1) -> dict[WorkerKey, list[int]]:
    """Where choices decode, or will."""
    found: dict[WorkerKey, list[int]] = {}
    for choice in world.core.state.requests[request].choices:
        for attempt in choice.attempts:
            found.setdefault(attempt.decode.key, []).append(choice.index)
    return found


def decoding(slots, n: int) -> World:
    """Request 1 of ``n`` choices, each with tokens and on engines with room for half of them."""
    world = World(random.Random(3).randrange, slots)
    for worker in world.workers.values():
        worker.max_num_seqs = (n + 1) // 2
    world.ready()
    world.submit([1] * 200, max_tokens=200, min_tokens=200, n=n)
    for _ in range(4000):
        choices = world.core.state.requests[1].choices
        if all(choice.committed for choice in choices):
            return world
        world.run(1)
        world.advance(until_ns=world.timers["tick", ""])
    raise AssertionError("not all have tokens")


def crash(world: World, *keys: WorkerKey, alone: bool = False) -> None:
    """All at once, each in a step with every choice of request 1 that it has, at its next token; then their agents report."""
    rows = {key: [(index, end(world, index)) for index in placed(world).get(key, [])] for key in keys}
    for key in keys:
        world.workers[key].alive = False
        world.handle(e.ConnectionLost(key, "engine", "EOF"))
    for key in keys:
        manifest = [ComputedRow(1, index, 1, to) for index, to in rows[key]]
        world.handle(e.WorkerMessage(key, EngineExited(None, 11, manifest, alone)))
        world.handle(e.LauncherExited(key, status=139))


def end(world: World, index: int) -> int:
    return world.core.state.requests[1].choices[index].num_tokens


@pytest.mark.parametrize("slots", [FIVE, SPLIT])
@pytest.mark.parametrize("n", [3, 5])
def test_what_all_choices_draw_at_once_takes_three_engines(slots, n: int) -> None:
    """Found by the scenario late-poison: four choices crashed four engines in one moment."""
    world = decoding(slots, n)
    engines = list(placed(world))
    assert len(engines) == 2
    crash(world, *engines)
    suspicion = world.core.state.requests[1].suspicion
    assert suspicion.blames == 2
    (last,) = placed(world)
    assert all(attempt.solo_until for choice in world.core.state.requests[1].choices for attempt in choice.attempts)
    crash(world, last, alone=True)
    assert world.clients[1].failure.code == "quarantined"


def test_after_a_loss_all_choices_are_on_one_engine_and_nothing_is_split() -> None:
    world = decoding(SPLIT, 4)
    request = world.core.state.requests[1]
    engines = list(placed(world))
    for worker in world.core.state.workers.values():
        worker.engine = msgspec.structs.replace(worker.engine, max_num_seqs=8)
    crash(world, engines[0])
    assert list(placed(world)) == [engines[1]], "beside those that are there already"
    crash(world, engines[1])
    live = [attempt for choice in request.choices for attempt in choice.attempts]
    assert len({attempt.decode.key for attempt in live}) == 1
    assert not any(attempt.prefill for attempt in live), "P and then D would be two"


def test_choices_that_have_no_room_beside_the_others_wait() -> None:
    world = decoding(FIVE, 4)
    request = world.core.state.requests[1]
    engines = list(placed(world))
    crash(world, engines[0])
    assert list(placed(world)) == [engines[1]]
    assert [choice.state for choice in request.choices].count(ChoiceState.WAITING) == 2
    world.ready()
    world.settle()
    assert world.clients[1].finished.keys() == {0, 1, 2, 3}
