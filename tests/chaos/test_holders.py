"""Holders of weights are found by what they run, and nobody else is struck in their place."""

import os
import signal
import subprocess
import sys

from relay.chaos.holders import holders, strike


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
