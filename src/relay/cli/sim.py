"""``relay sim``: whole clusters in one thread, under faults, from one seed each."""

import json
import math
import os
import platform
import secrets
import shlex
from pathlib import Path

import click

from relay.cli.sim_mutants import choose, choose_one, find_all
from relay.cli.sim_scenarios import play
from relay.errors import UsageError
from relay.record.commit import commit
from relay.record.frames import BadRecording, Recording, read
from relay.record.machine import machine
from relay.sim import coverage
from relay.sim.director import directed as directed_edits
from relay.sim.moments import MOMENTS
from relay.sim.mutants import by_name, planted
from relay.sim.run import Failure, Run, run_tape
from relay.sim.shrink import BUDGET_S, shrink
from relay.sim.swarm import FAULTS
from relay.sim.sweep import Sweep, sweep
from relay.sim.tape import Edits, Tape, tape_of

VIOLATION_STATUS = 1
FILL_FROM = 100  # seeds: a smaller sweep is no claim about coverage


@click.command()
@click.option("--seed", type=click.IntRange(min=0), help="Run this one seed.")
@click.option("--seeds", type=click.IntRange(min=1), help="Run this many seeds, from --first-seed on.")
@click.option("--first-seed", type=click.IntRange(min=0), default=0, show_default=True, help="First seed of --seeds.")
@click.option(
    "--fresh", is_flag=True, help="With --seeds or --time-limit: begin at a seed that nobody knows yet, and say which."
)
@click.option("--time-limit", type=float, metavar="SECONDS", help="Begin no run of a sweep after this time.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Processes of a sweep [default: one a core] or of --mutants [default: 1].",
)
@click.option(
    "--fill/--no-fill",
    default=None,
    help=f"Directed runs for what was not met [default: from {FILL_FROM} seeds on].",
)
@click.option(
    "--directed", metavar="FAULT:MOMENT", help="With --seed: only this fault, when a request is in this moment."
)
@click.option(
    "--tape", type=click.Path(path_type=Path, dir_okay=False), help="Replay a recorded tape instead of a seed."
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="With --seed: write its tape here.")
@click.option(
    "--shrink/--no-shrink",
    "shrinks",
    default=None,
    help="Look for a smaller run that breaks it too [default: in sweeps].",
)
@click.option("--mutants", is_flag=True, help="Plant each known bug in turn; all must be found.")
@click.option(
    "--only",
    "--mutant",
    "only",
    multiple=True,
    help="The mutant of this name, or those whose names contain it; with --seed or --scenario: the one to plant.",
)
@click.option("--scenario", metavar="NAME", help="Play this directed scenario, under --seed or under several seeds.")
@click.option("--scenarios", is_flag=True, help="Play all directed scenarios.")
@click.option("--story", is_flag=True, help="With --seed or --tape: print the last lines of the story, broken or not.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sim(
    seed: int | None,
    seeds: int | None,
    first_seed: int,
    fresh: bool,
    time_limit: float | None,
    jobs: int | None,
    fill: bool | None,
    directed: str | None,
    tape: Path | None,
    record: Path | None,
    shrinks: bool | None,
    mutants: bool,
    only: tuple[str, ...],
    scenario: str | None,
    scenarios: bool,
    story: bool,
    as_json: bool,
) -> int:
    """Simulate clusters of the production cores under faults. Exit 1 when an invariant breaks, or a planted bug is not found."""
    if scenario is not None or scenarios:
        others = (seeds, time_limit, directed, tape, record, mutants or None, (scenario and scenarios) or None)
        if any(other is not None for other in others):
            raise UsageError("--scenario and --scenarios go with --seed, --only, --story and --json alone")
        return play(scenario, seed, only, story, as_json)
    sweeping = seeds is not None or (time_limit is not None and not mutants)
    if sum((seed is not None, sweeping, tape is not None, mutants)) != 1:
        raise UsageError("give one of --seed, --seeds (or --time-limit), --tape, --mutants, --scenario and --scenarios")
    for flag, given in (("--record", record), ("--directed", directed)):
        if given is not None and seed is None:
            raise UsageError(f"{flag} goes with --seed")
    if only and not mutants and seed is None:
        raise UsageError("--only goes with --mutants or --seed")
    if time_limit is not None and not 0 < time_limit < math.inf:  # NaN is not
        raise UsageError(f"--time-limit: {time_limit:g} is no time that can pass; give seconds above 0")
    if fresh and not sweeping:
        raise UsageError("--fresh goes with --seeds or --time-limit")
    cores = len(os.sched_getaffinity(0))
    if mutants:
        return find_all(choose(only), jobs or 1, as_json)
    if sweeping:
        first = secrets.randbelow(1 << 40) + (1 << 20) if fresh else first_seed
        filling = fill if fill is not None else seeds is not None and seeds >= FILL_FROM
        return _sweep(first, seeds, jobs or cores, time_limit, filling, shrinks is not False, as_json)
    if record is not None and record.exists() and not record.is_file():
        raise UsageError(f"--record: {record} is no regular file")
    if tape is not None:
        return play_tape(read(tape), as_json=as_json, story=story, shrinks=bool(shrinks))
    edits = _direction(directed) if directed is not None else Edits()
    name = choose_one(only).name if only else ""
    played = Tape(seed or 0, edits, keep=record is not None, mutant=name)
    status = _one(_play(played, story), edits, as_json, story, shrinks=bool(shrinks))
    if record is not None:
        try:
            path = played.save_new(record, commit())
            if path != record:
                click.echo(f"relay: {record} was there already; the tape is {path}", err=True)
        except BadRecording as error:
            if status == 0:
                raise
            click.echo(f"relay: {error}", err=True)  # the violation is what matters, and the exit code tells of it
    return status


