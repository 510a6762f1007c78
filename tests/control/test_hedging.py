"""Second attempts on suspicion: when they are opened, who wins, what they cost, and what a disagreement does."""

import random

import pytest
from world import World

from relay.config import SECOND
from relay.control import commands as c
from relay.control import events as e
from relay.control.invariants import violations
from relay.control.workers import Worker
from relay.control_config import ControlConfig, DetectorConfig, HedgeConfig
from relay.ids import WorkerKey
from relay.protocol.messages import Cancel, ComputedRow, Heartbeat, Refuse, Run, SequenceFailed, TokenEntry, Tokens

ABC = [(name, "both") for name in "abc"]
PROMPT = list(range(20))
RICH = ControlConfig(hedge=HedgeConfig(budget_per_mille=1000))


def first(n: int) -> int:
    return 0


def key(world: World, worker: str) -> WorkerKey:
    return WorkerKey(worker, world.core.state.workers[worker].incarnation)


def tick(world: World) -> list:
    return world.handle(e.TimerFired(("tick", "")))


def say(world: World, worker: str, attempt: int, position: int, tokens: list[int], logprobs=None, finish=None) -> list:
    entry = TokenEntry(1, 0, attempt, position, tokens, finish, logprobs)
    return world.handle(e.WorkerMessage(key(world, worker), Tokens([entry])))


def go_silent(world: World, worker: str) -> None:
    """``worker`` has not been heard for longer than suspicion needs, all others have; then a tick passes."""
    quiet_ns = int(world.core.state.config.detector.suspect_after_s * SECOND) + 1
    ticked = world.core._detector
    world.now_ns += quiet_ns
    ticked._last_tick_ns = world.now_ns - 1  # no stall of our own
    for other in world.core.state.workers.values():
        if other.id != worker:
            other.heard_ns = world.now_ns
    tick(world)


def choice_of(world: World):
    return world.core.state.requests[1].choices[0]


def hedged(workers=ABC, config: ControlConfig = RICH, committed: int = 2, max_tokens: int = 30) -> World:
    """One request on the first worker, which is silent; its hedge runs on the second. Tokens are 100, 101, …"""
    world = World(first, workers, config).ready()
    world.submit(PROMPT, max_tokens=max_tokens)
    world.clients[1].deliver = lambda delivery: world.clients[1].tokens[0].extend(delivery.token_ids)
    if committed:
        say(world, "a", 1, 0, list(range(100, 100 + committed)))
    go_silent(world, "a")
    return world


def runs(world: World, worker: str) -> list[Run]:
    return [m for m in world.to_engine[key(world, worker)] if isinstance(m, Run)]


def cancels(commands: list) -> list[tuple[str, int]]:
    return [
        (command.worker.worker, command.message.attempt)
        for command in commands
        if isinstance(command, c.SendToEngine) and isinstance(command.message, Cancel)
    ]


def numbers(world: World) -> list[int]:
    return [attempt.number for attempt in choice_of(world).attempts]


def test_a_doubted_worker_s_choice_gets_a_second_attempt_from_committed_tokens() -> None:
    world = hedged()
    (run,) = runs(world, "b")
    assert (run.work.attempt, run.work.token_ids) == (2, [*PROMPT, 100, 101])
    assert numbers(world) == [1, 2]
    assert world.core.state.counters["hedges"] == 1
    tick(world)
    assert numbers(world) == [1, 2], "one hedge, not one a tick"


def test_an_attempt_s_work_does_not_change_with_what_another_commits() -> None:
    workers = [("a", "decode"), ("b", "decode"), ("p", "prefill"), ("q", "prefill")]
    world = World(first, workers, RICH).ready()
    world.submit(list(range(100)), max_tokens=30)
    world.clients[1].deliver = lambda delivery: None
    world._hear(key(world, "a"))
    world._speak(world.workers[key(world, "a")])
    say(world, "p", 1, 0, [100])
    say(world, "a", 1, 1, [101])
    go_silent(world, "a")
    reserve = world.to_engine[key(world, "b")][-1]
    say(world, "a", 1, 2, [102, 103])
    world._hear(key(world, "b"))
    world._speak(world.workers[key(world, "b")])
    source = reserve.source
    order = world.to_engine[key(world, source)][-1]
    assert order.work.token_ids == reserve.work.token_ids == [*range(100), 100, 101]


