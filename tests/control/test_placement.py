"""Where a choice goes: roles, prefixes, load, full workers, and what cannot be served at all."""

import pytest
from fake_worker import oracle
from world import World

from relay.control import commands as c
from relay.control import events as e
from relay.control.contract import ModelInfo, Submission
from relay.control.core import GatewayCore
from relay.control.transitions import (
    ATTEMPT_TRANSITIONS,
    CHOICE_TRANSITIONS,
    WORKER_TRANSITIONS,
    AttemptState,
    ChoiceState,
    WorkerState,
)
from relay.control_config import AdmissionConfig, ControlConfig, RetryConfig
from relay.ids import WorkerKey
from relay.protocol.block_hash import root_hash, unit_hashes
from relay.protocol.messages import (
    CacheChanged,
    Cancel,
    Load,
    Orphans,
    Prefill,
    Refuse,
    Reserve,
    Run,
    TokenEntry,
    Tokens,
)
from relay.protocol.sampling import SamplingParams

SPLIT = [("prefill-0", "prefill"), ("decode-0", "decode")]
WIDE = [("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]
LONG = list(range(100, 260))
NO_PARKING = ControlConfig(retry=RetryConfig(park_lease_s=0.0))


def first(n: int) -> int:
    return 0


def sent(world: World, worker: str) -> list:
    return [message for key, queue in world.to_engine.items() if key.worker == worker for message in queue]


def loss(world: World, name: str) -> None:
    """Every process of a worker dies and nothing restarts it."""
    key = next(key for key in world.alive() if key.worker == name)
    world.workers[key].alive = False
    world.handle(e.ConnectionLost(key, "engine", "EOF"))


def hashes(prompt: list[int]) -> list[bytes]:
    return unit_hashes(root_hash("numerics", ""), prompt)


def test_a_long_prompt_is_split_and_a_short_one_is_not() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG)
    world.submit(list(range(63)))
    reserve, run = sent(world, "decode-0")
    assert isinstance(reserve, Reserve)
    assert (reserve.source, reserve.source_incarnation) == ("prefill-0", 1)
    assert isinstance(run, Run)
    assert run.work.token_ids == list(range(63))
    world.settle()
    assert all(client.finished for client in world.clients.values())


def test_accept_sends_p_the_addresses_of_d() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG)
    while not sent(world, "prefill-0"):
        world.run(1)
    (order,) = sent(world, "prefill-0")
    assert isinstance(order, Prefill)
    assert order.addresses == ["tcp://decode-0.1:1"]
    assert (order.target, order.target_incarnation, order.first_token) == ("decode-0", 1, 0)
    assert order.work.token_ids == LONG


def test_a_prompt_cached_on_d_needs_no_p() -> None:
    world = World(first, SPLIT).ready()
    world.handle(e.WorkerMessage(WorkerKey("decode-0", 1), CacheChanged(0, added=hashes(LONG)[:7])))
    world.submit(LONG)
    assert isinstance(sent(world, "decode-0")[0], Run)


def test_the_salt_separates_prefixes() -> None:
    world = World(first, SPLIT).ready()
    world.handle(e.WorkerMessage(WorkerKey("decode-0", 1), CacheChanged(0, added=hashes(LONG))))
    world.submit(LONG, cache_salt="tenant")
    assert isinstance(sent(world, "decode-0")[0], Reserve)


def test_a_gap_in_cache_messages_forgets() -> None:
    world = World(first, SPLIT).ready()
    key = WorkerKey("decode-0", 1)
    world.handle(e.WorkerMessage(key, CacheChanged(0, added=hashes(LONG))))
    world.handle(e.WorkerMessage(key, CacheChanged(2, added=[b"x" * 16])))
    assert world.core.state.workers["decode-0"].cached == {b"x" * 16}
    world.handle(e.WorkerMessage(key, CacheChanged(3, removed=[b"x" * 16])))
    assert not world.core.state.workers["decode-0"].cached


def test_roles_are_preferences() -> None:
    world = World(first, SPLIT).ready()
    loss(world, "decode-0")
    world.submit(LONG)
    assert isinstance(sent(world, "prefill-0")[0], Run)
    world = World(first, SPLIT).ready()
    loss(world, "prefill-0")
    world.submit(LONG)
    assert isinstance(sent(world, "decode-0")[0], Run)


