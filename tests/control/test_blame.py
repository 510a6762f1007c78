"""Who is blamed for an engine's end, and what becomes of them: at most three engines fall to one request, and no innocent fails."""

import pytest
from fake_worker import next_token
from world import World

from relay.control import commands as c
from relay.control import events as e
from relay.control.transitions import ChoiceState, WorkerState
from relay.control_config import ControlConfig
from relay.errors import WeightsLostError
from relay.ids import WorkerKey
from relay.protocol.messages import (
    GATEWAY_LOST_STATUS,
    Accept,
    ComputedRow,
    EngineExited,
    Heartbeat,
    Run,
    SequenceFailed,
    TokenEntry,
    Tokens,
    Work,
)

ONE = [("worker-0", "both")]
MANY = [(name, "both") for name in "abcd"]
SECOND = 1_000_000_000
LONG = list(range(100, 260))
POISON = [666] * 20


def first(n: int) -> int:
    return 0


def holder(world: World, request: int, choice: int = 0) -> WorkerKey:
    return world.core.state.requests[request].choices[choice].attempts[0].decode.key


def is_poison(work: Work) -> bool:
    return work.token_ids[:1] == [666]


def report(world: World, key: WorkerKey, *rows: tuple[int, int, int], alone: bool = False, **how: int) -> None:
    """The agent of ``key`` says that its engine ended; ``rows`` are (request, choice, end)."""
    manifest = [ComputedRow(request, choice, 1, end) for request, choice, end in rows]
    message = EngineExited(**(how or {"signal": 11}), manifest=manifest, alone=alone)
    world.handle(e.WorkerMessage(key, message))
    world.workers[key].alive = False
    world.handle(e.LauncherExited(key, status=139))
    world.ready()


def crash(world: World, request: int, *beside: int, choice: int = 0, alone: bool = False, end: int = 20) -> WorkerKey:
    key = holder(world, request, choice)
    report(world, key, *[(number, choice, end) for number in (request, *beside)], alone=alone)
    world.advance(until_ns=world.now_ns + 6 * SECOND)
    world.ready()
    return key


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("slots", [MANY[:2], [("p", "prefill"), ("d", "decode"), ("e", "decode")]])
def test_poison_is_quarantined_and_nobody_else_suffers(slots, n: int) -> None:
    world = World(first, slots).ready()
    world.crash_on = is_poison
    for index in range(4):
        world.submit([index] * 20, max_tokens=60)
    world.submit(POISON, n=n)
    world.settle()
    failures = {request: client.failure for request, client in world.clients.items()}
    assert failures.pop(5).code == "quarantined"
    assert set(failures.values()) == {None}
    assert all(client.finished for request, client in world.clients.items() if request != 5)
    assert world.core.state.counters["workers_lost"] == 3


def test_only_rows_of_the_step_are_blamed() -> None:
    world = World(first, ONE).ready()
    world.submit([1] * 20, max_tokens=40)
    world.submit([2] * 20, max_tokens=40)
    crash(world, 1)
    requests = world.core.state.requests
    assert (requests[1].suspicion.blames, requests[2].suspicion.blames) == (1, 0)


def test_a_suspect_of_two_crashes_runs_alone_up_to_the_place() -> None:
    world = World(first, ONE).ready()
    world.submit([1] * 20, max_tokens=40)
    crash(world, 1, end=20)
    crash(world, 1, end=24)
    (order,) = [message for message in world.to_engine[holder(world, 1)] if isinstance(message, Run)]
    assert order.work.solo_until == 24
    world.settle()
    assert world.clients[1].finished


def test_a_third_crash_beside_others_is_no_proof() -> None:
    world = World(first, ONE).ready()
    world.submit([1] * 20, max_tokens=40)
    world.submit([2] * 20, max_tokens=40)
    for _ in range(5):
        crash(world, 1, 2)
    assert {request: client.failure for request, client in world.clients.items()} == {1: None, 2: None}
    assert world.core.state.requests[1].suspicion.blames == 2
    crash(world, 1, alone=True)
    assert world.clients[1].failure.code == "quarantined"
    world.settle()
    assert world.clients[2].finished


