"""All directed scenarios by name, and how one is run."""

from relay.errors import UsageError
from relay.sim.run import Run, run_tape
from relay.sim.scenarios.clients import SCENARIOS as CLIENTS
from relay.sim.scenarios.gateways import SCENARIOS as GATEWAYS
from relay.sim.scenarios.grey import SCENARIOS as GREY
from relay.sim.scenarios.hostile import SCENARIOS as HOSTILE
from relay.sim.scenarios.membership import SCENARIOS as MEMBERSHIP
from relay.sim.scenarios.stage import Scenario
from relay.sim.scenarios.transfers import SCENARIOS as TRANSFERS
from relay.sim.tape import Tape

SCENARIOS: tuple[Scenario, ...] = CLIENTS + MEMBERSHIP + GATEWAYS + GREY + HOSTILE + TRANSFERS


def by_name(name: str) -> Scenario:
    """Raises UsageError with all names for one that is unknown."""
    found = next((scenario for scenario in SCENARIOS if scenario.name == name), None)
    if found is None:
        names = ", ".join(scenario.name for scenario in SCENARIOS)
        raise UsageError(f"no scenario is named {name!r}; there are {names}")
    return found


def run_scenario(scenario: Scenario, seed: int, *, story: bool = False) -> Run:
    return run_tape(Tape(seed), scenario, story=story)
