"""One gateway among several: taking over what another one left, and workers whose connection alone was lost."""

import msgspec
import pytest
from world import MODEL

from relay.control import commands as c
from relay.control import events as e
from relay.control.contract import Submission
from relay.control.core import GatewayCore
from relay.control.invariants import violations
from relay.control.transitions import WorkerState
from relay.control_config import ControlConfig
from relay.ids import WorkerKey, first_id
from relay.protocol.messages import EngineExited, Hello, Orphans, Reserve, Run, TokenEntry, Tokens
from relay.protocol.sampling import SamplingParams

SPLIT = [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]
LONG = list(range(100, 260))
KEY = b"k" * 16
SECOND = 1_000_000_000


class Gateway:
    """A core, its time, and the commands it gave for each event."""

    def __init__(self, slots=SPLIT, **config):
        self.now_ns = 0
        settings = {"gateway": "gateway-1", "epoch": 7, "shared_workers": True} | config
        self.core = GatewayCore(ControlConfig(**settings), MODEL, slots)
        self.timers = {}
        self.handle(e.Started())

    def handle(self, event):
        commands = self.core.handle(event, self.now_ns)
        assert violations(self.core.state) == []
        for command in commands:
            if isinstance(command, c.SetTimer):
                self.timers[command.key] = self.now_ns, command.at_ns
            elif isinstance(command, c.CancelTimer):
                self.timers.pop(command.key, None)
        return commands

    def fire(self, kind, worker):
        _, self.now_ns = self.timers.pop((kind, worker))
        return self.handle(e.TimerFired((kind, worker)))

    def hello(self, worker, process, incarnation=1, orphans=()):
        hello = Hello(process, worker, incarnation, 1, model_digest="digest", numerics_id="numerics", kv_blocks=64)
        return self.handle(e.WorkerConnected(1, msgspec.structs.replace(hello, max_num_seqs=8, orphans=list(orphans))))

    def connect(self, worker, incarnation=1, orphans=()):
        return self.hello(worker, "engine", incarnation, orphans) + self.hello(worker, "agent", incarnation)

    def say(self, worker, message, incarnation=1):
        return self.handle(e.WorkerMessage(WorkerKey(worker, incarnation), message))

    def submit(self, request, key=KEY, prompt=LONG, n=1, returns=False):
        submission = Submission(list(prompt), SamplingParams(max_tokens=8, seed=1), n, resume_key=key, returns=returns)
        return self.handle(e.RequestSubmitted(request, submission))

    def lose(self, worker, process, incarnation=1):
        return self.handle(e.ConnectionLost(WorkerKey(worker, incarnation), process, "EOF"))

    def state(self, worker):
        return self.core.state.workers[worker].state


def orders(commands):
    return [(command.worker.worker, command.message) for command in commands if isinstance(command, c.SendToEngine)]


@pytest.fixture
def gateway():
    made = Gateway()
    for worker, _ in SPLIT:
        made.connect(worker)
    return made


def test_ids_of_two_lives_never_meet(gateway):
    (order,) = [order for _, order in orders(gateway.submit(1)) if isinstance(order, Reserve)]
    assert order.transfer == first_id(7) > first_id(6) + 2**40 - 2
    assert order.work.resume_key == KEY


def test_an_orphan_is_taken_over_where_it_runs_and_delivered_from_its_beginning(gateway):
    gateway.say("decode-1", Orphans([(KEY, 0)]))
    ((worker, order),) = orders(gateway.submit(5))
    assert (worker, type(order), order.work.resume_key) == ("decode-1", Run, KEY)
    commands = gateway.say("decode-1", Tokens([TokenEntry(5, 0, 1, 0, [11, 12, 13], cached_tokens=16)]))
    (deliver,) = [command for command in commands if isinstance(command, c.Deliver)]
    assert (deliver.delivery.position, deliver.delivery.token_ids) == (0, [11, 12, 13])
    commands = gateway.say("decode-1", Tokens([TokenEntry(5, 0, 1, 3, [14])]))
    assert [command.delivery.position for command in commands if isinstance(command, c.Deliver)] == [3]


def test_it_is_taken_over_once(gateway):
    gateway.say("decode-1", Orphans([(KEY, 0)]))
    gateway.submit(5)
    ((_, order),) = orders(gateway.submit(6, prompt=LONG[::-1]))
    assert isinstance(order, Reserve)


def test_choices_are_taken_over_one_by_one(gateway):
    gateway.say("decode-1", Orphans([(KEY, 0)]))
    gateway.say("decode-0", Orphans([(KEY, 1)]))
    placed = {order.work.choice: (worker, type(order)) for worker, order in orders(gateway.submit(5, n=2))}
    assert placed == {0: ("decode-1", Run), 1: ("decode-0", Run)}


def test_a_client_that_came_back_waits_a_moment_for_news(gateway):
    assert orders(gateway.submit(5, returns=True)) == []
    ((worker, order),) = orders(gateway.say("decode-1", Orphans([(KEY, 0)])))
    assert (worker, type(order)) == ("decode-1", Run)


def test_and_is_computed_anew_without_any(gateway):
    assert orders(gateway.submit(5, returns=True)) == []
    gateway.now_ns = SECOND // 10
    ((_, order),) = orders(gateway.handle(e.TimerFired(("tick", ""))))
    assert isinstance(order, Reserve)