def test_a_token_behind_the_place_takes_the_blame_back() -> None:
    world = World(first, ONE).ready()
    world.submit([1] * 20, max_tokens=40)
    choice = world.core.state.requests[1].choices[0]
    suspicion = choice.request.suspicion
    crash(world, 1, end=21)  # while the token after 21 was computed, and that before was not reported
    key = holder(world, 1)
    worker = world.workers[key]
    world._hear(key)
    for blames in (1, 0):
        worker.step()
        while worker.out:
            world._speak(worker)
        assert suspicion.blames == blames, f"after {len(choice.committed)} tokens"
    assert not choice.troubled


def test_choices_of_one_request_are_blamed_together_and_cleared_apart() -> None:
    world = World(first, MANY).ready()
    world.submit([1] * 20, max_tokens=40, n=2)
    request = world.core.state.requests[1]
    assert len({attempt.decode for choice in request.choices for attempt in choice.attempts}) == 1, (
        "one engine at a time"
    )
    report(world, holder(world, 1), (1, 0, 20), (1, 1, 20), alone=True)
    assert request.suspicion.blames == 1
    key = holder(world, 1, 0)
    world.handle(e.WorkerMessage(key, Tokens([TokenEntry(1, 0, 2, 0, [world_token(world, 0)])])))
    assert request.suspicion.blames == 1
    assert request.suspicion.ends == {1: 20}
    report(world, holder(world, 1, 1), (1, 1, 20))
    assert request.suspicion.blames == 2


def world_token(world: World, choice: int, position: int = 0) -> int:
    submission = world.clients[1].submission
    tokens = list(submission.token_ids)
    for _ in range(position + 1):
        tokens.append(next_token(tokens, submission.params, choice))
    return tokens[-1]


@pytest.mark.parametrize("n", [2, 4])
def test_until_its_first_token_a_request_is_on_one_engine(n: int) -> None:
    """Else its choices could crash as many engines at once before the first report."""
    world = World(first, MANY).ready()
    for index in range(6):  # load that would spread them
        world.submit([index] * 30, max_tokens=60)
    world.submit(POISON, n=n)
    request = world.core.state.requests[7]
    where = {attempt.decode.id for choice in request.choices for attempt in choice.attempts}
    assert len(where) == 1
    world.settle()
    assert all(client.finished for client in world.clients.values())


def test_hedges_of_choices_share_one_other_engine_until_the_first_token() -> None:
    """Found by `relay sim --seed 4919`: the hedges of two choices of a hanging request hung two more engines at once."""
    world = World(first, MANY).ready()
    world.submit(LONG, n=3)
    request = world.core.state.requests[1]
    router = world.core._dispatcher._router
    taken = set()
    for choice in request.choices:
        (attempt,) = choice.attempts
        attempt.decode.suspect = True
        for worker in world.core.state.workers.values():  # load that would spread them
            worker.backlog_tokens += 1000 * (worker.id in taken)
        placement = router.choose_hedge(attempt, world.now_ns)
        for worker in world.core.state.workers.values():
            worker.backlog_tokens = sum(worker.live.values())
        if placement is not None:
            world.core._dispatcher.hedge(attempt, placement, world.now_ns)
            taken.add(placement.decode.id)
    assert len(taken) == 1


@pytest.mark.parametrize("signal", [9, 15])
def test_killed_engines_blame_nobody(signal: int) -> None:
    world = World(first, ONE).ready()
    world.submit(LONG, max_tokens=30)
    for _ in range(30):  # far more often than a request may fail by itself
        key = WorkerKey("worker-0", world.core.state.workers["worker-0"].incarnation)
        world.kill(key, signal)
        for event in world.endings.pop(key):
            world.handle(event)
        world.advance(until_ns=world.now_ns + 6 * SECOND)
        world.ready()
    assert world.clients[1].failure is None
    world.settle()
    assert world.clients[1].finished


