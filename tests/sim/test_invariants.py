"""docs/invariants.md and docs/state-machines.md tell of what is there: symbols, mutants, scenarios, transitions."""

import ast
import importlib
from pathlib import Path

import pytest
from benchmarks import pages

from relay.control.transitions import ChoiceState, Trigger
from relay.sim.invariants import INVARIANTS
from relay.sim.mutants import MUTANTS

ROOT = Path(__file__).parent.parent.parent
NAMES = [f"I{number}" for number in range(1, 19)]


def test_all_invariants_are_there_and_each_has_a_mutant() -> None:
    assert [invariant.name for invariant in INVARIANTS][:18] == NAMES
    broken = {mutant.breaks for mutant in MUTANTS}
    assert set(NAMES) <= broken
    assert broken <= {invariant.name for invariant in INVARIANTS}


@pytest.mark.parametrize(
    "place", sorted({place for invariant in INVARIANTS for place in invariant.asserted}), ids=lambda place: place
)
def test_where_an_invariant_is_asserted_exists(place: str) -> None:
    file, symbol = place.split(": ")
    if file.startswith("tests/"):
        tree = ast.parse((ROOT / file).read_text())
        assert symbol in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        return
    found = importlib.import_module("relay." + file.removesuffix(".py").replace("/", "."))
    for part in symbol.split("."):
        found = getattr(found, part)


def test_mutants_are_planted_in_production_code() -> None:
    for mutant in MUTANTS:
        file = mutant.place.split(": ")[0]
        assert (ROOT / "src" / "relay" / file).exists(), mutant.place
        # The simulated KV link calls these two itself; everything else is patched where it is defined.
        assert not file.startswith("sim/") or mutant.place in ("sim/kv_link.py: verify", "sim/kv_link.py: mismatch")


def test_the_pages_are_what_the_tables_say() -> None:
    stale = [path.name for path, text in pages.pages().items() if path.read_text() != text]
    assert not stale, f"{stale}: run python -m benchmarks.pages"


def test_a_diagram_shows_every_transition() -> None:
    table = {
        (ChoiceState.WAITING, Trigger.PLACE): ChoiceState.PLACED,
        (ChoiceState.PLACED, Trigger.REOPEN): ChoiceState.WAITING,
        (ChoiceState.PLACED, Trigger.END): ChoiceState.ENDED,
        (ChoiceState.WAITING, Trigger.END): ChoiceState.ENDED,
    }
    drawn = pages.diagram((ChoiceState.WAITING,), table)
    assert drawn.count("-->") == 6
    assert "placed --> waiting: reopen" in drawn
    assert "ended --> [*]" in drawn
    assert "waiting --> [*]" not in drawn
