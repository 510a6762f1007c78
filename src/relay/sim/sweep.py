"""Many seeds on many cores, then directed runs for what they did not meet. The result does not depend on the number of cores."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from relay.sim import coverage
from relay.sim.coverage import Cell
from relay.sim.director import directed
from relay.sim.pool import Order, Pool, Runner
from relay.sim.run import Failure, Run

MAX_FAILURES = 5
DIRECTED_SEEDS = 120  # tried for one cell
EXTRA_SEEDS = 240  # for names that were never counted
ROUND = 24  # of these

Progress = Callable[[Run], None]


@dataclass(slots=True)
class Sweep:
    """The sum of many runs."""

    first: int
    jobs: int
    seeds: int = 0
    directed: int = 0  # runs to fill cells, not counted in ``seeds``
    extra: int = 0  # seeds after the last one, for names that were never counted; not counted in ``seeds`` either
    events: int = 0
    requests: int = 0
    cpu_s: float = 0.0  # of all processes
    wall_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    trace_hash: str = ""  # of the seeds' traces in the order of the seeds

    def summary(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "seeds": self.seeds,
            "first_seed": self.first,
            "jobs": self.jobs,
            "events": self.events,
            "events_per_s": round(self.events / self.cpu_s) if self.cpu_s else 0,  # of one core
            "wall_s": round(self.wall_s, 1),
            "requests": self.requests,
            "faults": dict(sorted(self.faults.items())),
            "violations": len(self.failures),
            "violating_seeds": sorted({failure.seed for failure in self.failures}),
            "sometimes": dict(sorted(self.counts.items())),
            "sometimes_missing": coverage.missing(self.counts),
            "cells": len(coverage.possible_cells()),
            "zero_cells": len(self.zero_cells),
            "zero_cells_named": [f"{fault}/{moment}" for fault, moment in self.zero_cells],
            "impossible_cells": len(coverage.IMPOSSIBLE),
            "directed_runs": self.directed,
            "extra_seeds": self.extra,
            "trace_hash": self.trace_hash,
        }

    @property
    def zero_cells(self) -> list[Cell]:
        return coverage.zero_cells(self.cells)

    def add(self, run: Run) -> None:
        self.events += run.events
        self.requests += run.requests
        self.cpu_s += run.cpu_s
        self.faults.update(run.faults)
        self.counts.update(run.counts)
        self.cells.update(run.cells)
        if run.failure is not None:
            self.failures.append(run.failure)


def sweep(
    first: int,
    seeds: int | None,
    *,
    jobs: int = 1,
    time_limit_s: float | None = None,
    fill: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Run ``seeds`` seeds from ``first`` on (None: as many as the time allows), then, with ``fill``, directed runs for every cell
    that was not met. Stops early after some failures or at the time limit; what was begun by then is finished.
    """
    total = Sweep(first, jobs)
    started = time.monotonic()
    hashes: dict[int, str] = {}

    def go_on() -> bool:
        late = time_limit_s is not None and time.monotonic() - started >= time_limit_s
        return not late and len(total.failures) < MAX_FAILURES

    def orders() -> Iterator[Order]:
        seed = first
        while (seeds is None or seed < first + seeds) and go_on():
            yield Order(seed)
            seed += 1

    def done(order: Order, run: Run) -> None:
        total.seeds += 1
        hashes[order.seed] = run.trace_hash
        total.add(run)
        if progress is not None:
            progress(run)

    if jobs == 1:
        with Runner() as runner:
            _alone(runner, orders(), done)
            if fill:
                _fill(total, lambda given, told: _alone(runner, given, told), go_on, progress)
    else:
        with Pool(jobs) as pool:
            pool.each(orders(), done)
            if fill:
                _fill(total, pool.each, go_on, progress)
    digest = blake2b(digest_size=16)
    for seed in sorted(hashes):
        digest.update(hashes[seed].encode())
    total.trace_hash = digest.hexdigest()
    total.failures.sort(key=lambda failure: failure.seed)
    total.wall_s = time.monotonic() - started
    return total


def _alone(runner: Runner, orders: Iterator[Order], done: Callable[[Order, Run], None]) -> None:
    for order in orders:
        done(order, runner.run(order))


def _fill(
    total: Sweep,
    each: Callable[[Iterator[Order], Callable[[Order, Run], None]], None],
    go_on: Callable[[], bool],
    progress: Progress | None,
) -> None:
    """Directed runs, one seed after another, for the cells that are still zero; then more seeds for names that are.

    What is still zero depends on the results of whole rounds alone, so not on who was faster.
    """

    def play(orders: list[Order]) -> int:
        runs: list[Run] = []
        each((order for order in orders if go_on()), lambda order, run: runs.append(run))
        for run in runs:
            total.add(run)
            if progress is not None:
                progress(run)
        return len(runs)

    for seed in range(DIRECTED_SEEDS):
        cells = total.zero_cells
        if not cells or not go_on():
            break
        total.directed += play([Order(seed, directed(*cell)) for cell in cells])
    next_seed = total.first + total.seeds
    while coverage.missing(total.counts) and total.extra < EXTRA_SEEDS and go_on():
        total.extra += play([Order(next_seed + total.extra + number) for number in range(ROUND)])
