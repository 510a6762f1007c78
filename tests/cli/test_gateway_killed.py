"""The gateway is SIGKILLed: none of its workers may outlive it, in whatever state they are."""

import os
import signal

import pytest
from tests.cli.serving import Serve, running, wait_gone, write_tiny_model


@pytest.fixture
def server(tmp_path):
    server = Serve(write_tiny_model(tmp_path / "tiny"), tmp_path / "cache", "--backend", "cpu").ready()
    yield server
    server.close()


@pytest.mark.parametrize("stopped", [(), ("pid",), ("agent_pid",), ("pid", "agent_pid")], ids=str)
def test_workers_end_with_their_gateway(server, stopped):
    workers = server.call("/status")[1]["workers"]
    pids = server.pids()
    try:
        for worker in workers:
            for process in stopped:
                os.kill(worker[process], signal.SIGSTOP)
        server.process.kill()
        wait_gone(pids)
    finally:
        for pid in pids[1:]:
            if running(pid):
                os.kill(pid, signal.SIGKILL)
