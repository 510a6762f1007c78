"""``relay sim``: whole clusters in one thread, under faults, from one seed each."""

import json
import subprocess
from pathlib import Path

import click

from relay import __version__
from relay.cli.sim_directed import find, play
from relay.errors import UsageError
from relay.sim.run import Run, run_seed, run_tape, sweep
from relay.sim.tape import load

VIOLATION_STATUS = 1


@click.command()
@click.option("--seed", type=click.IntRange(min=0), help="Run this one seed.")
@click.option("--seeds", type=click.IntRange(min=1), help="Run this many seeds, from --first on.")
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="First seed of --seeds.")
@click.option(
    "--tape", type=click.Path(path_type=Path, dir_okay=False), help="Replay a recorded tape instead of a seed."
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="With --seed: write its tape here.")
@click.option("--mutants", is_flag=True, help="Plant each known bug in turn; all must be found.")
@click.option(
    "--only", multiple=True, metavar="NAME", help="With --mutants: only this one; can be given more than once."
)
@click.option("--scenario", metavar="NAME", help="Play this directed scenario, under --seed or under several seeds.")
@click.option("--scenarios", is_flag=True, help="Play all directed scenarios.")
@click.option("--story", is_flag=True, help="With --seed or --tape: print the last lines of the story, broken or not.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sim(
    seed: int | None,
    seeds: int | None,
    first: int,
    tape: Path | None,
    record: Path | None,
    mutants: bool,
    only: tuple[str, ...],
    scenario: str | None,
    scenarios: bool,
    story: bool,
    as_json: bool,
) -> int:
    """Simulate clusters of the production cores under faults. Exit 1 when an invariant breaks (or a planted bug is not found)."""
    if scenario is not None or scenarios:
        if mutants or only or seeds is not None or tape is not None or (scenario is not None and scenarios):
            raise UsageError("--scenario goes with --seed, --story and --json alone")
        return play(scenario, seed, story, as_json)
    if sum(chosen is not None and chosen is not False for chosen in (seed, seeds, tape, mutants or None)) != 1:
        raise UsageError("give one of --seed, --seeds, --tape, --mutants, --scenario and --scenarios")
    if record is not None and seed is None:
        raise UsageError("--record goes with --seed")
    if only and not mutants:
        raise UsageError("--only goes with --mutants")
    if mutants:
        return find(only, as_json)
    if seeds is not None:
        return _sweep(range(first, first + seeds), as_json)
    if tape is not None:
        played, commit = load(tape)
        if commit != _commit():
            click.echo(f"relay: {tape} was recorded with {commit}, this is {_commit()}; it may not fit", err=True)
        return _one(run_tape(played), as_json, story)
    run = run_seed(seed or 0)
    if record is not None:
        run.tape.save(record, _commit())
    return _one(run, as_json, story)


def _one(run: Run, as_json: bool, story: bool) -> int:
    if as_json:
        failure = run.failure
        answer = {
            "seed": run.seed,
            "events": run.events,
            "requests": run.requests,
            "faults": run.faults,
            "violations": int(failure is not None),
            "violation": None if failure is None else f"{failure.invariant}: {failure.text}",
            "trace_hash": run.trace_hash,
        }
        click.echo(json.dumps(answer))
    elif run.failure is not None:
        click.echo(run.failure.report())
    else:
        faults = sum(run.faults.values())
        click.echo(
            f"seed {run.seed}: {run.requests} requests, {faults} faults, {run.events} events, "
            f"nothing broken; trace {run.trace_hash}"
        )
        if story:
            click.echo("\n".join(run.story))
    return VIOLATION_STATUS if run.failure is not None else 0


def _sweep(seeds: range, as_json: bool) -> int:
    def progress(run: Run) -> None:
        if run.failure is not None:
            click.echo(run.failure.report(), err=as_json)

    total = sweep(seeds, progress)
    if as_json:
        click.echo(json.dumps(total.summary()))
    else:
        click.echo(
            f"{total.seeds} seeds, {total.requests} requests, {sum(total.faults.values())} faults of {len(total.faults)} kinds, "
            f"{total.events} events ({total.events / max(total.seconds, 1e-9):.0f} a second): "
            f"{len(total.failures) or 'no'} violations; trace {total.trace_hash}"
        )
    return VIOLATION_STATUS if total.failures else 0


def _commit() -> str:
    """The commit of the source that runs; the release where it is no checkout."""
    source = Path(__file__).resolve().parent
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"release {__version__}"
    return answer.stdout.strip()
