"""A server whose workers are two ranks each: exact under killed ranks, clean at its end, one line where it cannot be."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.cli.serving import ENVIRONMENT, Serve, running, wait_gone, write_tiny_model

PROMPT = [3 + (7 * index + index * index) % 250 for index in range(150)]
FLAGS = ("--backend", "cpu", "--threads", "2", "--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return write_tiny_model(folder / "tiny"), folder / "cache"


@pytest.fixture(scope="module")
def server(model):
    server = Serve(*model, *FLAGS).ready()
    yield server
    server.close()


def ranks_of(pid: int) -> list[int]:
    """The processes an engine has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def complete_while(server: Serve, act) -> list[int]:
    """A long answer, with ``act`` called when D has begun to decode it."""
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(server.complete(PROMPT, 700, cache_salt="now")))
    thread.start()
    server.wait_for(lambda: server.worker("decode-0")["kv_used"] > 0)
    time.sleep(0.1)
    act()
    thread.join(90)
    return found[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_rank_is_a_dead_worker_and_loses_nothing(server, number) -> None:
    calm = complete_while(server, lambda: None)
    before = server.worker("decode-0")
    (rank,) = ranks_of(before["pid"])
    assert complete_while(server, lambda: os.kill(rank, number)) == calm
    wait_gone([before["pid"], rank])
    server.wait_for(lambda: server.worker("decode-0")["incarnation"] > before["incarnation"])
    server.wait_for(lambda: server.worker("decode-0")["state"] == "ready")
    after = server.worker("decode-0")
    assert after["incarnation"] == before["incarnation"] + 1
    assert len(ranks_of(after["pid"])) == 1
    assert f"signal {int(number)}" in after["last_loss"]


def test_a_dead_engine_takes_its_ranks_along(server) -> None:
    before = server.worker("prefill-0")
    (rank,) = ranks_of(before["pid"])
    os.kill(before["pid"], signal.SIGKILL)
    wait_gone([rank])
    server.wait_for(lambda: server.worker("prefill-0")["incarnation"] > before["incarnation"])
    server.wait_for(lambda: server.worker("prefill-0")["state"] == "ready")


def test_other_numbers_of_ranks_are_other_numerics(model, server) -> None:
    one = Serve(*model, "--backend", "cpu", "--threads", "1", "--prefill", "0").ready()
    try:
        assert one.call("/version")[1]["numerics_id"] != server.call("/version")[1]["numerics_id"]
    finally:
        one.close()


def test_nothing_is_left_at_the_end(model) -> None:
    server = Serve(*model, *FLAGS, "--prefill", "0").ready()
    pids = server.pids()
    ranks = [rank for pid in pids[1:] for rank in ranks_of(pid)]
    assert any(running(rank) for rank in ranks)
    assert server.stop() == 0
    wait_gone([*pids, *ranks])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "cpu", "--tensor-parallel-size", "3"), "the model has 2 KV heads and each rank needs one"),
        (("--backend", "cpu", "--tensor-parallel-size", "9"), "must be between 1 and 8, not 9"),
        (("--backend", "reference", "--tensor-parallel-size", "2"), "the reference backend runs one rank a worker"),
        (("--backend", "cpu", "--prefill-devices", "cuda:0"), "need --backend cuda, not cpu"),
        (("--backend", "cuda", "--decode-devices", "gpu1"), "--decode-devices must be cuda:N"),
    ],
)
def test_what_cannot_be_is_one_line(model, arguments, words) -> None:
    path, cache = model
    command = [sys.executable, "-m", "relay.cli.main", "serve", str(path), "--port", "0", "--offline"]
    command += ["--cache-dir", str(cache), "--kv-cache-memory", "8M", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=90, check=False)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


def test_every_path_is_exact_with_two_ranks(model) -> None:
    path, cache = model
    command = [sys.executable, "-m", "relay.cli.main", "verify", str(path), "--offline", "--cache-dir", str(cache)]
    command += ["--quick", "--json", "--tensor-parallel-size", "2", "--threads", "2"]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["compared"] == report["identical"] > 0
    wrong = subprocess.run(
        [*command, "--inject", "kv-bit"], capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False
    )
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