@pytest.mark.parametrize("status", [GATEWAY_LOST_STATUS, WeightsLostError.exit_code])
def test_engines_that_lost_the_gateway_or_their_weights_blame_nobody(status: int) -> None:
    """Found by `relay sim --seed 451`: an engine ends by itself when its connection is cut; that was blamed as a crash."""
    world = World(first, ONE).ready()
    world.submit(LONG, max_tokens=30)
    for _ in range(4):
        key = holder(world, 1)
        world.handle(e.ConnectionLost(key, "engine", "connection reset"))
        report(world, key, (1, 0, 160), status=status)
        world.advance(until_ns=world.now_ns + 6 * SECOND)
        world.ready()
    assert world.core.state.requests[1].suspicion.total == 0
    world.settle()
    assert world.clients[1].finished


def hang(world: World, *rows: tuple[int, int, int], alone: bool) -> None:
    (key,) = world.alive()
    manifest = [ComputedRow(request, choice, 1, end) for request, choice, end in rows]
    world.handle(e.WorkerMessage(key, Heartbeat(1, "stepping", 10_001, "R", manifest, alone)))
    for event in world.endings.pop(key):
        world.handle(event)
    world.advance(until_ns=world.now_ns + 6 * SECOND)
    world.ready()


def test_hangs_count_like_crashes() -> None:
    """A request that hung every engine took nine of them."""
    world = World(first, ONE).ready()
    world.submit(LONG)
    world.submit([5] * 20, max_tokens=50)
    hang(world, (1, 0, 160), (2, 0, 20), alone=False)
    hang(world, (1, 0, 160), alone=True)
    assert world.clients[1].failure is None
    hang(world, (1, 0, 160), alone=True)
    assert world.clients[1].failure.code == "quarantined"
    world.settle()
    assert world.clients[2].finished
    assert world.core.state.counters["workers_lost"] == 3


def test_a_hang_that_is_not_noticed_yet_does_not_spread() -> None:
    """Found by `relay sim --seed 1664`: each attempt ended for want of its KV, and the next hung another engine."""
    world = World(first, MANY).ready()
    world.submit(LONG)
    choice = world.core.state.requests[1].choices[0]
    hung = []
    for number in (1, 2):
        hung.append(choice.attempts[0].decode.key)
        beat = Heartbeat(1, "stepping", 900, "R", [ComputedRow(1, 0, number, 160)], True)
        world.handle(e.WorkerMessage(hung[-1], beat))
        world.handle(e.WorkerMessage(hung[-1], SequenceFailed(1, 0, number, "source silent", True)))
    assert choice.state is ChoiceState.WAITING, "a third engine must wait for what becomes of two"
    world.now_ns += SECOND // 20  # its back-off
    world.handle(e.WorkerMessage(hung[0], Heartbeat(2, "ready", 0, "S")))
    assert choice.state is ChoiceState.PLACED, "the first was only slow"
    world.settle()
    assert world.clients[1].finished


