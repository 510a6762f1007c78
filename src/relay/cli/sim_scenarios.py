"""``relay sim --scenario``: public incidents, staged."""

import json
from contextlib import nullcontext

import click

from relay.cli.sim_mutants import choose_one
from relay.sim.mutants import planted
from relay.sim.scenarios import catalogue

SCENARIO_SEEDS = 10


def play(name: str | None, seed: int | None, only: tuple[str, ...], story: bool, as_json: bool) -> int:
    """Play one scenario or all of them, under one seed or several, with the mutant ``only`` if one is named. 0 if nothing broke."""
    scenarios = [catalogue.by_name(name)] if name is not None else list(catalogue.SCENARIOS)
    seeds = range(SCENARIO_SEEDS) if seed is None else range(seed, seed + 1)
    broken = 0
    answers = []
    for scenario in scenarios:
        with planted(choose_one(only)) if only else nullcontext():
            runs = [catalogue.run_scenario(scenario, each, story=story) for each in seeds]
        failures = [run.failure for run in runs if run.failure is not None]
        broken += len(failures)
        events = sum(run.events for run in runs)
        answers.append(
            {"scenario": scenario.name, "seeds": len(runs), "events": events, "violations": len(failures)}
            | {"violating_seeds": [failure.seed for failure in failures], "trace_hash": runs[-1].trace_hash}
        )
        for failure in failures:
            click.echo(failure.report(), err=as_json)
        if not as_json:
            click.echo(f"{scenario.name}: {len(runs)} seeds, {events} events, {len(failures) or 'no'} violations")
        if story and not failures:
            click.echo("\n".join(runs[-1].story), err=as_json)
    if as_json:
        click.echo(json.dumps({"scenarios": answers, "violations": broken}))
    return 1 if broken else 0
