"""The alarm rings: planted bugs are found, reported with what is needed to see them again, and gone afterwards."""

import json

import pytest

from relay.cli import main
from relay.engine.scheduler import Scheduler
from relay.sim.mutants import MUTANTS, Mutant, by_name, find, planted, seeds_needed
from relay.sim.run import run_seed

CANARIES = (
    "no cancel fan-out",
    "stale epoch accepted",
    "shared block released twice",
    "disagreement ignored",
    "an adopted stream begins one late",
    "partial coverage accepted",
)


@pytest.mark.parametrize("name", CANARIES)
def test_canary_mutants_are_found(name: str) -> None:
    found = find(by_name(name), 40)
    assert found is not None
    assert found.runs <= 40
    assert found.by.startswith(("seed", "scenario"))
    assert run_seed(0).failure is None, "the bug is still there"


def test_seeds_alone_find_a_mutant() -> None:
    assert seeds_needed(by_name("Retry-After 0"), 20) is not None


def test_a_mutant_that_is_none_is_not_found() -> None:
    harmless = Mutant("nothing changes", "I1", Scheduler, "cancel", lambda original: original)
    assert find(harmless, 3) is None


def test_there_are_many() -> None:
    assert len(MUTANTS) >= 60


def test_mutants_have_names_of_their_own_and_change_something() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        original = mutant.owner.__dict__[mutant.attribute]
        with planted(mutant):
            assert mutant.owner.__dict__[mutant.attribute] is not original, mutant.name
        assert mutant.owner.__dict__[mutant.attribute] is original


def test_the_report_of_a_violation() -> None:
    with planted(by_name("Retry-After 0")):
        failure = next(run.failure for run in map(run_seed, range(20)) if run.failure is not None)
    lines = failure.report().splitlines()
    assert lines[0].startswith(f"seed {failure.seed}: I5 is broken")
    assert lines[-1] == f"replay: relay sim --seed {failure.seed}"
    assert len(lines) <= 40
    assert any("request" in line for line in failure.story)


def test_json_of_the_mutants(capsys) -> None:
    assert main.run(["sim", "--mutants", "--only", "no cancel fan-out", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["mutants"], answer["found"]) == (1, 1)
    assert answer["seeds_needed"]["no cancel fan-out"] >= 1
    assert answer["found_by"]["no cancel fan-out"]
    assert answer["invariants"]["no cancel fan-out"] == "I8"