def test_load_spreads_and_a_prefix_attracts() -> None:
    world = World(first, WIDE).ready()
    for start in (1000, 2000):
        world.submit([start % 999 + i for i in range(160)])
    assert [len(sent(world, f"decode-{index}")) for index in range(2)] == [1, 1]
    world = World(first, WIDE).ready()
    world.handle(e.WorkerMessage(WorkerKey("prefill-1", 1), CacheChanged(0, added=hashes(LONG))))
    world.submit(LONG + list(range(100)))
    assert next(m for name in ("decode-0", "decode-1") for m in sent(world, name)).source == "prefill-1"


def test_requests_sharing_a_new_prefix_go_together_until_load_outweighs_it() -> None:
    world = World(first, [("worker-0", "both"), ("worker-1", "both")]).ready()
    for tail in range(6):
        world.submit(LONG + [tail] * 4)
    counts = [len(sent(world, f"worker-{index}")) for index in range(2)]
    assert sorted(counts)[1] >= 4
    assert sum(counts) == 6


def test_a_shared_prefix_crosses_once() -> None:
    """Sixteen requests with one long prefix: the first is split; the others wait for D to have it, and run there."""
    world = World(first, SPLIT).ready()
    for tail in range(6):
        world.submit(LONG + [tail] * 8)
    assert [type(message) for message in sent(world, "decode-0")] == [Reserve]
    world.submit(list(range(500, 700)))  # something else is not held up
    assert [type(message) for message in sent(world, "decode-0")] == [Reserve, Reserve]
    key = WorkerKey("decode-0", 1)
    world.handle(e.WorkerMessage(key, CacheChanged(1, added=hashes(LONG))))
    assert [type(message) for message in sent(world, "decode-0")] == [Reserve, Reserve, *[Run] * 5]


@pytest.mark.parametrize("how", ["cancelled", "killed", "never reported"])
def test_a_broken_promise_of_a_prefix_holds_nobody_up(how: str) -> None:
    world = World(first, SPLIT).ready()
    for tail in range(3):
        world.submit(LONG + [tail] * 8, max_tokens=40)
    if how == "cancelled":
        world.cancel(1)
    elif how == "killed":
        world.kill(WorkerKey("decode-0", 1), 9)
    world.settle()
    assert all(client.finished or client.cancelled for client in world.clients.values())


def test_full_d_then_the_next_then_a_queue_then_computing_there() -> None:
    world = World(first, WIDE, NO_PARKING).ready()
    world.now_ns = 1
    world.submit(LONG)
    tried = []
    for _ in range(2):
        (key, queue), *_ = [(key, queue) for key, queue in world.to_engine.items() if queue]
        message = queue.popleft()
        assert isinstance(message, Reserve)
        tried.append(key.worker)
        work = message.work
        world.handle(e.WorkerMessage(key, Refuse(work.request, work.choice, work.attempt, "full")))
        for queue in world.to_engine.values():  # the Cancel that follows a refusal
            while queue and isinstance(queue[0], Cancel):
                queue.popleft()
    assert sorted(tried) == ["decode-0", "decode-1"]
    assert len(world.core.state.queue) == 1
    world.submit(list(range(10)))  # another one is not held up
    assert any(isinstance(message, Run) for index in range(2) for message in sent(world, f"decode-{index}"))
    world.to_engine.clear()
    for worker in world.core.state.workers.values():
        worker.reserving_refused.blocked = True
    world.now_ns += 600_000_000
    world.core.state.changed = True
    world.handle(e.RequestCancelled(999))  # any event
    runs = [m for index in range(2) for m in sent(world, f"decode-{index}") if isinstance(m, Run)]
    assert [run.work.token_ids for run in runs] == [LONG]


def test_after_a_refusal_one_reservation_at_a_time() -> None:
    world = World(first, SPLIT).ready()
    world.core.state.workers["decode-0"].tight = True
    for start in range(3):
        world.submit([start + 3 * i for i in range(100)])
    assert len(sent(world, "decode-0")) == 1
    world.settle()
    assert all(client.finished for client in world.clients.values())


def test_no_more_than_max_num_seqs_at_once() -> None:
    world = World(first, [("worker-0", "both")]).ready()
    for _ in range(12):
        world.submit(list(range(10)))
    assert len(sent(world, "worker-0")) == 8
    assert len(world.core.state.queue) == 4
    world.settle()
    assert all(client.finished for client in world.clients.values())


def test_requests_wait_while_workers_start() -> None:
    world = World(first, SPLIT)
    assert world.submit(LONG) is None
    assert not world.core.ready()
    world.settle()
    assert world.clients[1].finished


