"""``relay chaos`` from outside: its report, its exit code, and its errors in one line. Counts and bytes, never times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.serving import ENVIRONMENT, running, wait_gone, write_tiny_model

from relay.chaos.leaks import descendants

PATIENCE_S = 240
SKIPPED = 8
NONE = {"different": 0, "failed": 0, "leaked": 0, "disagreements": 0, "problems": []}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def chaos(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "relay.cli.main", "chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE_S)


def small(model: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess:
    limits = [
        "--longest-prompt",
        "60",
        "--longest-answer",
        "400",
        "--kv-cache-memory",
        "8M",
        "--max-num-batched-tokens",
        "64",
        "--threads",
        "1",
    ]
    return chaos(str(model), "--cache-dir", str(cache), "--offline", "--json", *limits, *arguments)


@pytest.mark.parametrize(("shape", "faults"), [("1P+2D", 14), ("2", 8)])
def test_every_answer_is_the_calm_one(model, cache, tmp_path, shape, faults):
    arguments = ["--shape", shape, "--requests", "40", "--faults", str(faults), "--seed", "7", "--trace", str(tmp_path)]
    ended = small(model, cache, *arguments)
    report = json.loads(ended.stdout)
    assert {key: report[key] for key in NONE} == NONE, ended.stderr
    assert ended.returncode == 0
    assert (report["requests"], report["identical"]) == (40, 40)
    assert sum(report["faults"].values()) == faults
    assert report["signals"]["SIGKILL"] >= 2
    assert set(report["moments"]) == set(report["faults"])
    assert report["replayed"]["replayed"] == report["replayed"]["recordings"] > 2


def test_gateways_are_killed_and_no_client_loses_a_byte(model, cache, tmp_path):
    kinds = "kill_gateway,stop_gateway,kill_engine"
    arguments = ["--gateways", "2", "--requests", "30", "--faults", "7", "--seed", "7", "--kinds", kinds]
    ended = small(model, cache, *arguments, "--trace", str(tmp_path))
    report = json.loads(ended.stdout)
    assert {key: report[key] for key in NONE} == NONE, ended.stderr
    assert ended.returncode == 0
    assert report["identical"] == 30
    assert {"kill_gateway", "stop_gateway"} <= set(report["faults"])
    assert report["reposted"] > 0
    assert report["replayed"]["replayed"] == report["replayed"]["recordings"] > 2


def test_packets_are_lost_where_that_is_possible(model, cache):
    kinds = "partition_control,half_partition_control,loss_control,partition_kv,loss_kv"
    ended = small(model, cache, "--netns", "--requests", "20", "--faults", "5", "--seed", "7", "--kinds", kinds)
    if ended.returncode == SKIPPED:
        assert ended.stderr.startswith("relay: --netns skipped: ")
        assert ended.stderr.count("\n") == 1
        pytest.skip(ended.stderr.strip())
    report = json.loads(ended.stdout)
    assert {key: report[key] for key in NONE} == NONE, ended.stderr
    assert ended.returncode == 0
    assert report["identical"] == 20
    assert report["packets_lost"]["partition_control"] > 0


def test_a_poison_request_ends_alone(model, cache):
    ended = small(model, cache, "--requests", "20", "--faults", "0", "--poison", "2", "--seed", "2")
    report = json.loads(ended.stdout)
    assert report["problems"] == []
    assert ended.returncode == 0
    assert (report["identical"], report["failed"]) == (20, 0)
    assert report["poison"]["quarantined"] == 2
    assert report["poison"]["crashes"] <= 6


def test_a_worker_that_rounds_differently_is_noticed(model, cache):
    ended = small(model, cache, "--requests", "12", "--faults", "0", "--inject", "rounding")
    report = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert report["different"] > 0
    assert report["failed"] == 0
    assert any("differs" in problem for problem in report["problems"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--shape", "2D"], "--shape"),
        (["--shape", "0P+2D"], "--shape"),
        (["--kinds", "kill_engine,implode"], "implode"),
        (["--shape", "3", "--kinds", "cut_kv"], "no KV connections"),
        (["--kinds", "kill_gateway"], "--gateways"),
        (["--kinds", "partition_kv"], "--netns"),
        (["--gateways", "0"], "--gateways"),
        (["--poison", "-1"], "--poison"),
        (["--requests", "0"], "--requests"),
        (["--faults", "-1"], "--faults"),
        (["--concurrency", "0"], "--concurrency"),
        (["--seed", "1", "--seeds", "2"], "--seeds"),
        (["--shape", "3", "--shape", "3"], "twice"),
        (["--backend", "abacus"], "abacus"),
        (["--kinds", ","], "--kinds"),
        (["--output", "/no/such/folder/report.json"], "--output"),
        (["--trace", "/dev/null/traces"], "--trace"),
        (["--keep", "/dev/null/cells"], "--keep"),
        (["--kv-cache-memory", "much"], "'much' is not a size"),
        (["--threads", "-1"], "--threads"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, word):
    ended = chaos(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith("relay: ")
    assert ended.stderr.count("\n") == 1
    assert word in ended.stderr


def test_a_model_that_is_not_there_ends_with_its_own_error(tmp_path):
    ended = chaos(str(tmp_path / "nothing"), "--offline")
    assert ended.returncode == 3
    assert ended.stderr.count("relay: ") == 1
    assert ended.stderr.splitlines()[-1].startswith("relay: ")
    assert "nothing" in ended.stderr


def test_nothing_is_left_of_it_when_it_is_killed(model, cache):
    """Its server has PR_SET_PDEATHSIG, and the workers end with the server."""
    command = [sys.executable, "-m", "relay.cli.main", "chaos", str(model), "--offline", "--cache-dir", str(cache)]
    run = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    below: set[int] = set()
    try:
        while len(below) < 3:
            assert run.poll() is None
            below |= set(descendants(run.pid))
    finally:
        run.kill()
        run.communicate(timeout=PATIENCE_S)
    wait_gone(sorted(below))
    assert not any(running(pid) for pid in below)
