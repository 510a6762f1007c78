"""Holders of weights are found by what they run, and nobody else is struck in their place."""

import asyncio
import os
import signal
import subprocess
import sys

from relay.chaos.faults import Injector
from relay.chaos.holders import holders, strike
from relay.chaos.plan import Ground, draw_plan
from relay.chaos.proxy import Life
from relay.chaos.resume import Resumes
from relay.chaos.shapes import Shape
from relay.chaos.watch import Watch


def test_a_holder_is_found_and_struck_and_no_other():
    sleep = "import time; time.sleep(60)"
    found = subprocess.Popen([sys.executable, "-c", sleep, "-m", "relay.worker.weights_process"])
    other = subprocess.Popen([sys.executable, "-c", sleep, "relay.worker.weights_process.not"])
    try:
        assert holders(os.getpid()) == [found.pid]
        assert not strike(other.pid, signal.SIGKILL)
        assert other.poll() is None
        assert strike(found.pid, signal.SIGKILL)
        assert found.wait(10) == -signal.SIGKILL
        assert not strike(found.pid, signal.SIGKILL)
        assert holders(os.getpid()) == []
    finally:
        for process in (found, other):
            process.kill()
            process.wait()


class Proxy:
    """Two workers of one GPU that are ready."""

    def __init__(self):
        self.watch = Watch()
        self.lives = {name: Life(name, 1, role) for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"))}
        for life in self.lives.values():
            life.welcomed = {("agent", 0), ("engine", 0)}


def test_all_workers_of_a_killed_holder_are_struck():
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "relay.worker.weights_process"])
    proxy = Proxy()
    injector = Injector(proxy, None, Resumes(), lambda text: None, None)
    injector.holders = lambda: holders(os.getpid())
    plan = draw_plan(3, Ground(Shape(1, 1), holders=True), 1, ["kill_holder"])

    async def turn(index):
        return None

    try:
        asyncio.run(injector.run(plan, turn))
        assert holder.wait(10) == -signal.SIGKILL
    finally:
        holder.kill()
        holder.wait()
    assert injector.problems == []
    assert injector.by_kind == {"kill_holder": 1}
    assert injector.signals == {"SIGKILL": 1}
    assert all(life.hurt and life.struck[0] == "kill_holder" for life in proxy.lives.values())
