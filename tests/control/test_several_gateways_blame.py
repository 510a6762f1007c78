"""Blame where several gateways share the workers: who sees an engine hang may not be who has the request."""

from test_gateways import SECOND, Gateway

from relay.control import commands as c
from relay.control import events as e
from relay.control.transitions import ChoiceState
from relay.ids import WorkerKey
from relay.protocol.messages import ComputedRow, EngineExited, Heartbeat, SequenceFailed

SLOTS = [(f"worker-{index}", "both") for index in range(4)]
REQUEST = 5


def two_gateways() -> tuple[Gateway, Gateway]:
    pair = Gateway(SLOTS), Gateway(SLOTS, gateway="gateway-2", epoch=8)
    for gateway in pair:
        for worker, _ in SLOTS:
            gateway.connect(worker)
    return pair


def place(own: Gateway) -> WorkerKey:
    (attempt,) = own.core.state.requests[REQUEST].choices[0].attempts
    return attempt.decode.key


def hung_beat(age_ms: int) -> Heartbeat:
    return Heartbeat(1, "stepping", age_ms, "S", [ComputedRow(REQUEST, 0, 1, 160)], True)


def test_a_hang_that_another_gateway_noticed_is_blamed_by_the_requests_own() -> None:
    """Found by seeds 297 and 6197: the own gateway saw a worker that was killed, and the poison hung a fourth engine."""
    own, other = two_gateways()
    own.submit(REQUEST)
    suspicion = own.core.state.requests[REQUEST].suspicion
    for number in (1, 2):
        key = place(own)
        said = other.say(key.worker, hung_beat(10_001), key.incarnation)
        (stop,) = [command for command in said if isinstance(command, c.StopWorker)]
        assert stop.kill
        for process in ("engine", "agent"):
            own.lose(key.worker, process, key.incarnation)
        own.handle(e.LauncherExited(key, signal=9, engine=stop.word))  # the launcher passes the word on
        assert (suspicion.blames, suspicion.unexplained) == (number, 0)
        own.handle(e.TimerFired(("tick", "")))
    key = place(own)
    assert own.core.state.requests[REQUEST].choices[0].attempts[0].solo_until == 160
    (stop,) = [x for x in other.say(key.worker, hung_beat(10_001), key.incarnation) if isinstance(x, c.StopWorker)]
    said = own.handle(e.LauncherExited(key, signal=9, engine=stop.word))
    assert [command.failure.code for command in said if isinstance(command, c.Fail)] == ["quarantined"]


def test_both_that_notice_blame_once() -> None:
    own, other = two_gateways()
    own.submit(REQUEST)
    key = place(own)
    suspicion = own.core.state.requests[REQUEST].suspicion
    own.say(key.worker, hung_beat(10_001))
    (stop,) = [x for x in other.say(key.worker, hung_beat(10_101)) if isinstance(x, c.StopWorker)]
    own.handle(e.LauncherExited(key, signal=9, engine=stop.word))
    assert suspicion.blames == 1


def test_a_hang_told_by_the_launcher_is_no_kill_by_somebody() -> None:
    """Kills are forgiven without end; a worker whose engine hangs again and again is started ever later."""
    own, _ = two_gateways()
    word = EngineExited(hung_ms=10_001)
    for life in range(1, 4):
        own.handle(e.LauncherExited(WorkerKey("worker-0", life), signal=9, engine=word))
        if life < 3:
            if own.core.state.workers["worker-0"].incarnation == life:
                own.fire("launch", "worker-0")
            own.connect("worker-0", life + 1)
    worker = own.core.state.workers["worker-0"]
    assert worker.failures == 3
    assert worker.last_cause == "no progress in a step for 10001 ms"


def test_what_a_rejoined_engine_may_still_compute_counts_until_its_steps_are_over() -> None:
    """A worker that was out of sight is explained; the step of a suspect that hangs there is not."""
    own, _ = two_gateways()
    own.submit(REQUEST)
    choice = own.core.state.requests[REQUEST].choices[0]
    suspicion = choice.request.suspicion
    first = place(own)
    for process in ("engine", "agent"):
        own.lose(first.worker, process)
    own.connect(first.worker)
    assert own.core.state.workers[first.worker].incarnation == 1, "the same life"
    assert suspicion.total == 1
    second = place(own)
    assert second.worker != first.worker
    for process in ("engine", "agent"):
        own.lose(second.worker, process)
    assert choice.state is ChoiceState.WAITING, "both may hang: a third must wait"
    own.now_ns += SECOND
    own.say(first.worker, Heartbeat(4, "stepping", 20, "S"))
    assert choice.state is ChoiceState.WAITING
    own.say(first.worker, Heartbeat(6, "stepping", 20, "S"))
    assert choice.state is ChoiceState.PLACED


def test_a_step_left_behind_on_a_worker_that_is_lost_then_counts_until_its_end_is_known() -> None:
    own, _ = two_gateways()
    own.submit(REQUEST)
    choice = own.core.state.requests[REQUEST].choices[0]
    key = place(own)
    own.say(key.worker, Heartbeat(1, "stepping", 900, "S", [ComputedRow(REQUEST, 0, 1, 160)], True))
    own.say(key.worker, SequenceFailed(REQUEST, 0, 1, "source silent", True))
    assert choice.request.suspicion.total == 1
    own.lose(key.worker, "agent")
    assert choice.request.suspicion.total == 1, "it had left that worker, its step had not"
    own.handle(e.LauncherExited(key, signal=9))
    assert choice.request.suspicion.total == 0
