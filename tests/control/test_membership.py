"""Workers' lives: handshake, restarts, crash loops, silence, freezes, hangs, poison, drain and stop."""

import pytest
from fake_worker import FakeWorker
from world import World

from relay.control import commands as c
from relay.control import events as e
from relay.control.transitions import AttemptState, WorkerState
from relay.control_config import ControlConfig, DetectorConfig
from relay.ids import WorkerKey
from relay.protocol.messages import (
    Drain,
    EngineExited,
    Heartbeat,
    Load,
    Prefill,
    Refuse,
    Run,
    SequenceFailed,
    TokenEntry,
    Tokens,
)

SPLIT = [("prefill-0", "prefill"), ("decode-0", "decode")]
ONE = [("worker-0", "both")]
SECOND = 1_000_000_000
LONG = list(range(100, 260))


def first(n: int) -> int:
    return 0


def state(world: World, name: str) -> WorkerState:
    return world.core.state.workers[name].state


def live_key(world: World, name: str) -> WorkerKey:
    return next(key for key in world.alive() if key.worker == name)


def test_complete_is_said_once_when_all_are_ready() -> None:
    world = World(first, SPLIT)
    said = []
    for key in list(world.workers):
        for process in ("engine", "agent"):
            hello = world.workers[key].hello(process)
            said += world.handle(e.WorkerConnected(1, hello))
    assert sum(isinstance(command, c.ClusterReady) for command in said) == 1
    assert isinstance(said[-1], c.ClusterReady)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worker": "stranger"}, "unknown worker 'stranger'"),
        ({"incarnation": 0}, "incarnation 0 of worker-0 is fenced; the present one is 1"),
        ({"incarnation": 2}, "incarnation 2 of worker-0 is fenced"),
        ({"model_digest": "other"}, "model digest other of the worker is not digest"),
        ({"protocol_min": 2, "protocol_max": 3}, "protocol 2 to 3"),
        ({"kv_blocks": 0}, "offers 0 KV blocks"),
    ],
)
def test_bad_hellos_are_rejected_with_the_reason(changes: dict, reason: str) -> None:
    world = World(first, ONE)
    hello = FakeWorker(WorkerKey("worker-0", 1), "both").hello("engine")
    for name, value in changes.items():
        setattr(hello, name, value)
    (command,) = world.handle(e.WorkerConnected(7, hello))
    assert isinstance(command, c.RejectConnection)
    assert command.connection == 7
    assert reason in command.reason


def test_a_second_connection_of_the_same_process_is_rejected() -> None:
    world = World(first, ONE).ready()
    commands = world.handle(e.WorkerConnected(9, world.workers[WorkerKey("worker-0", 1)].hello("engine")))
    assert isinstance(commands[0], c.RejectConnection)
    assert state(world, "worker-0") is WorkerState.READY


def exits(world: World) -> list[c.Command]:
    """Kill worker-0's present life and deliver everything its end says."""
    key = WorkerKey("worker-0", world.core.state.workers["worker-0"].incarnation)
    world.kill(key, 9)
    said = []
    for event in world.endings.pop(key):
        said += world.handle(event)
    return said


def test_first_restart_is_immediate_then_exponential_then_bounded() -> None:
    world = World(first, ONE).ready()
    delays = []
    for _ in range(12):
        said = exits(world)
        if any(isinstance(command, c.LaunchWorker) for command in said):
            delays.append(0.0)
        else:
            at_ns = world.timers[("launch", "worker-0")]
            delays.append((at_ns - world.now_ns) / SECOND)
            world.advance(until_ns=at_ns)
        assert state(world, "worker-0") is WorkerState.STARTING
    assert delays[:5] == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert max(delays) == delays[-1] == 5.0


def test_a_ready_worker_killed_again_and_again_comes_back_at_once() -> None:
    world = World(first, ONE).ready()
    for _ in range(12):
        assert any(isinstance(command, c.LaunchWorker) for command in exits(world))
        assert world.submit([1, 2]) is None
        world.ready()
    world.settle()
    assert all(client.finished for client in world.clients.values())


