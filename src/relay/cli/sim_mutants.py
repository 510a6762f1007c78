"""``relay sim --mutants``: every planted bug must be found."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

import click

from relay.errors import UsageError
from relay.sim.mutants import MUTANTS, SEEDS, Finding, Mutant, find

NOT_FOUND_STATUS = 1


def choose(only: tuple[str, ...]) -> list[Mutant]:
    """Mutants of exactly these names, or else those whose names contain one of them; all without any."""
    exact = [mutant for mutant in MUTANTS if mutant.name in only]
    chosen = exact or [mutant for mutant in MUTANTS if not only or any(part in mutant.name for part in only)]
    if not chosen:
        raise UsageError(f"no mutant is named like {', '.join(only)}; there are {', '.join(m.name for m in MUTANTS)}")
    return chosen


def choose_one(only: tuple[str, ...]) -> Mutant:
    """The one that ``only`` names. Raises UsageError with all that it names if they are several."""
    chosen = choose(only)
    if len(chosen) > 1:
        names = ", ".join(repr(mutant.name) for mutant in chosen)
        raise UsageError(f"--only names {len(chosen)} mutants, and a run has one: {names}")
    return chosen[0]


def find_all(chosen: list[Mutant], jobs: int, as_json: bool) -> int:
    """Plant them in turn, ``jobs`` at a time; says what found each (on stderr with ``as_json``). Exit status 0: all were found."""
    findings: dict[str, Finding | None] = {}

    def done(mutant: Mutant, finding: Finding | None) -> None:
        findings[mutant.name] = finding
        text = f"{finding.invariant}, by {finding.by}" if finding else f"not found in {SEEDS} runs"
        click.echo(f"{mutant.name}: {text}", err=as_json)

    if jobs == 1 or len(chosen) == 1:
        for mutant in chosen:
            done(mutant, find(mutant))
    else:
        _side_by_side(chosen, jobs, done)
    found = sum(finding is not None for finding in findings.values())
    if as_json:
        ordered = {mutant.name: findings[mutant.name] for mutant in chosen}
        answer = {
            "mutants": len(chosen),
            "found": found,
            "seeds_needed": {name: finding and finding.runs for name, finding in ordered.items()},
            "found_by": {name: finding and finding.by for name, finding in ordered.items()},
            "invariants": {name: finding and finding.invariant for name, finding in ordered.items()},
        }
        click.echo(json.dumps(answer))
    return 0 if found == len(chosen) else NOT_FOUND_STATUS


def _side_by_side(chosen: list[Mutant], jobs: int, done: "Done") -> None:
    """One process a mutant, so that no patch meets another."""
    waiting = iter(chosen)
    lock = threading.Lock()
    problems: list[BaseException] = []

    def serve(orders: Iterator[Mutant]) -> None:
        while not problems:
            with lock:
                mutant = next(orders, None)
            if mutant is None:
                return
            command = [sys.executable, "-m", "relay.cli.main", "sim", "--mutants", "--only", mutant.name, "--json"]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            try:
                answer = json.loads(run.stdout)
                runs = answer["seeds_needed"][mutant.name]
                by, invariant = answer["found_by"][mutant.name], answer["invariants"][mutant.name]
            except (ValueError, KeyError) as error:
                problems.append(AssertionError(f"{mutant.name}: {error!r}: {run.stderr[-2000:]}"))
                return
            with lock:
                done(mutant, Finding(runs, by, invariant) if runs is not None else None)

    threads = [threading.Thread(target=serve, args=(waiting,)) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


class Done(Protocol):
    """Told of each mutant when it is known."""

    def __call__(self, mutant: Mutant, finding: Finding | None) -> None: ...