def test_a_step_left_behind_may_hang_before_anything_speaks_against_it() -> None:
    """`relay sim --seed 738445597412 --directed "kv_corrupt:last token sent"`: the KV connection failed while the prompt hung P, so
    it went to another P and hung that; its hedge hung a third, before heartbeats said whose steps were so long.
    """
    world = World(first, [("p", "prefill"), ("q", "prefill"), ("d", "decode"), ("e", "decode")]).ready()
    world.submit(LONG)
    request = world.core.state.requests[1]
    choice = request.choices[0]
    workers = world.core.state.workers
    hung = []
    for number in (1, 2):
        (attempt,) = choice.attempts
        world.handle(e.WorkerMessage(attempt.decode.key, Accept(1, 0, number, attempt.transfer, 0)))
        hung.append(attempt.prefill)
        if number == 1:
            hung[0].suspect = True  # else it would be asked again
            world.handle(e.WorkerMessage(attempt.decode.key, SequenceFailed(1, 0, 1, "transfer: checksum", True)))
            world.handle(e.WorkerMessage(hung[0].key, Heartbeat(3, "stepping", 90, "R")))
    assert hung[0] is not hung[1]
    assert request.suspicion.total == 0
    attempt.prefill.slow = True
    hedger = world.core._hedger
    assert not hedger._deserves_one(attempt, attempt.prefill)
    world.handle(e.WorkerMessage(attempt.decode.key, SequenceFailed(1, 0, 2, "transfer: checksum", True)))
    world.now_ns += SECOND // 20  # its back-off
    world.handle(e.WorkerMessage(hung[0].key, Heartbeat(3, "stepping", 190, "R")))
    assert choice.state is ChoiceState.WAITING, "a third engine must wait for what becomes of two"
    world.handle(e.WorkerMessage(hung[0].key, Heartbeat(4, "ready", 0, "S")))
    assert choice.state is ChoiceState.PLACED, "the first was only slow"
    assert {worker.id for worker in workers.values() if worker.lingering} == {hung[1].id}
    world.settle()
    assert world.clients[1].finished


def test_a_suspect_that_leaves_a_step_behind_is_not_placed_before_that_is_over() -> None:
    """Found by `relay sim --seed 43` with rolling_restart: moved off D, it hung a third engine while P hung, too."""
    world = World(first, MANY).ready()
    world.submit(LONG)
    world.core.state.requests[1].suspicion.blames = 2
    choice = world.core.state.requests[1].choices[0]
    key = choice.attempts[0].decode.key
    assert order_to_leave(world, key) is WorkerState.DRAINING
    assert choice.attempts[0].decode.key == key, "a suspect is not moved"
    world.handle(e.WorkerMessage(key, SequenceFailed(1, 0, 1, "target lost", True)))
    for beat, waits in ((Heartbeat(7, "stepping", 90, "R"), True), (Heartbeat(8, "stepping", 9, "R"), True)):
        world.now_ns += SECOND // 20
        world.handle(e.WorkerMessage(key, beat))
        assert (choice.state is ChoiceState.WAITING) is waits
    world.handle(e.WorkerMessage(key, Heartbeat(9, "stepping", 9, "R")))
    assert choice.state is ChoiceState.PLACED, "two steps later nothing of it can be in flight"
    world.settle()
    assert world.clients[1].finished


def test_what_a_drain_moves_may_leave_a_step_behind_that_hangs() -> None:
    """`relay sim --seed 1551`: moved off an engine that it hung, it hung the next, and its hedge a third, before any was blamed."""
    world = World(first, MANY).ready()
    world.submit(LONG)
    choice = world.core.state.requests[1].choices[0]
    left = choice.attempts[0].decode
    assert order_to_leave(world, left.key) is WorkerState.DRAINING
    (attempt,) = choice.attempts
    assert attempt.decode is not left, "moved"
    attempt.decode.slow = True
    hedger = world.core._hedger
    world.handle(e.WorkerMessage(left.key, Heartbeat(3, "stepping", 90, "R")))
    assert not hedger._deserves_one(attempt, attempt.decode)
    world.handle(e.WorkerMessage(left.key, Heartbeat(4, "ready", 0, "S")))
    assert hedger._deserves_one(attempt, attempt.decode), "the one that it left was only slow"


def order_to_leave(world: World, key: WorkerKey) -> WorkerState:
    world.handle(e.LeaveOrdered((key.worker,)))
    return world.core.state.workers[key.worker].state


def test_a_hang_and_a_kill_of_one_life_are_one_blame() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG)
    key = holder(world, 1)
    manifest = [ComputedRow(1, 0, 1, 160)]
    world.handle(e.WorkerMessage(key, Heartbeat(1, "stepping", 10_001, "R", manifest, True)))
    world.handle(e.LauncherExited(key, None, 9, "", EngineExited(None, 11, manifest, True)))
    assert world.core.state.requests[1].suspicion.blames == 1


