"""The simulated clients and what they are promised: one numerics id an answer, and nothing of what they have lost."""

import pytest

from relay.control.contract import Delivery, RequestFailure, Submission
from relay.protocol.sampling import SamplingParams
from relay.sim.clients import Client, Expectation, Oracles
from relay.sim.judge import judge
from relay.sim.kernel import Violation
from relay.sim.tape import Tape
from relay.sim.world import World

OLD, NEW = "numerics-1", "numerics-2"


def asking(n: int = 2) -> Client:
    submission = Submission([1, 2, 3], SamplingParams(max_tokens=20, min_tokens=20, seed=7), n, resume_key=b"key")
    client = Client(1, submission, Expectation(), Oracles(64))
    client.begin([OLD, NEW])
    client.gateway = "gateway-0"
    return client


def tell(client: Client, choice: int, numerics: str, count: int = 1, named: str = "") -> None:
    """The next ``count`` tokens of ``choice``, computed with ``numerics``."""
    said = len(client.answers[choice])
    outputs = client.oracles.get(client.request, client.submission, choice, numerics).outputs
    client.deliver(Delivery(choice, said, outputs[said : said + count], numerics_id=named or numerics))


def test_all_choices_of_an_answer_are_of_one_numerics_id() -> None:
    client = asking()
    tell(client, 0, NEW)
    with pytest.raises(Violation, match="I13"):
        tell(client, 1, OLD)


def test_an_answer_must_be_of_the_numerics_it_names() -> None:
    with pytest.raises(Violation, match="I1"):
        tell(asking(), 0, OLD, 20, named=NEW)


def test_who_has_lost_everything_may_be_answered_with_any_numerics() -> None:
    """Found by `relay sim --seed 346` and `1138`, where it had to get what it did not have any more."""
    client = asking()
    tell(client, 0, OLD, 3)
    client.lose(3, [OLD, NEW])
    assert client.again(2, "gateway-1").numerics_id == ""
    tell(client, 0, NEW, 3)


def test_who_has_anything_comes_back_for_the_same_numerics_in_every_choice() -> None:
    client = asking()
    tell(client, 0, OLD, 3)
    tell(client, 1, OLD)
    client.lose(1, [OLD, NEW])
    assert client.again(2, "gateway-1").numerics_id == OLD
    with pytest.raises(Violation, match="I13"):
        tell(client, 1, NEW)


def test_poison_may_take_the_last_worker_of_the_old_numerics() -> None:
    """Found by `relay sim --seed 796` and `810`: only injected faults excused what a crash does, whatever its cause."""
    world, client = World(Tape(1)), asking()
    gone = RequestFailure(503, "numerics_changed", "")
    world.upgrade()
    with pytest.raises(Violation, match="I5"):
        judge(world, client, gone, refused=False)
    world.poison_crashes = 1
    judge(world, client, gone, refused=False)
