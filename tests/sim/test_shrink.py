"""A violation is shrunk to a tape that breaks the same, with a story that fits on a screen."""

import pytest

from relay.cli import main
from relay.record.frames import read
from relay.sim.mutants import by_name, planted
from relay.sim.run import Failure, run_tape
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