def play_tape(recording: Recording, *, as_json: bool, story: bool, shrinks: bool = False) -> int:
    """Replay a recording of kind "sim"; returns the exit code. Raises BadRecording."""
    tape = tape_of(recording)
    recorded, here = recording.head.commit, commit()
    if recorded != here:
        click.echo(f"relay: {recording.path} was recorded with {recorded}, this is {here}; it may not fit", err=True)
    run = _play(tape, story)
    if tape.unused:  # only after a violation; without one the tape is refused
        click.echo(f"relay: the violation came before {tape.unused} choices of {recording.path} were made", err=True)
    again = f"relay sim --tape {shlex.quote(str(recording.path))}"
    return _one(run, tape.edits, as_json, story, shrinks=shrinks, again=again)


def _play(tape: Tape, story: bool) -> Run:
    if not tape.mutant:
        return run_tape(tape, story=story)
    with planted(by_name(tape.mutant)):
        return run_tape(tape, story=story)


def _direction(text: str) -> Edits:
    fault, _, moment = text.partition(":")
    for name, known, kind in ((fault, FAULTS, "fault"), (moment, MOMENTS, "moment")):
        if name not in known:
            raise UsageError(f"--directed: no {kind} is called {name!r}; there are {', '.join(known)}")
    reason = coverage.IMPOSSIBLE.get((fault, moment))
    if reason is not None:
        raise UsageError(f"--directed: {fault} cannot strike in the moment {moment}: {reason}")
    return directed_edits(fault, moment)


