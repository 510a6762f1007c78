"""Planted bugs: one-line changes of the cores that the simulation must find. They prove that the alarm rings.

Each is a patch of one attribute of a production class for the length of a run; nothing of it exists in production. They are tried
under the directed scenarios first, because those find most of them in a moment, and then under seeds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from relay.errors import UsageError
from relay.sim.planted import blame, control, engine, gateways, suspicion, worker
from relay.sim.planted.mutant import Mutant, planted
from relay.sim.run import Run, run_seed
from relay.sim.scenarios.catalogue import SCENARIOS, run_scenario

__all__ = ["MUTANTS", "SEEDS", "Finding", "Mutant", "by_name", "find", "planted", "seeds_needed"]

SEEDS = 500  # runs that may be needed
SCENARIO_SEEDS = 2  # of each scenario, before the seeds

MUTANTS: tuple[Mutant, ...] = (
    control.TABLE + blame.TABLE + suspicion.TABLE + gateways.TABLE + engine.TABLE + worker.TABLE
)


@dataclass(frozen=True, slots=True)
class Finding:
    """``runs``: how many it took, this one included."""

    runs: int
    by: str  # "seed 3" or "scenario abort-storm, seed 0"
    invariant: str


def by_name(name: str) -> Mutant:
    """Raises UsageError with all names for one that is unknown."""
    found = next((mutant for mutant in MUTANTS if mutant.name == name), None)
    if found is None:
        raise UsageError(f"no mutant is named {name!r}; there are {', '.join(mutant.name for mutant in MUTANTS)}")
    return found


def find(mutant: Mutant, runs: int = SEEDS) -> Finding | None:
    """The first run that notices ``mutant``; None if ``runs`` are not enough."""
    with planted(mutant):
        for count, (by, run) in enumerate(_runs(), 1):
            if count > runs:
                return None
            if run.failure is not None:
                return Finding(count, by, run.failure.invariant)
    return None


def seeds_needed(mutant: Mutant, seeds: int = SEEDS, first: int = 0) -> int | None:
    """How many seeds alone, without scenarios, it takes to find ``mutant``; None if ``seeds`` are not enough."""
    with planted(mutant):
        for count in range(1, seeds + 1):
            if run_seed(first + count - 1).failure is not None:
                return count
    return None


def _runs() -> Iterator[tuple[str, Run]]:
    """All runs in the order in which they are tried, each made when it is asked for."""
    for seed in range(SCENARIO_SEEDS):
        for scenario in SCENARIOS:
            yield f"scenario {scenario.name}, seed {seed}", run_scenario(scenario, seed)
    for seed in range(SEEDS):
        yield f"seed {seed}", run_seed(seed)