def test_the_hedge_wins_by_a_new_token() -> None:
    world = hedged()
    assert cancels(say(world, "b", 2, 2, [102])) == [("a", 1)]
    assert numbers(world) == [2]
    assert world.clients[1].tokens[0] == [100, 101, 102]
    assert say(world, "a", 1, 3, [103]) == [], "the older attempt is over"
    assert world.core.state.counters["hedges_won"] == 1


def test_the_older_attempt_wins_when_nobody_doubts_it_any_more() -> None:
    world = hedged()
    assert cancels(say(world, "a", 1, 2, [102])) == [], "its worker is still doubted: both go on"
    assert numbers(world) == [1, 2]
    world.handle(e.WorkerMessage(key(world, "a"), Heartbeat(0, "ready", 0, "S")))
    assert cancels(say(world, "a", 1, 3, [103])) == [("b", 2)]
    assert numbers(world) == [1]
    assert world.clients[1].tokens[0] == [100, 101, 102, 103]
    world.core.state.counters["tokens"] += 1000  # work of others: it pays
    go_silent(world, "a")
    assert numbers(world) == [1, 3], "a new doubt may have a new hedge"


def test_a_hedge_that_only_repeats_does_not_win() -> None:
    world = hedged()
    say(world, "a", 1, 2, [102, 103])
    assert cancels(say(world, "b", 2, 2, [102])) == []
    assert numbers(world) == [1, 2]
    assert cancels(say(world, "b", 2, 3, [103, 104])) == [("a", 1)]
    assert world.clients[1].tokens[0] == [100, 101, 102, 103, 104]


def test_a_finish_ends_both() -> None:
    world = hedged()
    assert cancels(say(world, "b", 2, 2, [102], finish="stop")) == [("a", 1)]
    assert world.clients[1].ended
    assert not world.core.state.requests
    assert not any(worker.live for worker in world.core.state.workers.values())


def test_a_client_that_leaves_cancels_both() -> None:
    world = hedged()
    assert sorted(cancels(world.handle(e.RequestCancelled(1)))) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize(("lost", "left"), [("a", 2), ("b", 1)])
def test_when_one_s_worker_dies_the_other_goes_on_and_nothing_is_placed(lost: str, left: int) -> None:
    world = hedged()
    commands = world.handle(e.ConnectionLost(key(world, lost), "agent", "EOF"))
    assert numbers(world) == [left]
    assert not [x for x in commands if isinstance(x, c.SendToEngine) and isinstance(x.message, Run)]
    assert world.core.state.counters["resumed"] == 0
    say(world, "b" if lost == "a" else "a", left, 2, [102])
    assert world.clients[1].tokens[0] == [100, 101, 102]


def test_a_failed_hedge_does_not_fail_the_request() -> None:
    for message in (Refuse(1, 0, 2, "too_long"), Refuse(1, 0, 2, "full"), SequenceFailed(1, 0, 2, "NaN", False)):
        world = hedged()
        world.core.state.counters["tokens"] += 1000  # there would be budget for more
        world.handle(e.WorkerMessage(key(world, "b"), message))
        assert world.clients[1].failure is None
        assert numbers(world) == [1]
        assert not choice_of(world).full_since_ns
        world.handle(e.TimerFired(("tick", "")))
        assert numbers(world) == [1], "one hedge an attempt"


def test_a_frozen_or_dead_worker_s_choices_move_at_once_and_are_no_hedges() -> None:
    world = World(first, ABC, RICH).ready()
    world.submit(PROMPT)
    world.handle(e.ConnectionLost(key(world, "a"), "agent", "EOF"))
    assert numbers(world) == [2]
    assert world.core.state.counters["hedges"] == 0


