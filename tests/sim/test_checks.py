"""What checkers once demanded and must not: each of these was a run that was right."""

from types import SimpleNamespace

import pytest

from relay.control import commands as c
from relay.control import events as e
from relay.control.contract import RequestFailure, Submission
from relay.control.transitions import WorkerState
from relay.ids import WorkerKey
from relay.protocol.messages import HANDED_BACK, Accept, Refuse, Run, SequenceFailed, Work
from relay.protocol.sampling import SamplingParams
from relay.sim.clients import Client, Expectation, Oracles
from relay.sim.drains import Drains, tells_of_drain
from relay.sim.judge import judge
from relay.sim.kernel import Violation
from relay.sim.tape import Tape
from relay.sim.world import NUMERICS, World


def broken(call) -> bool:
    try:
        call()
    except Violation:
        return True
    return False


def test_a_refusal_may_tell_of_a_drain_whatever_attempt_it_names() -> None:
    """Found by `relay sim --seed 2460`: an old attempt was refused, and the present one was moved off the draining worker."""
    assert tells_of_drain(Refuse(1, 0, 1, "draining"))
    assert tells_of_drain(SequenceFailed(1, 0, 1, HANDED_BACK, True))
    assert not tells_of_drain(Refuse(1, 0, 1, "full"))
    assert not tells_of_drain(SequenceFailed(1, 0, 1, "source lost", True))
    assert not tells_of_drain(Accept(1, 0, 1, 7, 0))


def test_a_stream_from_another_gateway_may_go_to_the_last_worker_of_its_numerics() -> None:
    """Found by `relay sim --seed 1468`: its first attempt here is not the first there ever was."""
    key = WorkerKey("worker-0", 1)
    worker = SimpleNamespace(id="worker-0", key=key, state=WorkerState.DRAINING)
    work = Work(request=5, choice=0, attempt=1, token_ids=[1], num_prompt=1, params=SamplingParams(max_tokens=4))
    for numerics in (None, NUMERICS):
        request = SimpleNamespace(numerics_id=numerics)
        state = SimpleNamespace(
            workers={"worker-0": worker}, requests={5: request}, last_of_their_kind=lambda: [worker]
        )
        node = SimpleNamespace(core=SimpleNamespace(state=state))
        drains = Drains(SimpleNamespace())
        assert broken(lambda: drains.sent(node, [c.SendToEngine(key, Run(work))])) is (numerics is None)  # noqa: B023


@pytest.mark.parametrize("too_many", [0, 1])
def test_what_fits_no_worker_may_fail_after_it_was_taken(too_many: int) -> None:
    """Found by `relay sim --seed 624461977936`: its gateway had just started again and had not seen a worker yet."""
    world = World(Tape(1))
    params = SamplingParams(max_tokens=world.swarm.kv_tokens - 2 + too_many)
    client = Client(9, Submission([5, 6], params), Expectation(), Oracles(64))
    failure = RequestFailure(400, "kv_cache_exceeded", "")
    assert broken(lambda: judge(world, client, failure, refused=False)) is (too_many == 0)


def test_every_crashing_start_counts_for_a_crash_loop() -> None:
    """Found by `relay sim --seed 654105926135`: one fault, six starts that crashed, and then the only worker drained."""
    world = World(Tape(1))
    worker = next(iter(world.swarm.slots))[0]
    world.workers[worker] = SimpleNamespace(running=object())
    client = Client(9, Submission([5, 6], SamplingParams(max_tokens=1)), Expectation(faults_before=1), Oracles(64))
    failure = RequestFailure(503, "no_workers", "", 1.0)
    world.num_faults = 1
    enough = world.swarm.control.restart.crash_loop_failures
    for starts in range(enough):
        world.crashed_starts = starts
        few = starts + 1 < enough
        assert broken(lambda: judge(world, client, failure, refused=True)) is few


def test_only_an_engine_that_drains_may_say_so() -> None:
    engine = SimpleNamespace(core=SimpleNamespace(draining=False))
    drains = Drains(SimpleNamespace(engine=lambda key: engine))
    said = e.WorkerMessage(WorkerKey("worker-0", 1), SequenceFailed(1, 0, 1, HANDED_BACK, True))
    assert broken(lambda: drains.before(SimpleNamespace(), said))
    engine.core.draining = True
    assert not broken(lambda: drains.before(SimpleNamespace(), said))