def test_they_wait_only_so_long() -> None:
    config = ControlConfig(admission=AdmissionConfig(no_worker_deadline_s=2.0))
    world = World(first, SPLIT, config)
    world.submit(LONG)
    world.advance(until_ns=3_000_000_000)
    failure = world.clients[1].failure
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "no_workers", 1)


def test_queue_bounds() -> None:
    config = ControlConfig(admission=AdmissionConfig(max_num_queued_reqs=3, max_num_queued_tokens=1000))
    world = World(first, SPLIT, config)
    assert world.submit(LONG, n=3) is None
    failure = world.submit([1])
    assert (failure.status, failure.code, failure.retry_after_s) == (429, "queue_full", 1)
    world = World(first, SPLIT, config)
    assert world.submit(list(range(480))) is None
    assert world.submit(list(range(480))) is None
    assert world.submit(list(range(480))).code == "queue_full"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "kv_blocks", "code"),
    [
        (0, 1, 64, "invalid_prompt"),
        (500, 12, 64, None),
        (500, 13, 64, "context_length_exceeded"),
        (100, 100, 12, "kv_cache_exceeded"),
        (92, 100, 12, None),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    num_prompt: int, max_tokens: int, kv_blocks: int, code: str | None
) -> None:
    world = World(first, SPLIT, kv_blocks=kv_blocks).ready()
    failure = world.submit([1] * num_prompt, max_tokens=max_tokens)
    assert (failure and failure.code) == code
    assert failure is None or failure.status == 400
    assert failure is None or str(num_prompt + max_tokens) in failure.message or num_prompt == 0


def test_what_was_admitted_before_sizes_were_known_fails_clearly() -> None:
    world = World(first, SPLIT, kv_blocks=4)
    assert world.submit(LONG) is None
    world.settle()
    assert world.clients[1].failure.code == "kv_cache_exceeded"


def test_deadline() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG, max_tokens=300, deadline_ns=1_000_000_000)
    world.run(20)
    world.advance(until_ns=1_200_000_000)
    assert world.clients[1].failure.code == "deadline_exceeded"
    for key in world.alive():
        while world.to_engine[key]:
            world._hear(key)
        assert not world.workers[key].sequences


def test_streams_stay_with_their_numerics() -> None:
    core = GatewayCore(
        ControlConfig(), ModelInfo("m", "digest", "", 1000, 512, 0, (0,)), [("a", "both"), ("b", "both")]
    )
    world = World(first, [("a", "both"), ("b", "both")])
    world.core = core
    core.handle(e.Started(), 0)
    for name, numerics in (("a", "one"), ("b", "two")):
        for process in ("agent", "engine"):
            hello = world.workers[WorkerKey(name, 1)].hello(process)
            hello.numerics_id = numerics
            core.handle(e.WorkerConnected(1, hello), 0)
    assert core.state.model.numerics_id == "one"
    world.submit(LONG, max_tokens=30)
    world.workers[WorkerKey("a", 1)].pending_hellos = world.workers[WorkerKey("b", 1)].pending_hellos = []
    while not world.clients[1].tokens[0]:
        world.run(1)
    holder = next(key for key in world.alive() if world.workers[key].sequences)
    world.workers[holder].alive = False
    world.handle(e.ConnectionLost(holder, "engine", "EOF"))
    other = next(key for key in world.alive() if key != holder)
    assert not world.to_engine[other], "continued with other numerics"
    assert len(core.state.queue) == 1


def test_prefill_and_decode_of_a_request_have_equal_numerics() -> None:
    """Found by `relay sim --seed 29`: during an upgrade P and D of different numerics were paired, and the stream got P's."""
    world = World(first, [])
    slots = [("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode")]
    core = world.core = GatewayCore(ControlConfig(), ModelInfo("m", "digest", "", 1000, 512, 0, (0,)), slots)
    world.handle(e.Started())
    for name, numerics in (("prefill-0", "one"), ("prefill-1", "two"), ("decode-0", "two")):
        for process in ("agent", "engine"):
            hello = world.workers[WorkerKey(name, 1)].hello(process)
            hello.numerics_id = numerics
            world.handle(e.WorkerConnected(1, hello))
    world.submit(LONG)
    (reserve,) = sent(world, "decode-0")
    assert reserve.source == "prefill-1"
    loss(world, "prefill-1")
    world.submit(LONG[::-1])
    assert [type(order) for order in sent(world, "decode-0")].count(Run) == 2, "D computes alone what no P may"
    assert not core.state.workers["prefill-0"].live


