"""What checkers once demanded and must not: each of these was a run that was right."""

from types import SimpleNamespace

from relay.control import commands as c
from relay.control.transitions import WorkerState
from relay.ids import WorkerKey
from relay.protocol.messages import HANDED_BACK, Accept, Refuse, Run, SequenceFailed, Work
from relay.protocol.sampling import SamplingParams
from relay.sim.drains import Drains, tells_of_drain
from relay.sim.kernel import Violation
from relay.sim.world import NUMERICS


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