def test_a_step_far_older_than_usual_is_doubted_before_its_deadline() -> None:
    world = World(first, ABC, RICH).ready()
    world.submit(PROMPT)
    a = key(world, "a")
    worker = world.core.state.workers["a"]
    world.handle(e.WorkerMessage(a, Heartbeat(10, "stepping", 5, "S")))
    world.now_ns += SECOND // 2
    world.handle(e.WorkerMessage(a, Heartbeat(11, "stepping", 5, "S")))
    assert worker.step_ns == SECOND // 2
    for age_ms, doubted in ((1000, False), (2500, False), (4100, True), (10, False)):
        world.handle(e.WorkerMessage(a, Heartbeat(11, "stepping", age_ms, "S")))
        tick(world)
        assert worker.slow == doubted, age_ms
    assert world.core.state.counters["hedges"] == 1
    worker.step_ns = 0
    world.handle(e.WorkerMessage(a, Heartbeat(11, "stepping", 1900, "S")))
    tick(world)
    assert not worker.slow, "younger than slow_step_s"


def test_half_of_the_workers_doubted_at_once_means_doubt_of_ourselves() -> None:
    world = World(first, [(name, "both") for name in "abcd"], RICH).ready()
    world.submit(PROMPT)
    state = world.core.state
    for name in "ab":
        state.workers[name].suspect = True
    world.core._hedger.tick(world.now_ns)
    assert state.counters["hedges"] == 0
    state.workers["b"].suspect = False
    world.core._hedger.tick(world.now_ns)
    assert state.counters["hedges"] == 1


def test_no_hedge_goes_to_a_worker_that_begins_to_drain_in_the_same_tick() -> None:
    """Found by `relay sim --seed 6546`: it was sent there first, and had to end at once."""
    world = World(first, ABC, RICH).ready()
    world.submit(PROMPT, max_tokens=30)
    world.clients[1].deliver = lambda delivery: None
    say(world, "a", 1, 0, [100, 101])
    world.handle(e.LeaveOrdered(("b",), rolling=True))
    go_silent(world, "a")
    assert [attempt.decode.id for attempt in choice_of(world).attempts] == ["a", "c"]
    assert runs(world, "b") == []


def test_hedges_cost_at_most_their_share_of_all_work() -> None:
    world = World(first, ABC).ready()  # 50 per mille
    world.clients[1] = None
    for index in range(6):
        world.submit([index] * 40, max_tokens=30)
    state = world.core.state
    go_silent(world, "a")
    assert state.workers["a"].live
    assert state.counters["hedges"] == 0, "240 tokens allow 12 extra"
    state.counters["tokens"] += 1000
    tick_work = state.counters["tokens"] + state.counters["prompt_tokens"]
    world.core._hedger.tick(world.now_ns)
    assert state.counters["hedges"] == 1
    assert state.counters["hedge_tokens"] * 1000 <= 50 * tick_work


def test_repeated_positions_are_paid_for() -> None:
    world = hedged()
    say(world, "a", 1, 2, [102, 103, 104])
    before = world.core.state.hedge_budget.tokens
    say(world, "b", 2, 2, [102, 103])
    assert world.core.state.hedge_budget.tokens == before - 2


def test_hedges_can_be_turned_off() -> None:
    world = hedged(config=ControlConfig(hedge=HedgeConfig(budget_per_mille=0)))
    assert numbers(world) == [1]


def test_what_may_crash_engines_gets_no_hedge() -> None:
    world = World(first, ABC, RICH).ready()
    world.submit(PROMPT)
    choice_of(world).request.suspicion.blames = 1
    go_silent(world, "a")
    assert numbers(world) == [1]


@pytest.mark.parametrize(("others", "expected"), [(0, [1, 2]), (1, [1])])
def test_the_long_step_itself_does_not_speak_against_what_is_in_it(others: int, expected: list[int]) -> None:
    world = World(first, ABC, RICH).ready()
    world.submit(PROMPT)
    choice_of(world).request.suspicion.unexplained += others  # a loss before this one: then it does
    world.core.state.workers["c"].unexplained += [choice_of(world).request] * others
    row = ComputedRow(1, 0, 1, len(PROMPT))
    world.handle(e.WorkerMessage(key(world, "a"), Heartbeat(11, "stepping", 2500, "S", [row])))
    assert choice_of(world).request.suspicion.total == 1 + others
    tick(world)
    assert numbers(world) == expected