@pytest.mark.parametrize("how", ["hang", "crash"])
def test_a_ready_worker_that_fails_by_itself_is_restarted_ever_later(how: str) -> None:
    world = World(first, ONE).ready()
    for _ in range(5):
        key = live_key(world, "worker-0")
        if how == "hang":
            world.handle(e.WorkerMessage(key, Heartbeat(1, "stepping", 10_001, "R")))
        else:
            world.kill(key, 11)
        for event in world.endings.pop(key):
            world.handle(event)
        delay_ns = world.timers.get(("launch", "worker-0"), world.now_ns) - world.now_ns
        world.advance(until_ns=world.now_ns + delay_ns)
        world.ready()
    assert delay_ns == 0.8 * SECOND


def test_a_kill_that_only_the_agents_status_tells_of_is_a_kill() -> None:
    """Found by `relay sim --seed 4837`: 137 was taken for a crash, and three kills for a crash loop without workers."""
    world = World(first, ONE).ready()
    for _ in range(8):
        key = live_key(world, "worker-0")
        world.workers[key].alive = False
        said = world.handle(e.ConnectionLost(key, "agent", "EOF"))
        said += world.handle(e.LauncherExited(key, status=137))
        assert any(isinstance(command, c.LaunchWorker) for command in said)
        assert world.submit([1, 2]) is None
        world.ready()


def test_a_stable_life_forgives_what_came_before() -> None:
    world = World(first, ONE).ready()
    for _ in range(3):
        exits(world)
        world.advance(until_ns=world.now_ns + SECOND)
        world.ready()
    world.advance(until_ns=world.now_ns + 11 * SECOND)
    assert any(isinstance(command, c.LaunchWorker) for command in exits(world))


def test_a_crash_loop_counts_as_no_worker() -> None:
    world = World(first, ONE).ready()
    for _ in range(5):
        assert world.submit([1, 2]) is None
        exits(world)
        world.advance(until_ns=world.now_ns + 6 * SECOND)
    failure = world.submit([1, 2])
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "no_workers", 1)
    world.ready()
    world.settle()
    assert all(client.finished for client in world.clients.values())


@pytest.mark.parametrize(("status", "lives"), [(4, 1), (1, 3)])
def test_a_start_that_cannot_succeed_gives_up(status: int, lives: int) -> None:
    world = World(first, SPLIT)
    for life in range(1, lives + 1):
        assert not world.gave_up
        key = WorkerKey("decode-0", life)
        world.workers[key].alive = False
        world.handle(e.LauncherExited(key, status=status))
        world.advance(until_ns=world.now_ns + SECOND)
    (command,) = world.gave_up
    assert (command.worker.worker, command.status) == ("decode-0", status)
    assert state(world, "decode-0") is WorkerState.STOPPED


def test_launcher_that_sees_no_exit_is_not_waited_for() -> None:
    world = World(first, ONE).ready()
    key = live_key(world, "worker-0")
    world.silent.add(key)
    world.workers[key].alive = False  # StopWorker will do nothing, no exit will come
    world.advance(until_ns=world.now_ns + 5 * SECOND)
    assert world.core.state.workers["worker-0"].incarnation == 2


def test_silence_of_one_is_death_and_its_requests_move() -> None:
    world = World(first, [("a", "both"), ("b", "both"), ("c", "both")]).ready()
    world.submit(LONG, max_tokens=100)
    holder = next(key for key, queue in world.to_engine.items() if queue)
    world.silent.add(holder)
    start = world.now_ns
    world.advance(until_ns=start + int(1.2 * SECOND))
    assert world.core.state.workers[holder.worker].suspect
    assert state(world, holder.worker) is WorkerState.READY
    world.advance(until_ns=start + int(1.7 * SECOND))
    assert holder in world.closed
    world.settle()
    assert world.clients[1].finished


def test_silence_of_all_at_once_is_doubted_first() -> None:
    world = World(first, SPLIT).ready()
    world.silent.update(world.alive())
    start = world.now_ns
    world.advance(until_ns=start + int(2.5 * SECOND))
    assert not world.closed
    world.advance(until_ns=start + int(3.3 * SECOND))
    assert len(world.closed) == 2


def test_the_first_of_many_to_be_overdue_is_doubted_too() -> None:
    """Found by the scenario registry-blip: of three that fell silent together, the one heard a tick earlier was killed."""
    world = World(first, [("a", "both"), ("b", "both"), ("c", "both")]).ready()
    world.advance(until_ns=SECOND)
    world.silent.update(world.alive())
    start = world.now_ns
    for number, name in enumerate(("a", "b", "c")):
        world.core.state.workers[name].heard_ns = start + number * SECOND // 5
    world.advance(until_ns=start + int(2.5 * SECOND))
    assert not world.closed
    world.advance(until_ns=start + int(3.7 * SECOND))
    assert len(world.closed) == 3