@pytest.mark.parametrize("key", [b"", b"o" * 16])
def test_another_key_takes_nothing_over(gateway, key):
    gateway.say("decode-1", Orphans([(KEY, 0)]))
    assert not any(isinstance(order, Run) for _, order in orders(gateway.submit(5, key)))


def test_the_list_is_always_the_whole_list(gateway):
    gateway.say("decode-1", Orphans([(KEY, 0)]))
    gateway.say("decode-1", Orphans([]))
    assert not any(isinstance(order, Run) for _, order in orders(gateway.submit(5)))


def test_a_new_gateway_hears_of_orphans_before_it_places_anything():
    gateway = Gateway([("worker-0", "both"), ("worker-1", "both")])
    gateway.submit(5)
    commands = gateway.connect("worker-1", orphans=[(KEY, 0)])
    ((worker, order),) = orders(commands)
    assert (worker, type(order)) == ("worker-1", Run)


def test_a_worker_whose_connection_is_lost_is_not_killed_and_is_ready_again_in_the_same_life(gateway):
    gateway.submit(5)
    commands = gateway.lose("decode-0", "engine") + gateway.fire("fence", "decode-0")
    assert not any(isinstance(command, c.StopWorker) for command in commands)
    assert gateway.state("decode-0") is WorkerState.LOST
    gateway.lose("decode-0", "agent")
    commands = gateway.connect("decode-0")
    assert not any(isinstance(command, c.RejectConnection | c.LaunchWorker) for command in commands)
    assert gateway.state("decode-0") is WorkerState.READY
    assert ("reap", "decode-0") not in gateway.timers
    assert gateway.core.state.workers["decode-0"].incarnation == 1


def test_an_engine_that_is_back_before_its_agent_spoke_is_not_fenced_for_it(gateway):
    gateway.lose("decode-0", "engine")
    commands = gateway.hello("decode-0", "engine")
    kinds = [type(command) for command in commands]
    assert kinds.index(c.CloseWorker) < kinds.index(c.AcceptConnection)  # the agent has to connect anew too
    gateway.hello("decode-0", "agent")
    assert gateway.state("decode-0") is WorkerState.READY
    assert ("fence", "decode-0") not in gateway.timers


def test_one_that_does_not_come_back_is_replaced(gateway):
    gateway.lose("decode-0", "engine")
    gateway.fire("fence", "decode-0")
    commands = gateway.fire("reap", "decode-0")
    assert [command.worker for command in commands if isinstance(command, c.LaunchWorker)] == [WorkerKey("decode-0", 2)]
    (reject,) = gateway.hello("decode-0", "engine", 1)
    assert isinstance(reject, c.RejectConnection)


def test_one_that_exited_does_not_come_back(gateway):
    gateway.lose("decode-0", "engine")
    gateway.say("decode-0", EngineExited(signal=9))
    (reject,) = gateway.hello("decode-0", "engine", 1)
    assert isinstance(reject, c.RejectConnection)


def test_a_frozen_one_is_killed_as_ever(gateway):
    gateway.now_ns = 100 * SECOND
    for _ in range(2):
        commands = gateway.handle(e.TimerFired(("tick", "")))
        gateway.now_ns += 4 * SECOND
    gateway.core.state.workers["decode-0"].heard_ns = 0
    commands = gateway.handle(e.TimerFired(("tick", "")))
    assert c.StopWorker(WorkerKey("decode-0", 1), kill=True) in commands


def test_without_others_a_lost_connection_ends_the_worker():
    gateway = Gateway(shared_workers=False)
    gateway.connect("decode-0")
    gateway.lose("decode-0", "engine")
    commands = gateway.fire("fence", "decode-0")
    assert c.StopWorker(WorkerKey("decode-0", 1), kill=True) in commands
    (reject,) = gateway.hello("decode-0", "engine", 1)
    assert isinstance(reject, c.RejectConnection)


def test_a_start_for_another_gateway_ends_what_this_one_holds_of_the_life_before(gateway):
    gateway.submit(5)
    commands = gateway.handle(e.WorkerStarted(WorkerKey("decode-0", 2)))
    assert not any(isinstance(command, c.LaunchWorker | c.StopWorker) for command in commands)
    assert gateway.state("decode-0") is WorkerState.STARTING
    assert not [timer for timer in gateway.timers if timer[1] == "decode-0"]
    assert any(worker == "decode-1" for worker, _ in orders(commands))  # the request goes on elsewhere
    gateway.connect("decode-0", 2)
    assert gateway.state("decode-0") is WorkerState.READY


def test_what_is_known_is_no_news(gateway):
    assert gateway.handle(e.WorkerStarted(WorkerKey("decode-0", 1))) == []
    assert gateway.handle(e.WorkerStarted(WorkerKey("stranger", 9))) == []
    assert gateway.state("decode-0") is WorkerState.READY


def test_a_late_gateway_takes_the_incarnations_that_are_there():
    gateway = Gateway(was_complete=True)
    for worker, _ in SPLIT:
        gateway.handle(e.WorkerStarted(WorkerKey(worker, 5)))
        gateway.connect(worker, 5)
        assert gateway.state(worker) is WorkerState.READY
