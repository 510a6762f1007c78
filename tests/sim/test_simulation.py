"""The simulator: seeds hold, runs repeat exactly, tapes replay, and what is no tape is refused."""

import json
import os
import subprocess
import sys

import pytest

from relay.cli import main
from relay.sim.run import run_seed, run_tape, sweep
from relay.sim.swarm import FAULTS
from relay.sim.tape import Tape

SEEDS = range(40)


def test_seeds_hold() -> None:
    total = sweep(SEEDS)
    assert not total.failures, total.failures[0].report()
    assert total.seeds == len(SEEDS)
    assert total.requests > 300
    assert len(total.faults) > len(FAULTS) * 3 // 4
    assert total.events > 10 * total.requests


def test_a_seed_gives_one_trace_whatever_the_hash_seed() -> None:
    """The order of sets and dicts of strings differs between the two processes; the trace must not."""
    hashes = []
    for hash_seed in ("0", "1", "4242"):
        command = [sys.executable, "-m", "relay.cli.main", "sim", "--seeds", "12", "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        hashes.append(json.loads(answer.stdout)["trace_hash"])
    assert len(set(hashes)) == 1


def test_seeds_differ() -> None:
    assert run_seed(1).trace_hash != run_seed(2).trace_hash


def test_a_tape_replays_its_seed(tmp_path, capsys) -> None:
    path = tmp_path / "seed.tape"
    assert main.run(["sim", "--seed", "5", "--record", str(path), "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert main.run(["sim", "--tape", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recorded


def test_a_tape_decides_and_not_the_seed() -> None:
    """Another value on the tape is another run, though the seed is the same."""
    run = run_seed(5)
    replay = list(zip(run.tape.labels, run.tape.values, strict=True))
    assert run_tape(Tape(5, replay)).trace_hash == run.trace_hash
    position = run.tape.labels.index("latency")
    replay[position] = ("latency", (replay[position][1] + 1) % 3)
    assert run_tape(Tape(5, replay[: position + 1])).trace_hash != run.trace_hash


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "--tape"),
        ("[]", "no tape"),
        ('{"format": "relay-sim-tape", "format_version": 99}', "format version 99"),
        ('{"format": "relay-sim-tape", "format_version": 1, "seed": 1}', "damaged"),
        (
            '{"format": "relay-sim-tape", "format_version": 1, "seed": 1, "commit": "x", "labels": ["other"], "choices": [[0, 1]]}',
            "another version",
        ),
    ],
)
def test_what_is_no_tape_of_ours_is_refused(tmp_path, capsys, content: str, complaint: str) -> None:
    path = tmp_path / "foreign.tape"
    path.write_text(content)
    assert main.run(["sim", "--tape", str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_tape_of_another_commit_says_so(tmp_path, capsys) -> None:
    path = tmp_path / "old.tape"
    run_seed(3).tape.save(path, "0123abc")
    assert main.run(["sim", "--tape", str(path)]) == 0
    assert "recorded with 0123abc" in capsys.readouterr().err


def test_a_missing_tape_and_contradicting_flags_are_refused(tmp_path, capsys) -> None:
    assert main.run(["sim", "--tape", str(tmp_path / "nothing")]) == 2
    assert main.run(["sim"]) == 2
    assert main.run(["sim", "--seed", "1", "--seeds", "2"]) == 2
    assert main.run(["sim", "--seeds", "2", "--only", "x"]) == 2
    assert main.run(["sim", "--mutants", "--only", "no such"]) == 2
    assert "no cancel fan-out" in capsys.readouterr().err


def test_json_of_a_sweep(capsys) -> None:
    assert main.run(["sim", "--seeds", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seeds"] == 3
    assert answer["violations"] == 0
    assert {"events", "events_per_s", "requests", "faults", "trace_hash"} <= set(answer)