def test_an_engine_that_speaks_is_not_silent() -> None:
    world = World(first, SPLIT).ready()
    key = live_key(world, "decode-0")
    world.silent.add(key)
    for _ in range(6):
        world.advance(until_ns=world.now_ns + SECOND)
        world.handle(e.WorkerMessage(key, Load(0, 64, 0, 0, 0)))
    assert state(world, "decode-0") is WorkerState.READY
    world.advance(until_ns=world.now_ns + 2 * SECOND)
    assert key in world.closed


def test_own_stall_is_not_the_death_of_others() -> None:
    world = World(first, ONE).ready()
    world.advance(until_ns=SECOND)
    world.now_ns += 30 * SECOND  # we slept; timers fire late, heartbeats wait in the sockets
    del world.timers[("tick", "")]
    world.handle(e.TimerFired(("tick", "")))
    assert state(world, "worker-0") is WorkerState.READY
    assert world.core.state.counters["own_stalls"] == 1


def test_a_stall_too_short_to_be_counted_is_nobodys_death_either() -> None:
    """Found by `relay sim --seed 3526`: with such deadlines the worker had been silent for long enough before it was over."""
    config = ControlConfig(detector=DetectorConfig(suspect_after_s=0.6, dead_after_s=0.6, own_stall_s=0.6))
    world = World(first, ONE, config).ready()
    world.advance(until_ns=SECOND)
    heard_ns = world.core.state.workers["worker-0"].heard_ns
    sleep(world, (heard_ns + 0.6 * SECOND + 1 - world.now_ns) / SECOND)
    assert state(world, "worker-0") is WorkerState.READY


def test_own_stall_before_the_first_tick() -> None:
    """Found by the scenario master-stall: workers were ready, and then the gateway slept before it had ever ticked."""
    world = World(first, ONE).ready()
    assert world.now_ns < SECOND // 10
    world.now_ns += 30 * SECOND
    del world.timers[("tick", "")]
    world.handle(e.TimerFired(("tick", "")))
    assert state(world, "worker-0") is WorkerState.READY
    assert world.core.state.counters["own_stalls"] == 1


def sleep(world: World, seconds: float) -> None:
    """The gateway stands still; its tick is the first thing that happens after."""
    world.now_ns += int(seconds * SECOND)
    del world.timers[("tick", "")]
    world.handle(e.TimerFired(("tick", "")))


def test_own_stall_does_not_end_the_start_of_a_worker() -> None:
    world = World(first, ONE)
    sleep(world, 200)
    assert state(world, "worker-0") is WorkerState.STARTING
    world.advance(until_ns=world.now_ns + 181 * SECOND)
    assert world.core.state.counters["workers_lost"] == 1, "without one it does end"


def test_own_stall_is_no_waiting_for_workers() -> None:
    world = World(first, ONE)
    world.submit(LONG)
    world.advance(until_ns=SECOND)
    sleep(world, 100)
    assert world.clients[1].failure is None
    world.advance(until_ns=world.now_ns + 61 * SECOND)
    assert world.clients[1].failure.code == "no_workers"


def test_own_stall_is_no_lack_of_progress() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG)
    world.advance(until_ns=SECOND)
    world.core.state.workers["worker-0"].beat = Heartbeat(1, "stepping", 10, "S")
    sleep(world, 100)
    assert world.core.health(world.now_ns)[0]
    assert not world.core.health(world.now_ns + 31 * SECOND)[0]


def test_frozen_engine() -> None:
    world = World(first, ONE).ready()
    key = live_key(world, "worker-0")
    world.handle(e.WorkerMessage(key, Heartbeat(1, "ready", 0, "T")))
    world.now_ns += SECOND // 4
    world.handle(e.WorkerMessage(key, Heartbeat(1, "ready", 0, "S")))
    world.now_ns += SECOND // 4
    world.handle(e.WorkerMessage(key, Heartbeat(1, "ready", 0, "T")))
    assert state(world, "worker-0") is WorkerState.READY
    world.now_ns += SECOND // 2
    world.handle(e.WorkerMessage(key, Heartbeat(1, "ready", 0, "T")))
    assert key in world.closed
    assert "frozen" in world.core.status(0)["workers"][0]["last_loss"]