def skewed() -> World:
    """Workers a and b of numerics "one" and "two"."""
    world = World(first, [])
    slots = [("a", "both"), ("b", "both")]
    config = ControlConfig(shared_workers=True)
    world.core = GatewayCore(config, ModelInfo("m", "digest", "", 1000, 512, 0, (0,)), slots)
    world.handle(e.Started())
    for name, numerics in (("a", "one"), ("b", "two")):
        worker = world.workers[WorkerKey(name, 1)]
        worker.numerics, worker.pending_hellos = numerics, []
        for process in ("agent", "engine"):
            world.handle(e.WorkerConnected(1, worker.hello(process)))
    return world


def test_a_token_of_one_choice_pins_all_of_its_request() -> None:
    """Found by `relay sim --seed 759`: an answer names one numerics id, and all of it was continued with that of one choice."""
    world = skewed()
    world.submit([5] * 4, max_tokens=30, min_tokens=30, n=2)
    request = world.core.state.requests[1]
    assert [choice.attempts[0].decode.id for choice in request.choices] == ["a", "a"]
    entry = TokenEntry(1, 0, 1, 0, [oracle([5] * 4, request.submission.params, 0)[0]])
    commands = world.handle(e.WorkerMessage(WorkerKey("a", 1), Tokens([entry])))
    assert [command.delivery.numerics_id for command in commands if isinstance(command, c.Deliver)] == ["one"]
    loss(world, "a")
    states = [choice.state for choice in request.choices]
    assert states == [ChoiceState.WAITING] * 2, "the second has no token, but its request has one"
    world.submit([6] * 4, n=2)
    assert [choice.attempts[0].decode.id for choice in world.core.state.requests[2].choices] == ["b", "b"]


def test_the_gateway_names_the_numerics_of_the_upgrade_when_nobody_has_the_old_ones() -> None:
    world = skewed()
    assert world.core.state.model.numerics_id == "one"
    world.numerics = "two"
    world.kill(WorkerKey("a", 1), 9)
    for _ in range(100):
        world.run(1)
    assert {worker.numerics_id for worker in world.core.state.workers.values()} == {"two"}
    assert world.core.state.model.numerics_id == "two"


def test_choices_are_not_on_their_way_to_unequal_numerics() -> None:
    """What is left of two gateways that served one client in turn, before it read anything."""
    world = skewed()
    for name, index in (("a", 0), ("b", 1)):
        world.handle(e.WorkerMessage(WorkerKey(name, 1), Orphans([(b"key", index)])))
    world.submit([5] * 4, n=2, resume_key=b"key", returns=True)
    choices = world.core.state.requests[1].choices
    assert {attempt.decode.id for choice in choices for attempt in choice.attempts} == {"a"}


def test_tables_are_closed() -> None:
    """From every state that is not final, END, LOSE or STOP is possible; nothing leaves ENDED."""
    for states, table in ((ChoiceState, CHOICE_TRANSITIONS), (AttemptState, ATTEMPT_TRANSITIONS)):
        for state in states:
            triggers = {trigger.name for source, trigger in table if source is state}
            assert ("END" in triggers) == (state is not states.ENDED)
            assert bool(triggers) == (state is not states.ENDED)
    for worker_state in WorkerState:
        assert "STOP" in {trigger.name for source, trigger in WORKER_TRANSITIONS if source is worker_state}


def test_n_choices_have_their_own_attempts_and_share_the_seed() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG, n=3, seed=9)
    world.handle(e.WorkerMessage(WorkerKey("decode-0", 1), CacheChanged(1, added=hashes(LONG))))
    assert [(type(m), m.work.choice) for m in sent(world, "decode-0")] == [(Reserve, 0)]
    world.core.state.requests[1].choices[0].committed.append(1)  # it has proved harmless: the others may go elsewhere
    world.handle(e.TimerFired(("tick", "")))
    heard = sent(world, "decode-0")
    assert [(type(m), m.work.choice, m.work.params.seed) for m in heard] == [(Reserve, 0, 9), (Run, 1, 9), (Run, 2, 9)]
    world.core.state.requests[1].choices[0].committed.clear()
    world.settle()
    assert set(world.clients[1].finished) == {0, 1, 2}


