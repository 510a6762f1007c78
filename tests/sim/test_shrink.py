"""A violation is shrunk to a tape that breaks the same, with a story that fits on a screen."""

import json
import re
from dataclasses import replace

import pytest

from relay.cli import main, sim
from relay.record.frames import read
from relay.sim.mutants import by_name, planted
from relay.sim.run import Failure, Run, run_tape
from relay.sim.shrink import shrink
from relay.sim.tape import Tape, tape_of

MUTANT = "shared block released twice"


@pytest.fixture(scope="module")
def failure() -> Failure:
    with planted(by_name(MUTANT)):
        runs = (run_tape(Tape(seed, mutant=MUTANT)) for seed in range(40))
        return next(run.failure for run in runs if run.failure is not None and run.events > 150)


def test_a_shrunk_tape_breaks_the_same(failure: Failure, tmp_path, capsys) -> None:
    smaller = shrink(failure, budget_s=20)
    assert smaller.failure.invariant == failure.invariant
    assert smaller.faults[1] <= smaller.faults[0]
    assert smaller.requests[1] < smaller.requests[0]
    path = tmp_path / "small.tape"
    smaller.tape.save(path, "somewhere else")
    again = tape_of(read(path))
    assert again.edits == smaller.tape.edits
    with planted(by_name(again.mutant)):
        replayed = run_tape(again).failure
    assert replayed == smaller.failure
    assert len(replayed.report(f"relay sim --tape {path}").splitlines()) <= 40
    # By hand: the tape names its planted bug.
    assert main.run(["sim", "--tape", str(path)]) == 1
    assert f"{failure.invariant} is broken" in capsys.readouterr().out


def test_without_time_nothing_is_smaller(failure: Failure) -> None:
    same = shrink(failure, budget_s=0)
    assert same.tried == 0
    assert same.failure == failure


def test_the_command_writes_a_tape_and_tells_how_to_play_it(failure: Failure, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["sim", "--seed", str(failure.seed), "--only", MUTANT, "--shrink"]) == 1
    error = capsys.readouterr().err
    command = error.strip().splitlines()[-1]
    assert command.startswith("replay: relay sim --tape ")
    assert main.run(command.split()[2:]) == 1
    assert capsys.readouterr().out.strip().splitlines()[-1] == command  # not the seed's, which is the longer run


def test_a_folder_that_takes_no_tape_costs_the_tape_alone(failure: Failure, capsys, monkeypatch) -> None:
    monkeypatch.chdir("/proc")
    monkeypatch.setattr(sim, "BUDGET_S", 2)
    assert main.run(["sim", "--seed", str(failure.seed), "--only", MUTANT, "--shrink", "--json"]) == 1
    out, error = capsys.readouterr()
    answer = json.loads(out)
    assert answer["violation"].startswith(failure.invariant)
    assert answer["shrunk_tape"] is None
    assert f"{failure.invariant} is broken" in error
    assert len([line for line in error.splitlines() if line.startswith("relay: cannot write")]) == 1
    assert error.strip().splitlines()[-1] == f"replay: {failure.replay_command} --shrink"


def test_a_tape_is_never_written_over_another_file(tmp_path) -> None:
    names = [Tape(1, keep=True).save_new(tmp_path / "x.tape", "here").name for _ in range(3)]
    assert names == ["x.tape", "x-2.tape", "x-3.tape"]
    (tmp_path / "y.tape").symlink_to("/nowhere")
    assert Tape(1, keep=True).save_new(tmp_path / "y.tape", "here").name == "y-2.tape"


@pytest.mark.parametrize(("step", "kept"), [(1, False), (0, True), (-1, True)])
def test_a_smaller_run_has_no_more_events(failure: Failure, step: int, kept: bool) -> None:
    """What has fewer faults and requests and takes longer to break is not smaller."""

    def play(tape: Tape) -> Run:
        count = failure.events + step * (len(tape.edits.without) + len(tape.edits.fixed))
        return Run(failure.seed, count, 0, {}, {}, {}, "", replace(failure, edits=tape.edits, events=count))

    smaller = shrink(failure, budget_s=20, play=play)
    assert smaller.tried > 4
    assert bool(smaller.tape.edits) == kept
    assert smaller.events[1] <= smaller.events[0]
    assert smaller.summary().endswith("(the probes are not counted)") == (smaller.requests[1] == 0) == kept


def test_a_story_tells_probes_from_requests_and_separates_causes() -> None:
    """Some seed restarts a worker."""
    runs = (run_tape(Tape(seed), story=True) for seed in range(3))
    lines = [line for run in runs for line in run.story]
    assert not [line for line in lines if line != line.rstrip()]
    assert any("(a probe): " in line for line in lines)
    starts = [line for line in lines if " starts, incarnation " in line]
    assert all(re.search(r"incarnation \d+(: .+)?$", line) for line in starts)
