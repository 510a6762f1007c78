"""The simulator: seeds hold, runs repeat exactly, tapes replay, and what is no tape is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from relay.cli import main
from relay.record import frames
from relay.sim import coverage
from relay.sim.director import directed
from relay.sim.moments import MOMENTS
from relay.sim.run import run_seed, run_tape
from relay.sim.swarm import FAULTS
from relay.sim.sweep import sweep
from relay.sim.tape import Edits, Tape

SEEDS = 30


def test_seeds_hold() -> None:
    total = sweep(0, SEEDS)
    assert not total.failures, total.failures[0].report()
    assert total.seeds == SEEDS
    assert total.requests > 7 * SEEDS
    assert len(total.faults) > len(FAULTS) * 3 // 4
    assert total.events > 10 * total.requests
    assert len(total.cells) > 50


def test_a_seed_gives_one_trace_whatever_the_hash_seed_and_the_number_of_processes() -> None:
    """The order of sets and dicts of strings differs between the processes; the trace must not."""
    hashes = []
    for hash_seed, jobs in (("0", "1"), ("4242", "2")):
        command = [sys.executable, "-m", "relay.cli.main", "sim", "--seeds", "10", "--jobs", jobs, "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        hashes.append(json.loads(answer.stdout)["trace_hash"])
    assert hashes[0] == hashes[1]


def test_seeds_differ() -> None:
    assert run_seed(1).trace_hash != run_seed(2).trace_hash


def test_a_tape_replays_its_seed(tmp_path, capsys) -> None:
    path = tmp_path / "seed.tape"
    assert main.run(["sim", "--seed", "5", "--record", str(path), "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)
    before = path.read_bytes()
    assert main.run(["sim", "--seed", "6", "--record", str(path)]) == 0
    assert f"was there already; the tape is {tmp_path / 'seed-2.tape'}" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main.run(["sim", "--tape", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recorded
    assert main.run(["replay", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recorded


def test_a_tape_decides_and_not_the_seed() -> None:
    """Another value on the tape is another run, though the seed is the same."""
    tape = Tape(5, keep=True)
    run = run_tape(tape)
    assert run_tape(Tape(5, replay=tape.drawn)).trace_hash == run.trace_hash
    swarm = list(tape.drawn["swarm"])
    position = next(number for number, (label, _) in enumerate(swarm) if label == "latency")
    swarm[position] = ("latency", (swarm[position][1] + 1) % 3)
    assert run_tape(Tape(5, replay={"swarm": swarm})).trace_hash != run.trace_hash


def test_a_fault_that_is_left_out_moves_no_other() -> None:
    seed = next(seed for seed in range(20) if sum(run_seed(seed).faults.values()) > 3)
    whole, less = Tape(seed, keep=True), Tape(seed, Edits(without=("fault 2", "request 1")), keep=True)
    run_tape(whole)
    run_tape(less)
    assert "fault 2" not in less.drawn
    assert "request 1" not in less.drawn
    for name in ("swarm", "requests", "faults", "request 2"):
        assert whole.drawn[name] == less.drawn[name]


def test_choices_can_be_fixed_by_their_label() -> None:
    tape = Tape(1, Edits(fixed={"requests": 10_000, "latency": 1, "step computes late": 0}), keep=True)
    run_tape(tape)
    drawn = dict(tape.drawn["swarm"])
    assert drawn["requests"] == 21  # the largest possible
    assert drawn["latency"] == 1
    late = [value for choices in tape.drawn.values() for label, value in choices if label == "step computes late"]
    assert late
    assert not any(late)


def _tape(head: frames.Head, *more: frames.Frame) -> bytes:
    return frames.whole(head, more)


FITTING = b"\x82\xa4seed\x01\xa5edits\x80"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no recording"),
        (b"[]", "no recording"),
        (b'{"format": "relay-sim-tape", "format_version": 1, "seed": 1}', "format version 1"),
        (_tape(frames.head("sim", "seed 1", "x", b"\xc0")), "damaged"),
        (_tape(frames.head("sim", "seed 1", "x", FITTING), frames.Decided(0, b"")), "damaged"),
        (_tape(frames.head("sim", "seed 1", "x", FITTING), frames.Choices("swarm", [], [(0, 1)])), "damaged"),
        (
            _tape(frames.head("sim", "seed 1", "x", FITTING), frames.Choices("swarm", ["other"], [(0, 1)])),
            "another version",
        ),
        (
            _tape(frames.head("sim", "seed 1", "x", FITTING), frames.Choices("never heard of", ["other"], [(0, 1)])),
            "holds choices this program does not make",
        ),
        (_tape(frames.head("gateway", "g", "x", FITTING)), "use `relay replay`"),
        (_tape(frames.head("sim", "seed 1", "x", FITTING)) + b"more", "bytes follow its end mark"),
        (_tape(frames.head("sim", "seed 1", "x", FITTING)).replace(b"seed\x01", b"seed\x02"), "is damaged"),
        (_tape(frames.head("sim", "seed 1", "x", FITTING))[:-4], "truncated"),
    ],
)
def test_what_is_no_tape_of_ours_is_refused(tmp_path, capsys, content: bytes, complaint: str) -> None:
    path = tmp_path / "foreign.tape"
    path.write_bytes(content)
    assert main.run(["sim", "--tape", str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_tape_is_played_whole_or_not_at_all(tmp_path, capsys) -> None:
    path = tmp_path / "seed.tape"
    tape = Tape(5, keep=True)
    run_tape(tape)
    tape.save(path, "here")
    recording = frames.read(path)
    without_choices = frames.opening(recording.head) + frames.encode(frames.Content(b"").end("closed"))
    path.write_bytes(without_choices)
    assert main.run(["sim", "--tape", str(path)]) == 2
    assert "digest" in capsys.readouterr().err
    path.write_bytes(frames.opening(recording.head))
    assert main.run(["replay", "--cut", str(path)]) == 2
    assert "played whole or not at all" in capsys.readouterr().err
    path.write_bytes(frames.whole(msgspec.structs.replace(recording.head, relay="0.0"), recording.frames))
    assert main.run(["sim", "--tape", str(path)]) == 0  # honest: another release that made the same choices
    swarm = next(frame for frame in recording.frames if isinstance(frame, frames.Choices) and frame.stream == "swarm")
    swarm.drawn.append(swarm.drawn[-1])
    path.write_bytes(frames.whole(recording.head, recording.frames))
    capsys.readouterr()
    assert main.run(["sim", "--tape", str(path)]) == 2
    assert "holds choices this program does not make" in capsys.readouterr().err


def test_a_tape_of_another_commit_says_so(tmp_path, capsys) -> None:
    path = tmp_path / "old.tape"
    tape = Tape(3, keep=True)
    run_tape(tape)
    tape.save(path, "0123abc")
    assert main.run(["sim", "--tape", str(path)]) == 0
    assert "recorded with 0123abc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give one of"),
        (["--seed", "1", "--seeds", "2"], "give one of"),
        (["--seeds", "2", "--only", "x"], "--only goes with"),
        (["--mutants", "--only", "no such"], "no mutant is named"),
        (["--seed", "1", "--only", "no such"], "no mutant is named"),
        (["--seed", "1", "--directed", "earthquake:queued"], "no fault is called 'earthquake'"),
        (["--seed", "1", "--directed", "slow:never"], "no moment is called 'never'"),
        (["--seeds", "1", "--directed", "slow:queued"], "--directed goes with --seed"),
        (["--seeds", "1", "--record", "x"], "--record goes with --seed"),
        (["--seed", "1", "--fresh"], "--fresh goes with"),
        (["--tape", "/nowhere/at/all"], "No such file"),
        (["--seed", "1", "--record", "/nowhere/at/all"], "cannot write"),
        (["--seed", "1", "--record", "/dev/full"], "no regular file"),
        (["--tape", "/dev/zero"], "no regular file"),
        (["--time-limit", "nan"], "no time that can pass"),
        (["--time-limit", "inf"], "no time that can pass"),
        (["--time-limit", "0"], "no time that can pass"),
        (["--time-limit", "1e-9", "--jobs", "1"], "no seed was run"),
        (["--seed", "1", "--directed", "kv_lose:idle"], "cannot strike in the moment idle: a KV frame is damaged"),
        (["--seed", "1", "--only", "orphan"], "--only names"),
        (["--scenario", "abort-storm", "--only", "orphan"], "--only names"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, arguments: list[str], complaint: str) -> None:
    assert main.run(["sim", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_a_scenario_is_played_with_the_bug_that_only_names(capsys) -> None:
    arguments = ["sim", "--scenario", "abort-storm", "--seed", "1", "--json"]
    assert main.run(arguments) == 0
    assert main.run([*arguments, "--only", "cancel does not reach decode"]) == 1
    assert "scenario abort-storm, seed 1: " in capsys.readouterr().err


def test_json_of_a_sweep(capsys) -> None:
    assert main.run(["sim", "--seeds", "3", "--jobs", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seeds"] == 3
    assert answer["violations"] == 0
    assert {"events", "events_per_s", "requests", "faults", "trace_hash", "zero_cells", "sometimes_missing"} <= set(
        answer
    )


def test_a_time_limit_ends_a_sweep_and_says_how_to_see_it_again(capsys) -> None:
    assert main.run(["sim", "--time-limit", "3", "--fresh", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    first = int(out.split("seeds (")[1].split(" ")[0])
    assert first >= 1 << 20
    assert f"--first-seed {first}" in out


def test_a_directed_run_strikes_in_its_moment() -> None:
    for cell in (("kill_worker", "handoff"), ("client_disconnect", "mid-transfer"), ("cut_kv", "stopped")):
        runs = (run_seed(seed, directed(*cell)) for seed in range(20))
        run = next((run for run in runs if run.cells.get("/".join(cell))), None)
        assert run is not None, cell
        assert run.failure is None, run.failure.report()
        assert set(run.faults) == {cell[0]}


def test_a_directed_run_says_whether_it_struck(tmp_path, capsys) -> None:
    cell = ("kill_worker", "handoff")
    runs = {seed: run_seed(seed, directed(*cell)) for seed in range(4)}
    struck = next(seed for seed, run in runs.items() if run.cells.get("/".join(cell)))
    path = tmp_path / "struck.tape"
    direction = ["--directed", ":".join(cell)]
    assert main.run(["sim", "--seed", str(struck), *direction, "--record", str(path), "--json"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["struck"] is True
    assert "did not strike" not in error
    assert main.run(["sim", "--tape", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["struck"] is True
    missed = Tape(1, Edits(directed=cell, fixed={"requests": 0, "prefill": 0}), keep=True)
    assert not run_tape(missed).cells.get("/".join(cell))
    missed.save(path, "here")
    assert main.run(["sim", "--tape", str(path), "--json"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["struck"] is False
    assert "kill_worker/handoff never came: the fault did not strike in that moment" in error


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "relay.cli.main", "sim", *arguments]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            _command("--seed", "1"), env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert run.returncode == 1
    assert run.stderr == "relay: the output could not be written: No space left on device\n"


def test_ctrl_c_ends_a_sweep_without_a_traceback() -> None:
    """A terminal sends SIGINT to the whole group in the foreground."""
    sweep = subprocess.Popen(
        _command("--seeds", "100000", "--jobs", "2"),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    children: list[int] = []
    while len(children) < 2:  # both may still be importing
        assert sweep.poll() is None
        time.sleep(0.01)
        listed = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text()
        children = [int(pid) for pid in listed.split()]
    os.killpg(sweep.pid, signal.SIGINT)
    _, error = sweep.communicate(timeout=120)
    assert error.strip() == ""
    assert sweep.returncode == 130
    while any(Path(f"/proc/{pid}").exists() for pid in children):  # the test's time limit is theirs
        time.sleep(0.01)


def test_the_table_of_cells() -> None:
    cells = coverage.possible_cells()
    assert len(cells) == len(FAULTS) * len(MOMENTS) - len(coverage.IMPOSSIBLE)
    assert all(reason for reason in coverage.IMPOSSIBLE.values())
    assert all(fault in FAULTS and moment in MOMENTS for fault, moment in coverage.IMPOSSIBLE)
    hit = {f"{fault}/{moment}": 1 for fault, moment in cells[1:]}
    assert coverage.zero_cells(hit) == [cells[0]]
    assert coverage.missing(coverage.SOMETIMES[1:]) == [coverage.SOMETIMES[0]]