def test_story_names_the_placements() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG)
    world.kill(WorkerKey("decode-0", 1), 9)
    world.settle()
    story = world.core.story(1)
    assert "prefill-0 → decode-0" in story[0]
    assert any("decode-0 lost" in line for line in story)
    assert world.core.story(77) == []


def test_submission_is_not_changed() -> None:
    world = World(first, SPLIT).ready()
    submission = Submission(list(LONG), SamplingParams(max_tokens=5, seed=1))
    world.submit(submission.token_ids, max_tokens=5)
    world.settle()
    assert submission.token_ids == LONG


def test_a_cancelled_request_is_cancelled_at_both_workers() -> None:
    world = World(first, SPLIT).ready()
    world.submit(LONG)
    while not sent(world, "prefill-0"):
        world.run(1)
    commands = world.handle(e.RequestCancelled(1))
    told = {command.worker.worker: command.message for command in commands if isinstance(command, c.SendToEngine)}
    assert told == {"prefill-0": Cancel(1, 0, 1), "decode-0": Cancel(1, 0, 1)}


def refuse_first(world: World, worker: str = "decode-0") -> None:
    key = WorkerKey(worker, 1)
    work = world.to_engine[key].popleft().work
    world.handle(e.WorkerMessage(key, Refuse(work.request, work.choice, work.attempt, "full")))
    world.to_engine[key].clear()  # the Cancel that follows


def test_a_full_worker_that_says_nothing_is_asked_again_at_the_next_tick() -> None:
    world = World(first, SPLIT, NO_PARKING).ready()
    world.submit(LONG)
    refuse_first(world)
    assert not sent(world, "decode-0")
    world.advance(until_ns=110_000_000)
    assert [type(message) for message in sent(world, "decode-0")] == [Reserve]


def test_an_accepted_reservation_ends_the_caution() -> None:
    world = World(first, SPLIT).ready()
    world.core.state.workers["decode-0"].tight = True
    for start in range(3):
        world.submit([start + 3 * i for i in range(100)])
    assert len(sent(world, "decode-0")) == 1
    key = WorkerKey("decode-0", 1)
    world._hear(key)
    while world.workers[key].out:
        world._speak(world.workers[key])
    assert len(sent(world, "decode-0")) == 2


def test_resumed_choices_go_before_new_ones() -> None:
    world = World(first, [("worker-0", "both")]).ready()
    for index in range(9):
        world.submit([index, index])
    key = WorkerKey("worker-0", 1)
    assert [choice.request.id for choice in world.core.state.queue] == [9]
    world.handle(e.WorkerMessage(key, Refuse(3, 0, 1, "draining")))
    assert [choice.request.id for choice in world.core.state.queue] == [3, 9]


def test_an_engine_whose_queue_is_full_is_not_asked_again_at_once() -> None:
    """Found by `relay sim --seed 1218`: order and refusal chased each other for as long as a step hung."""
    world = World(first, [("worker-0", "both")]).ready()
    world.submit([1, 2])
    key = WorkerKey("worker-0", 1)
    for number in (1, 2):
        world.handle(e.WorkerMessage(key, Refuse(1, 0, number, "full")))
        orders = [message for message in sent(world, "worker-0") if isinstance(message, Run)]
        assert len(orders) == number, "asked again without news"
        world.handle(e.WorkerMessage(key, Load(0, 64, 0, 0, 0)))
    world.settle()
    assert world.clients[1].finished


def test_a_report_without_room_does_not_let_a_full_engine_be_asked_again() -> None:
    """Found by `relay sim --seed 759`: a report that only counted the refusal, or the work of another gateway, did."""
    world = World(first, [("worker-0", "both")]).ready()
    key = WorkerKey("worker-0", 1)

    def asked() -> int:
        return sum(isinstance(message, Run) for message in sent(world, "worker-0"))

    world.handle(e.WorkerMessage(key, Load(60, 64, 8, 2, 40)))
    world.submit([1, 2])
    world.handle(e.WorkerMessage(key, Refuse(1, 0, 1, "full")))
    for busier in (Load(60, 64, 8, 2, 40, {"refused": 1}), Load(64, 64, 8, 3, 80)):
        world.handle(e.WorkerMessage(key, busier))
        assert asked() == 1, "no room was told of"
    world.handle(e.WorkerMessage(key, Load(64, 64, 8, 2, 40)))
    assert asked() == 2, "something has left its queue"
    world.handle(e.WorkerMessage(key, Refuse(1, 0, 2, "full")))
    world.advance(until_ns=110_000_000)
    assert asked() == 3, "the tick asks whatever was told"