def test_a_dying_engine_is_lost_at_once_and_explained_later() -> None:
    """Its agent knows before the kernel has closed its connections, and is left the time to say how it ended."""
    world = World(first, ONE).ready()
    key = live_key(world, "worker-0")
    world.submit(LONG)
    world.now_ns += SECOND // 4
    world.handle(e.WorkerMessage(key, Heartbeat(1, "stepping", 1, "X")))
    assert state(world, "worker-0") is WorkerState.LOST
    assert world.core.status(0)["workers"][0]["last_loss_s"] == world.now_ns / SECOND
    assert key not in world.closed
    world.handle(e.WorkerMessage(key, Heartbeat(1, "stepping", 1, "X")))
    world.handle(e.ConnectionLost(key, "engine", "EOF"))
    world.handle(e.WorkerMessage(key, EngineExited(None, 9)))
    world.handle(e.LauncherExited(key, 137, None, "", None))
    world.handle(e.ConnectionLost(key, "agent", "EOF"))
    assert state(world, "worker-0") is WorkerState.STARTING
    assert world.core.state.counters["workers_lost"] == 1
    assert "signal 9" in world.core.status(0)["workers"][0]["last_loss"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_killed_worker_starts_when_what_it_had_goes_on_elsewhere(goes_on: bool) -> None:
    """Its start takes processor time that the others' prefill needs; it is not put off for long."""
    world = World(first, [("worker-0", "both"), ("worker-1", "both")]).ready()
    world.submit(LONG, max_tokens=40, min_tokens=40)
    world.run(12)
    (victim,) = [worker for worker in world.core.state.workers.values() if worker.live]
    key = victim.key
    world.kill(key, 9)
    if not goes_on:
        world.workers[next(other for other in world.alive() if other != key)].receive = lambda message: None
    while key in world.endings:
        world._end(key)
    assert victim.state is WorkerState.LOST
    assert ("launch", victim.id) in world.timers
    killed_ns = world.now_ns
    while victim.state is WorkerState.LOST:
        if not world.actions():
            world.advance()
        for name, action in world.actions():
            if name != "hello":
                action()
    restart, tick_s = world.core.state.config.restart, world.core.state.config.tick_s
    waited_s = (world.now_ns - killed_ns) / SECOND
    assert waited_s <= tick_s if goes_on else restart.yield_s - tick_s <= waited_s <= restart.yield_s
    assert ("launch", victim.id) not in world.timers


def test_a_killed_worker_starts_at_once_where_nobody_else_could_go_on() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG, max_tokens=40, min_tokens=40)
    world.run(12)
    key = live_key(world, "worker-0")
    assert world.core.state.workers["worker-0"].live
    world.kill(key, 9)
    while key in world.endings:
        world._end(key)
    assert state(world, "worker-0") is WorkerState.STARTING


def test_hung_step() -> None:
    world = World(first, ONE).ready()
    key = live_key(world, "worker-0")
    world.handle(e.WorkerMessage(key, Heartbeat(1, "stepping", 9_000, "R")))
    assert state(world, "worker-0") is WorkerState.READY
    world.handle(e.WorkerMessage(key, Heartbeat(1, "loading", 90_000, "R")))
    assert state(world, "worker-0") is WorkerState.READY
    world.handle(e.WorkerMessage(key, Heartbeat(1, "stepping", 10_001, "R")))
    assert key in world.closed


def test_reserve_without_an_answer_moves_on() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG)
    key = live_key(world, "decode-0")
    world.to_engine[key].clear()  # D's engine is deaf
    world.advance(until_ns=11 * SECOND)
    assert world.to_engine[key]
    assert "no answer" in " ".join(world.core.story(1))
    world.settle()
    assert world.clients[1].finished


def test_endless_failures_end_the_request() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG)
    key = live_key(world, "worker-0")
    attempts = 0
    while not world.clients[1].ended:
        attempts += 1
        world.to_engine[key].clear()
        world.handle(e.WorkerMessage(key, SequenceFailed(1, 0, attempts, "broken", True)))
        world.advance(until_ns=world.now_ns + 2 * SECOND)
    assert world.clients[1].failure.code == "retries_exhausted"
    assert attempts == ControlConfig().retry.max_failures + 1


