"""What the proxy's watch makes of the messages that pass: who holds a choice, and what it is doing there."""

import pytest

from relay.chaos.resume import Resumes
from relay.chaos.watch import Watch
from relay.protocol.messages import Accept, Prefill, Reserve, Run, SequenceFailed, TokenEntry, Tokens, Work
from relay.protocol.sampling import SamplingParams

P, D, E = "prefill-0", "decode-0", "decode-1"


def work(attempt=0, committed=0, request=5, choice=0):
    ids = list(range(10 + committed))
    return Work(request, choice, attempt, ids, 10, SamplingParams(seed=77, max_tokens=9))


def tokens(attempt, position, ids, finish=None):
    return Tokens([TokenEntry(5, 0, attempt, position, ids, finish)])


@pytest.fixture
def seen():
    return []


@pytest.fixture
def watch(seen):
    return Watch(on_seen=lambda one: seen.append((one.placement.moment, sorted(one.placement.holders))))


def test_a_split_request_step_by_step(watch, seen):
    watch.to_worker(D, Reserve(work(), 3, P, 1))
    watch.from_worker(D, Accept(5, 0, 0, 3, 0))
    watch.to_worker(P, Prefill(work(), 3, 0, [], D, 1))
    watch.kv_frame(3, handoff=False)
    watch.kv_frame(3, handoff=False)
    watch.from_worker(P, tokens(0, 0, [1]))
    watch.kv_frame(3, handoff=True)
    watch.from_worker(D, tokens(0, 0, [1]))
    watch.from_worker(D, tokens(0, 1, [2]))
    watch.from_worker(D, tokens(0, 2, [3], "stop"))
    both, decode = [D, P], [D]
    assert seen == [
        ("reserved", decode),
        ("accepted", decode),
        ("prefill", both),
        ("streaming", both),
        ("streaming", both),
        ("handed_off", both),
        ("decoding", decode),
        ("decoding", decode),
        ("last_token", decode),
    ]
    assert watch.held_by(P) == []
    watch.ended(77)
    assert watch.held_by(D) == []
    assert watch.kv_frame(3, handoff=False) is None


def test_what_an_old_attempt_says_moves_nothing(watch, seen):
    watch.to_worker(D, Run(work()))
    watch.to_worker(E, Run(work(attempt=1, committed=2)))
    seen.clear()
    watch.from_worker(D, tokens(0, 2, [9]))
    watch.from_worker(D, SequenceFailed(5, 0, 0, "gone", True))
    watch.to_worker(D, Run(work()))
    assert seen == []
    assert [placement.attempt for placement in watch.held_by(E)] == [1]


def test_the_wait_of_a_resume_ends_with_the_first_new_token():
    resumes = Resumes()
    watch = Watch(on_order=resumes.ordered, on_token=resumes.reported)
    watch.to_worker(D, Run(work()))
    watch.from_worker(D, tokens(0, 0, [1, 2]))
    resumes.harmed("kill_engine", "decoding", watch.held_by(D)[0], 100.0)
    resumes.arrived(77, 0, 2, 100.1)  # was on its way already
    watch.to_worker(E, Run(work(attempt=1, committed=2)))
    watch.from_worker(E, tokens(1, 2, [3]))
    assert resumes.finished == []
    resumes.arrived(77, 0, 3, 100.5)
    (harm,) = resumes.finished
    assert (harm.resumed_s - harm.at_s, harm.num_tokens) == (0.5, 12)
    resumes.ended(77)
    assert len(resumes.finished) == 1
    assert not resumes.waiting


def test_a_request_that_had_everything_waits_for_nothing():
    resumes = Resumes()
    watch = Watch(on_order=resumes.ordered, on_token=resumes.reported)
    watch.to_worker(D, Run(work()))
    watch.from_worker(D, tokens(0, 0, [1], "stop"))
    resumes.harmed("kill_engine", "last_token", watch.held_by(D)[0], 100.0)
    resumes.ended(77)
    assert resumes.finished == []
    assert not resumes.waiting


def test_a_choice_that_another_gateway_takes_over_is_at_one_place_and_its_wait_goes_on():
    resumes = Resumes()
    watch = Watch(on_order=resumes.ordered, on_token=resumes.reported)
    watch.to_worker(D, Run(work()))
    watch.from_worker(D, tokens(0, 0, [1, 2]))
    watch.to_worker(E, Run(work(request=6)))
    assert watch.held_by(D) == []
    assert [placement.key for placement in watch.held_by(E)] == [(6, 0)]
    resumes.harmed("kill_engine", "prefill", watch.held_by(E)[0], 100.0)
    watch.to_worker(D, Run(work(request=7)))
    watch.from_worker(D, Tokens([TokenEntry(7, 0, 0, 2, [3], None)]))
    resumes.arrived(77, 0, 3, 100.5)
    assert [harm.resumed_s for harm in resumes.finished] == [100.5]