def _one(run: Run, edits: Edits, as_json: bool, story: bool, *, shrinks: bool, again: str = "") -> int:
    """Tell of one run; ``again``: what to type to see it again, if its seed is not enough. Returns the exit code."""
    failure = run.failure
    cell = None if edits.directed is None else "/".join(edits.directed)
    struck = None if cell is None else run.cells.get(cell, 0) > 0  # None: nobody directed anything
    tape = _shrunk(failure, again) if failure is not None and shrinks else None
    if as_json:
        answer = {
            "seed": run.seed,
            "events": run.events,
            "requests": run.requests,
            "faults": run.faults,
            "violations": int(failure is not None),
            "violation": None if failure is None else f"{failure.invariant}: {failure.text}",
            "shrunk_tape": None if tape is None else str(tape),
            "trace_hash": run.trace_hash,
        }
        click.echo(json.dumps(answer if struck is None else {**answer, "struck": struck}))
    elif failure is not None:
        if tape is None:
            click.echo(failure.report(again))
    else:
        faults = sum(run.faults.values())
        click.echo(
            f"seed {run.seed}: {run.requests} requests, {faults} faults, {run.events} events, "
            f"nothing broken; trace {run.trace_hash}"
        )
        if story:
            click.echo("\n".join(run.story))
    if struck is False:
        click.echo(f"relay: {cell} never came: the fault did not strike in that moment; try another seed", err=True)
    return VIOLATION_STATUS if failure is not None else 0


def _shrunk(failure: Failure, again: str = "") -> Path | None:
    """Look for a smaller run, print its story, write its tape; None if the tape could not be written."""
    click.echo(f"shrinking seed {failure.seed} (at most {BUDGET_S:g} s)", err=True)
    smaller = shrink(failure, BUDGET_S)
    replay = (
        f"{again or failure.replay_command} --shrink"  # without its tape the smaller run has to be looked for again
    )
    path: Path | None = None
    try:
        path = smaller.tape.save_new(Path(f"relay-sim-{failure.seed}-{failure.invariant}.tape"), commit())
        replay = f"relay sim --tape {shlex.quote(str(path))}"
    except BadRecording as error:
        click.echo(f"relay: {error}", err=True)
    click.echo(f"{smaller.summary()}\n{smaller.failure.report(replay)}", err=True)
    return path


def _sweep(
    first: int, seeds: int | None, jobs: int, time_limit: float | None, fill: bool, shrinks: bool, as_json: bool
) -> int:
    def progress(run: Run) -> None:
        if run.failure is not None:
            click.echo(run.failure.report(), err=True)

    total = sweep(first, seeds, jobs=jobs, time_limit_s=time_limit, fill=fill, progress=progress)
    if not total.seeds:
        raise UsageError(f"no seed was run: the time limit of {time_limit:g} s was over before the first")
    if shrinks and total.failures:
        _shrunk(total.failures[0])
    if as_json:
        where = {"machine": machine(), "python": platform.python_version(), "commit": commit()}
        click.echo(json.dumps({**total.summary(), **where}))
    else:
        _print(total, fill)
    incomplete = fill and (total.zero_cells or coverage.missing(total.counts)) and time_limit is None
    return VIOLATION_STATUS if total.failures or incomplete else 0


def _print(total: Sweep, fill: bool) -> None:
    last = total.first + total.seeds - 1
    click.echo(
        f"{total.seeds} seeds ({total.first} to {last}) on {total.jobs} processes in {total.wall_s:.0f} s: "
        f"{total.requests} requests, {sum(total.faults.values())} faults of {len(total.faults)} kinds, "
        f"{total.events} events ({total.events / max(total.cpu_s, 1e-9):.0f} a second of one core), "
        f"{len(total.failures) or 'no'} violations; trace {total.trace_hash}"
    )
    if fill:
        zero = [f"{fault}/{moment}" for fault, moment in total.zero_cells]
        missing = coverage.missing(total.counts)
        click.echo(
            f"fault × moment: {len(coverage.possible_cells())} cells, {total.directed} directed runs, "
            f"{total.extra} more seeds, "
            f"never met: {', '.join(zero) or 'none'}"
        )
        click.echo(f"never seen: {', '.join(missing) or 'nothing of what must be'}")
    click.echo(
        f"any of them again: relay sim --seed N; all: relay sim --seeds {total.seeds} --first-seed {total.first}"
    )