def test_kills_and_hangs_of_nobody_are_bounded() -> None:
    """What ends with its worker again and again ends at last, though nothing speaks against it."""
    for how in ("hang", "kill"):
        world = World(first, ONE).ready()
        world.submit(LONG)
        lost = 0
        while not world.clients[1].ended:
            lost += 1
            if how == "hang":
                hang(world, alone=False)
                continue
            (key,) = world.alive()
            world.to_engine[key].clear()
            world.kill(key, 9)
            for event in world.endings.pop(key):
                world.handle(event)
            world.advance(until_ns=world.now_ns + 6 * SECOND)
            world.ready()
        assert world.clients[1].failure.code == "retries_exhausted"
        assert lost == ControlConfig().retry.max_losses + 1


def test_a_poison_does_not_outrun_the_agents_reports() -> None:
    """Found by `relay sim --seed 30`: failover is faster than blame, and one poison request crashed a fourth engine."""
    world = World(first, MANY).ready()
    world.submit(POISON)
    choice = world.core.state.requests[1].choices[0]
    lost = []
    for _ in range(2):
        lost.append(choice.attempts[0].decode.key)
        world.handle(e.ConnectionLost(lost[-1], "engine", "EOF"))
    assert len({key.worker for key in lost}) == 2
    assert choice.state is ChoiceState.WAITING, "a third engine must wait for the reports: it may have to run alone"
    for key in lost:
        report(world, key, (1, 0, 20), alone=True)
    assert choice.attempts[0].solo_until == 20
    crash(world, 1, alone=True)
    assert world.clients[1].failure.code == "quarantined"


def test_a_lost_agents_launcher_may_still_tell_of_a_crash() -> None:
    """Found by `relay sim --seed 58`: the agents were cut off as the poison crashed an engine, and it took a fourth one."""
    world = World(first, MANY).ready()
    world.submit(POISON)
    request = world.core.state.requests[1]
    request.suspicion.blames, request.suspicion.ends[0] = 2, 20
    key = holder(world, 1)
    world.handle(e.ConnectionLost(key, "agent", "connection reset"))
    assert request.choices[0].state is ChoiceState.WAITING, "who knows what its engine died of?"
    world.handle(e.LauncherExited(key, status=139, engine=EngineExited(None, 11, [ComputedRow(1, 0, 1, 20)], True)))
    assert world.clients[1].failure.code == "quarantined"


def test_a_loss_that_is_not_explained_holds_nobody_up_for_long() -> None:
    world = World(first, MANY).ready()
    world.submit([7] * 20)
    choice = world.core.state.requests[1].choices[0]
    for _ in range(2):
        world.handle(e.ConnectionLost(choice.attempts[0].decode.key, "engine", "EOF"))
    assert choice.state is ChoiceState.WAITING
    world.advance(until_ns=world.now_ns + 4 * SECOND)
    assert choice.request.suspicion.total == 0
    world.settle()
    assert world.clients[1].finished


def test_a_crash_in_the_middle_of_a_prompt_counts() -> None:
    """Found by `relay chaos --poison`: a prompt computed in several steps was taken for proof that its first part is harmless."""
    world = World(first, MANY).ready()
    world.submit(POISON)
    for blames in (1, 2):
        crash(world, 1, end=8)
        assert world.core.state.requests[1].suspicion.blames == blames
    crash(world, 1, alone=True, end=8)
    assert world.clients[1].failure.code == "quarantined"