def test_a_failure_of_the_request_itself_is_not_retried() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG, n=2)
    key = live_key(world, "worker-0")
    world.handle(e.WorkerMessage(key, SequenceFailed(1, 1, 1, "step raised ValueError", False)))
    failure = world.clients[1].failure
    assert (failure.status, failure.code) == (500, "engine_error")
    assert "step raised ValueError" in failure.message
    world.settle()
    assert not world.workers[key].sequences


def test_transfer_failures_end_in_one_worker_doing_both() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG)
    key = live_key(world, "decode-0")
    for attempt in (1, 2):
        world.handle(e.WorkerMessage(key, SequenceFailed(1, 0, attempt, "transfer aborted", True)))
        world.advance(until_ns=world.now_ns + SECOND)
    assert "run on decode-0" in world.core.story(1)[-1]
    world.settle()
    assert world.clients[1].finished


def test_a_draining_worker_finishes_and_takes_nothing() -> None:
    world = World(first, [("a", "both"), ("b", "both")]).ready()
    world.submit(LONG, max_tokens=40)
    holder = next(key for key, queue in world.to_engine.items() if queue)
    world.handle(e.WorkerMessage(holder, Heartbeat(0, "draining", 0, "S")))
    assert state(world, holder.worker) is WorkerState.DRAINING
    assert any(isinstance(message, Drain) for message in world.to_engine[holder])
    world.submit([1, 2, 3])
    assert sum(isinstance(m, Run) for m in world.to_engine[holder]) == 1
    world.run(300)
    assert world.clients[1].finished
    assert world.core.state.workers[holder.worker].incarnation == 2
    assert world.core.state.workers[holder.worker].failures == 0


def test_refusal_because_of_draining_goes_elsewhere() -> None:
    world = World(first, [("a", "both"), ("b", "both")]).ready()
    world.submit([1, 2, 3])
    holder = next(key for key, queue in world.to_engine.items() if queue)
    world.to_engine[holder].clear()
    world.handle(e.WorkerMessage(holder, Refuse(1, 0, 1, "draining")))
    assert state(world, holder.worker) is WorkerState.DRAINING
    world.settle()
    assert world.clients[1].finished


def test_drain_then_stop() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG, max_tokens=50)
    world.run(5)
    assert not any(isinstance(command, c.Quiesced) for command in world.handle(e.DrainRequested()))
    assert world.submit([1]).code == "shutting_down"
    said = world.handle(e.StopRequested())
    assert world.clients[1].failure.code == "shutting_down"
    assert any(isinstance(command, c.Quiesced) for command in said)
    assert [command.kill for command in said if isinstance(command, c.StopWorker)] == [False]
    assert not world.handle(e.LauncherExited(WorkerKey("worker-0", 1), signal=15))
    assert state(world, "worker-0") is WorkerState.STOPPED


@pytest.mark.parametrize(
    ("entry", "reopened"),
    [
        ((1, 0, 1, 0, [5, 6]), False),  # known already
        ((1, 0, 1, 5, [1]), True),  # a gap
        ((1, 0, 1, 2, []), True),  # nothing
        ((1, 0, 1, 2, [1000]), True),  # no such token
        ((1, 0, 1, 2, [-1]), True),
        ((1, 0, 1, 2, [1] * 7), True),  # more than asked for
        ((1, 0, 1, 0, [5, 7]), True),  # another token at a position delivered before
        ((1, 0, 2, 2, [1]), False),  # no such attempt
        ((1, 1, 1, 2, [1]), False),  # no such choice
        ((1, -1, 1, 2, [1]), False),
        ((2, 0, 1, 2, [1]), False),  # no such request
    ],
)
def test_only_the_next_position_counts(entry: tuple, reopened: bool) -> None:
    world = World(first, ONE).ready()
    world.submit(LONG, max_tokens=8)
    key = live_key(world, "worker-0")
    client = world.clients[1]
    client.deliver = lambda delivery: client.tokens[0].extend(delivery.token_ids)
    world.handle(e.WorkerMessage(key, Tokens([TokenEntry(1, 0, 1, 0, [5, 6])])))
    world.handle(e.WorkerMessage(key, Tokens([TokenEntry(*entry)])))
    assert client.tokens[0] == [5, 6]
    assert (world.core.state.requests[1].choices[0].num_attempts > 1 or len(world.core.state.queue) > 0) == reopened
    disagrees = entry == (1, 0, 1, 0, [5, 7])
    assert world.core.state.counters["token_disagreements"] == disagrees


