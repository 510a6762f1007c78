"""I14: neither the wall clock nor where the monotonic clock begins is seen by anything that decides."""

import datetime
import itertools
import time

import pytest

from relay.sim.run import run_seed
from relay.sim.tape import Edits

SEEDS = range(8)


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = [run_seed(seed).trace_hash for seed in SEEDS]
    jumps = itertools.cycle((0.0, 3600.0, -86400.0, 1e9, -1e9))
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int((true_time() + next(jumps)) * 1e9))
    assert abs(datetime.datetime.now().timestamp() - true_time()) < 3600  # it reads the system's own clock
    assert abs(time.time() - true_time()) + abs(time.time() - true_time()) > 1000
    assert [run_seed(seed).trace_hash for seed in SEEDS] == calm


def test_the_monotonic_clock_may_begin_anywhere() -> None:
    for seed in SEEDS:
        hashes = {run_seed(seed, Edits(fixed={"clock": value})).trace_hash for value in range(3)}
        assert len(hashes) == 1, seed