def test_a_slow_end_is_waited_for() -> None:
    """Found by `relay chaos --poison`: between an engine's last byte and its exit lay 0.2 s on a busy machine; a blame was lost."""
    world = World(first, MANY).ready()
    world.submit(POISON)
    key = holder(world, 1)
    world.handle(e.ConnectionLost(key, "engine", "EOF"))
    world.advance(until_ns=world.now_ns + SECOND // 2)
    assert world.core.state.requests[1].suspicion.total == 1
    report(world, key, (1, 0, 20), alone=True)
    assert world.core.state.requests[1].suspicion.blames == 1


def test_an_engines_eof_after_the_exit_does_not_silence_its_agent() -> None:
    """Found by `relay sim --seed 441`: exit event, then the engine's EOF, and the agent's report of the crash was not awaited."""
    world = World(first, MANY[:2]).ready()
    world.submit(POISON)
    request = world.core.state.requests[1]
    key = holder(world, 1)
    world.handle(e.LauncherExited(key, status=139))
    world.handle(e.ConnectionLost(key, "engine", "EOF"))
    world.handle(e.WorkerMessage(key, EngineExited(None, 11, [ComputedRow(1, 0, 1, 20)], True)))
    assert request.suspicion.blames == 1
    assert ("launch", key.worker) not in world.timers
    world.handle(e.ConnectionLost(key, "agent", "EOF"))
    assert ("launch", key.worker) in world.timers  # when the request has gone on elsewhere


def test_the_agents_word_may_come_after_the_exit() -> None:
    """The launcher's event overtakes the agent's last message: the restart waits for it, and blame is not lost."""
    world = World(first, ONE).ready()
    world.submit(POISON)
    key = holder(world, 1)
    world.workers[key].alive = False
    said = world.handle(e.ConnectionLost(key, "engine", "EOF"))
    said += world.handle(e.LauncherExited(key, status=0))
    assert not any(isinstance(command, c.LaunchWorker) for command in said)
    world.handle(e.WorkerMessage(key, EngineExited(None, 11, [ComputedRow(1, 0, 1, 20)], True)))
    assert world.core.state.requests[1].suspicion.blames == 1
    said = world.handle(e.ConnectionLost(key, "agent", "EOF"))
    assert any(isinstance(command, c.LaunchWorker) for command in said)


def test_the_launcher_passes_the_agents_word_on_where_the_network_does_not() -> None:
    """Cut off from the gateway, the agent cannot report; what it left with its launcher counts once, and is waited for no more."""
    world = World(first, ONE).ready()
    world.submit(POISON)
    key = holder(world, 1)
    world.workers[key].alive = False
    word = EngineExited(None, 11, [ComputedRow(1, 0, 1, 20)], True)
    said = world.handle(e.LauncherExited(key, status=139, engine=word))
    assert world.core.state.requests[1].suspicion.blames == 1
    assert any(isinstance(command, c.LaunchWorker) for command in said)
    world.handle(e.WorkerMessage(key, word))
    assert world.core.state.requests[1].suspicion.blames == 1


def test_rows_of_strangers_blame_nobody() -> None:
    world = World(first, ONE).ready()
    world.submit([1] * 20, max_tokens=40)
    report(world, holder(world, 1), (9, 0, 20), (1, 7, 20), alone=False)
    assert world.core.state.requests[1].suspicion.blames == 0
    world.settle()


def test_a_choice_that_was_stopped_leaves_its_blame_to_those_that_may_come_there() -> None:
    """Found by `relay sim --seed 1152`: a stopped choice crashed an engine, and the other one of its request three more."""
    world = World(first, ONE).ready()
    world.submit([1] * 20, max_tokens=40, n=2)
    key = holder(world, 1, 1)
    for position in range(3):
        world.handle(e.WorkerMessage(key, Tokens([TokenEntry(1, 0, 1, position, [world_token(world, 0, position)])])))
    world.stop_choice(1, 0)
    suspicion = world.core.state.requests[1].suspicion
    report(world, key, (1, 0, 22), alone=False)
    assert (suspicion.blames, suspicion.ends) == (0, {}), "choice 0 had come past that place"
    report(world, holder(world, 1, 1), (1, 0, 24), alone=False)
    assert (suspicion.blames, suspicion.ends) == (1, {1: 24})
    world.settle()
    assert world.clients[1].finished.keys() == {1}
