"""What checkers once demanded and must not: each of these was a run that was right."""

from types import SimpleNamespace

from relay.control import commands as c
from relay.control.contract import Delivery, RequestFailure, Submission
from relay.control.transitions import WorkerState
from relay.ids import WorkerKey
from relay.protocol.messages import HANDED_BACK, Accept, Refuse, Run, SequenceFailed, Work
from relay.protocol.sampling import SamplingParams
from relay.sim.backend import Oracle
from relay.sim.clients import Client, Expectation, Oracles
from relay.sim.drains import Drains, tells_of_drain
from relay.sim.judge import judge
from relay.sim.kernel import Violation
from relay.sim.world import NEXT_NUMERICS, NUMERICS

MAX_LEN = 64


def client() -> Client:
    submission = Submission([1, 2, 3], SamplingParams(max_tokens=6, seed=1))
    made = Client(1, submission, Expectation(), Oracles(MAX_LEN))
    made.begin([NUMERICS])
    return made


def tokens(numerics: str) -> list[int]:
    submission = client().submission
    return Oracle(numerics, submission.token_ids, submission.params, 0, MAX_LEN).outputs


def broken(call) -> bool:
    try:
        call()
    except Violation:
        return True
    return False


def test_who_lost_all_it_had_read_may_be_answered_with_other_numerics() -> None:
    """Found by `relay sim --seed 1138`."""
    both = [NUMERICS, NEXT_NUMERICS]
    for unread, right in ((2, True), (1, False)):
        asks = client()
        asks.deliver(Delivery(0, 0, tokens(NUMERICS)[:2], None))
        asks.lose(unread, both)
        asks.again(2, "gateway-1")
        assert broken(lambda: asks.deliver(Delivery(0, 0, tokens(NEXT_NUMERICS)[:2], None))) is not right  # noqa: B023


def test_a_poison_may_end_the_last_worker_of_a_streams_numerics() -> None:
    """Found by `relay sim --seed 1350`."""
    failure = RequestFailure(503, "numerics_changed", "", 1)
    for crashes in (0, 1):
        world = SimpleNamespace(
            kernel=SimpleNamespace(sometimes=lambda name: None, now_ns=0),
            num_faults=0,
            phase="chaos",
            numerics=[NUMERICS, NEXT_NUMERICS],
            poison_crashes=crashes,
            wrong_machines=0,
            step_errors=0,
            faults={"crash_engine": 0},
            swarm=SimpleNamespace(slots=[1, 2], gateways=("gateway-0",)),
        )
        assert broken(lambda: judge(world, client(), failure, refused=False)) is (crashes == 0)  # noqa: B023


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
