"""The age of a step on a busy machine, and the statistics it is taken from."""

import os
import subprocess
import sys

from relay.worker.step_age import StepAge, thread_waits

MS = 1_000_000


def ages(waits: list[dict[int, int]], steps: list[tuple[int, int]]) -> list[int]:
    """Looked at every 200 ms, as the agent does; asserted on at ``steps`` (step, age)."""
    readings = iter(waits)
    age = StepAge(lambda: next(readings))
    found, now_ms, last = [], 10_000, (-1, 0)
    for step, age_ms in steps:
        now_ms += age_ms - last[1] if step == last[0] else age_ms
        last = (step, age_ms)
        age._looked_ns = (now_ms - 200) * MS
        found.append(age.own_ms(step, "stepping", age_ms, "R", now_ms * MS))
    return found


def stopped_ages(looks: list[tuple[int, str]]) -> list[int]:
    """(age of the step, process state) at each look."""
    age = StepAge(dict)
    return [age.own_ms(3, "stepping", age_ms, state, (5_000 + age_ms) * MS) for age_ms, state in looks]


def test_a_stopped_engine_does_not_age() -> None:
    looks = [(100, "R"), (300, "T"), (500, "T"), (700, "T"), (900, "R"), (1100, "R")]
    assert stopped_ages(looks)[-1] == 1100 - (900 - 100)


def test_where_the_agent_stood_still_too_nothing_is_known() -> None:
    assert stopped_ages([(100, "R"), (300, "R"), (9_300, "R"), (9_500, "R")]) == [100, 300, 300, 500]


def test_a_frozen_drain_is_no_hang() -> None:
    age = StepAge(dict)
    phases = [(200, "draining", "R"), (400, "draining", "T"), (900, "draining", "T"), (1_300, "stepping", "R")]
    found = [age.own_ms(3, phase, ms, state, (5_000 + ms) * MS) for ms, phase, state in phases]
    assert found[-1] == 200


def test_time_without_a_processor_does_not_age_a_step() -> None:
    waits = [{1: 0, 2: 5 * MS}, {1: 900 * MS, 2: 100 * MS}, {1: 11_000 * MS, 2: 4_000 * MS}]
    assert ages(waits, [(7, 300), (7, 1300), (7, 13_000)]) == [300, 400, 2000]


def test_a_hang_ages_fully() -> None:
    assert ages([{1: 50 * MS, 2: 8 * MS}] * 2, [(7, 200), (7, 12_000)]) == [200, 12_000]


def test_each_step_is_measured_from_its_own_begin() -> None:
    assert ages([{1: 0}, {1: 9_000 * MS}], [(7, 300), (8, 10_500)]) == [300, 10_500]


def test_short_steps_cost_no_reading() -> None:
    assert ages([], [(1, 5), (2, 199)]) == [5, 199]


def test_threads_that_come_or_go_and_no_statistics() -> None:
    assert ages([{1: 5, 2: 7}, {2: 7, 3: 10**12}], [(1, 300), (1, 500)]) == [300, 500]
    assert ages([{}, {}], [(1, 300), (1, 500)]) == [300, 500]


def test_the_kernel_tells_waits() -> None:
    assert os.getpid() in thread_waits(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert thread_waits(ended.pid) == {}