@pytest.mark.parametrize(("committed", "hedges"), [(False, 0), (True, 1)])
def test_choices_of_one_request_do_not_hang_engine_after_engine(committed: bool, hedges: int) -> None:
    """Found by `relay sim --seed 65`: hedges of both choices of a poison request hung two more engines, four in all."""
    world = World(first, ABC, RICH).ready()
    world.submit(PROMPT, n=2)
    world.clients[1].deliver = lambda delivery: None
    if committed:
        say(world, "a", 1, 0, [100])
    world.core.state.counters["tokens"] += 1000
    for name in "ab":
        world.handle(e.WorkerMessage(key(world, name), Heartbeat(11, "stepping", 2500, "S")))
    world.core.state.workers["b"].beat = None
    tick(world)
    tick(world)
    assert world.core.state.counters["hedges"] == hedges


def test_a_hedge_stays_within_its_numerics() -> None:
    world = World(first, ABC, RICH).ready()
    world.submit(PROMPT)
    for name in "bc":
        world.core.state.workers[name].engine.numerics_id = "other"
    go_silent(world, "a")
    assert numbers(world) == [1]


def test_a_hedge_goes_nowhere_rather_than_to_another_bad_worker() -> None:
    slots = [(name, "both") for name in "abcde"]
    for bad in ("doubted", "breaker", "numerics"):
        world = World(first, slots, RICH).ready()
        world.submit(PROMPT)
        state = world.core.state
        for name in "cde" if bad != "numerics" else "bcde":
            state.workers[name].engine.numerics_id = "other"
        if bad == "breaker":
            for _ in range(10):
                state.breakers.workers["b"].failed(world.now_ns + int(1.1 * SECOND))
        state.workers["a"].suspect = True
        state.workers["b"].suspect = bad == "doubted"
        state.counters["tokens"] += 1000
        world.core._hedger.tick(world.now_ns + int(1.2 * SECOND))
        assert numbers(world) == [1], bad
        state.workers["b"].suspect = False
        world.core._hedger.tick(world.now_ns + 60 * SECOND)
        assert numbers(world) == ([1] if bad == "numerics" else [1, 2])


# --- disagreement -----------------------------------------------------------------------------------------------------


def disagree(world: World) -> list:
    say(world, "a", 1, 2, [102, 103])
    return say(world, "b", 2, 2, [102, 999, 104])


def test_a_disagreement_rings_and_a_third_worker_decides_from_there() -> None:
    world = hedged()
    commands = disagree(world)
    assert sorted(cancels(commands)) == [("a", 1), ("b", 2)]
    assert world.clients[1].tokens[0] == [100, 101, 102, 103], "nothing of the disputed entry is delivered"
    assert world.core.state.counters["token_disagreements"] == 1
    healthy, reason = world.core.health(world.now_ns)
    assert not healthy
    assert "disagree on token 3 of request 1" in reason
    assert any("ALARM" in line for line in world.core.story(1))
    (run,) = runs(world, "c")
    assert (run.work.attempt, run.work.token_ids) == (3, [*PROMPT, 100, 101, 102])
    say(world, "c", 3, 3, [103])
    say(world, "c", 3, 4, [104])
    assert world.clients[1].tokens[0] == [100, 101, 102, 103, 104], "two of three agree"
    assert not world.core.health(world.now_ns)[0], "the alarm stays"


def test_after_the_decision_a_resume_starts_from_all_that_is_committed() -> None:
    world = hedged(workers=[(name, "both") for name in "abcd"])
    disagree(world)
    say(world, "c", 3, 3, [103, 104])
    world.handle(e.ConnectionLost(key(world, "c"), "agent", "EOF"))
    (run,) = runs(world, "d")
    assert run.work.token_ids == [*PROMPT, 100, 101, 102, 103, 104]


def test_a_third_answer_ends_the_request_with_an_error() -> None:
    world = hedged()
    disagree(world)
    say(world, "c", 3, 3, [777])
    assert world.clients[1].failure.code == "token_disagreement"
    assert world.core.state.counters["token_disagreements"] == 2
    assert not world.core.state.requests