def test_overlapping_entries_are_trimmed() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG, max_tokens=8)
    key = live_key(world, "worker-0")
    client = world.clients[1]
    client.deliver = lambda delivery: client.tokens[0].extend(delivery.token_ids)
    world.handle(e.WorkerMessage(key, Tokens([TokenEntry(1, 0, 1, 0, [5, 6])])))
    world.handle(
        e.WorkerMessage(key, Tokens([TokenEntry(1, 0, 1, 1, [6, 7, 8], logprobs=[(-1.0, []), (-2.0, []), (-3.0, [])])]))
    )
    assert client.tokens[0] == [5, 6, 7, 8]


def accepted_by_d(world: World) -> tuple[WorkerKey, WorkerKey]:
    """(P, D) of request 1, which D has room for."""
    p, d = live_key(world, "prefill-0"), live_key(world, "decode-0")
    world._hear(d)
    world._speak(world.workers[d])
    assert isinstance(world.to_engine[p][0], Prefill)
    client = world.clients[1]
    client.deliver = lambda delivery: client.tokens[0].extend(delivery.token_ids)
    return p, d


def test_d_reports_the_token_of_p_so_p_may_be_late() -> None:
    """P's and D's connections are not ordered with each other."""
    world = World(first, SPLIT).ready()
    world.submit(LONG, max_tokens=8)
    p, d = accepted_by_d(world)
    client = world.clients[1]
    world.handle(e.WorkerMessage(d, Tokens([TokenEntry(1, 0, 1, 0, [5])])))
    world.handle(e.WorkerMessage(d, Tokens([TokenEntry(1, 0, 1, 1, [6, 7])])))
    assert client.tokens[0] == [5, 6, 7]
    (attempt,) = world.core.state.requests[1].choices[0].attempts
    assert (attempt.number, attempt.state, attempt.prefill) == (1, AttemptState.RUNNING, None)
    world.handle(e.WorkerMessage(p, Tokens([TokenEntry(1, 0, 1, 0, [5])])))
    world.handle(e.WorkerMessage(d, Tokens([TokenEntry(1, 0, 1, 3, [9])])))
    assert client.tokens[0] == [5, 6, 7, 9]


def test_a_gap_in_what_d_says_ends_its_attempt() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG, max_tokens=8)
    _, d = accepted_by_d(world)
    world.handle(e.WorkerMessage(d, Tokens([TokenEntry(1, 0, 1, 1, [6])])))
    assert world.clients[1].tokens[0] == []
    assert "position 1 after 0" in " ".join(world.core.story(1))
    assert world.core.state.requests[1].choices[0].find(1) is None


def test_a_resumed_attempt_starts_from_prompt_and_committed_tokens() -> None:
    world = World(first, ONE).ready()
    world.submit(LONG, max_tokens=20, seed=8)
    key = live_key(world, "worker-0")
    world._hear(key)
    for _ in range(3):
        world.workers[key].step()
    while world.workers[key].out:
        world._speak(world.workers[key])
    committed = list(world.clients[1].tokens[0])
    assert len(committed) == 3
    world.kill(key, 9)
    for event in world.endings.pop(key):
        world.handle(event)
    world.ready()
    (run,) = world.to_engine[live_key(world, "worker-0")]
    assert (run.work.attempt, run.work.num_prompt, run.work.token_ids) == (2, len(LONG), LONG + committed)
    assert (run.work.params.max_tokens, run.work.params.seed) == (20, 8)
    world.settle()
    assert world.clients[1].finished


def test_the_end_of_an_old_connection_is_not_the_end_of_a_new_one() -> None:
    world = World(first, ONE).ready()
    old = live_key(world, "worker-0")
    world.kill(old, 9)
    world.endings.pop(old)
    world.handle(e.LauncherExited(old, signal=9))
    world.advance(until_ns=SECOND)  # the fence timer: nobody waits for the old connections any longer
    world.ready()
    for process in ("engine", "agent"):
        world.handle(e.ConnectionLost(old, process, "EOF"))
    worker = world.core.state.workers["worker-0"]
    assert (worker.state, worker.agent_open, worker.engine_open) == (WorkerState.READY, True, True)