def test_without_a_third_worker_the_request_ends_with_an_error() -> None:
    world = hedged(workers=ABC[:2])
    disagree(world)
    assert not runs(world, "a")[1:]
    assert not runs(world, "b")[1:]
    tick(world)
    assert world.clients[1].failure.code == "token_disagreement"
    assert world.clients[1].failure.status == 500


def test_a_third_worker_that_is_on_its_way_is_waited_for() -> None:
    world = hedged()
    world.handle(e.ConnectionLost(key(world, "c"), "agent", "EOF"))
    disagree(world)
    tick(world)
    assert world.clients[1].failure is None
    world.kill(WorkerKey("c", 1), 9)
    for event in world.endings.pop(WorkerKey("c", 1)):
        world.handle(event)
    world.ready()
    assert [run.work.attempt for run in runs(world, "c")] == [3]


@pytest.mark.parametrize(("logprob", "rings"), [(-1.5, False), (-1.25, True)])
def test_logprobs_are_compared_too(logprob: float, rings: bool) -> None:
    world = hedged()
    say(world, "a", 1, 2, [102, 103], [(-0.5, [(102, -0.5)]), (-1.5, [])])
    say(world, "b", 2, 2, [102, 103], [(-0.5, [(102, -0.5)]), (logprob, [])])
    assert world.core.state.counters["token_disagreements"] == rings


def test_an_end_that_the_other_went_past_is_a_disagreement() -> None:
    world = hedged()
    say(world, "a", 1, 2, [102, 103])
    say(world, "b", 2, 2, [102], finish="stop")
    assert world.core.state.counters["token_disagreements"] == 1
    assert not world.clients[1].ended


def test_evidence_outlives_the_older_attempt() -> None:
    world = hedged()
    say(world, "a", 1, 2, [102, 103], [(-0.5, []), (-1.5, [])])
    world.handle(e.ConnectionLost(key(world, "a"), "agent", "EOF"))
    say(world, "b", 2, 2, [102, 103], [(-0.5, []), (-1.0, [])])
    assert world.core.state.counters["token_disagreements"] == 1
    assert set(choice_of(world).distrusted) == {"a", "b"}


# --- at random --------------------------------------------------------------------------------------------------------

SHAPES = [
    [(name, "both") for name in "abc"],
    [(name, "prefill") for name in "pq"] + [(name, "decode") for name in "def"],
]


def test_hedges_under_random_doubt_are_exact_and_leave_nothing() -> None:
    """Workers are silent for a while, resume, or die; every client gets the oracle's tokens, and hedges end both ways."""
    config = ControlConfig(
        detector=DetectorConfig(suspect_after_s=0.25, dead_after_s=3.0), hedge=HedgeConfig(budget_per_mille=1000)
    )
    opened = won = settled = 0
    for seed in range(40):
        rng = random.Random(seed)
        world = World(rng.randrange, SHAPES[seed % 2], config, kv_blocks=400).ready()
        for index in range(10):
            prompt = [rng.randrange(1000) for _ in range(rng.choice([5, 70, 150]))]
            world.submit(prompt, max_tokens=60, n=rng.choice([1, 2]), seed=index)
            world.silent = {k for k in world.alive() if rng.random() < 0.2}
            for _ in range(rng.randrange(8)):
                world.run(rng.randrange(6))
                world.advance()
            if rng.random() < 0.1:
                world.kill(rng.choice(world.alive()), 9)
        world.silent = set()
        world.settle()
        assert not violations(world.core.state)
        assert not world.core.state.requests
        assert not world.core.state.counters["token_disagreements"]
        for client in world.clients.values():
            assert client.failure is None
            assert len(client.finished) == client.submission.n
        for worker in world.workers.values():
            assert not worker.alive or not (worker.sequences or worker.prefills)
        opened += world.core.state.counters["hedges"]
        won += world.core.state.counters["hedges_won"]
        settled += sum(text.endswith("goes on") for _, _, _, text in world.core.state.story._ring)
    assert opened > 50
    assert won > 10
    assert settled > 5


def test_a_worker_is_doubted_for_silence_or_slowness() -> None:
    worker = Worker("w", "both")
    assert not worker.doubted
    worker.slow = True
    assert worker.doubted
