"""Runs of one seed, one tape, many seeds."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from relay.sim.checkers import STATEMENTS
from relay.sim.kernel import Violation
from relay.sim.swarm import Swarm
from relay.sim.tape import ForeignTape, Tape
from relay.sim.world import World, fault_counts

STORY_LINES = 40


@dataclass(slots=True)
class Failure:
    """A broken invariant, with everything to see it again."""

    seed: int
    invariant: str
    text: str
    now_ns: int
    events: int
    story: list[str]
    scenario: str = ""

    def report(self) -> str:
        name = f"scenario {self.scenario}, " if self.scenario else ""
        option = f"--scenario {self.scenario} " if self.scenario else ""
        lines = [
            f"{name}seed {self.seed}: {self.invariant} is broken after {self.events} events, at {self.now_ns / 1e6:.3f} ms",
            f"  {self.invariant}: {STATEMENTS.get(self.invariant, 'the simulation itself')}",
            f"  {self.text}",
            "the story:",
            *[f"  {line}" for line in self.story],
            f"replay: relay sim {option}--seed {self.seed}",
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Run:
    """What one run did."""

    seed: int
    events: int
    requests: int
    faults: dict[str, int]
    counts: dict[str, int]
    trace_hash: str
    failure: Failure | None
    story: list[str]
    tape: Tape


@dataclass(slots=True)
class Sweep:
    """The sum of many runs."""

    seeds: int = 0
    events: int = 0
    requests: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    trace_hash: str = ""

    def summary(self) -> dict[str, object]:
        return {
            "seeds": self.seeds,
            "events": self.events,
            "events_per_s": round(self.events / self.seconds) if self.seconds else 0,
            "requests": self.requests,
            "faults": dict(sorted(self.faults.items())),
            "violations": len(self.failures),
            "violating_seeds": [failure.seed for failure in self.failures],
            "sometimes": dict(sorted(self.counts.items())),
            "trace_hash": self.trace_hash,
        }


class Script(Protocol):
    """What may take the place of drawn requests and faults: a directed scenario."""

    @property
    def name(self) -> str: ...

    @property
    def swarm(self) -> Swarm: ...

    def run(self, world: World) -> None: ...


def run_tape(tape: Tape, script: Script | None = None) -> Run:
    """Play one tape through. A broken invariant is in ``failure``; a tape that does not fit raises ForeignTape."""
    world: World | None = None
    failure = None
    try:
        world = World(tape, script.swarm if script else None)
        if script is None:
            world.run()
        else:
            script.run(world)
    except ForeignTape:
        raise
    except Violation as violation:
        failure = _failure(tape, world, violation.invariant, violation.text, script)
    except Exception as error:  # whatever a core raises is a finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno} in {where.name})"
        failure = _failure(tape, world, "core", text, script)
    if world is None:
        raise AssertionError(f"the world of seed {tape.seed} could not be made: {failure}")
    kernel = world.kernel
    return Run(
        tape.seed,
        kernel.events,
        len(world.clients),
        fault_counts(world),
        dict(kernel.counts),
        kernel.trace_hash,
        failure,
        kernel.story(STORY_LINES),
        tape,
    )


def run_seed(seed: int) -> Run:
    return run_tape(Tape(seed))


def sweep(seeds: Iterable[int], progress: Callable[[Run], None] | None = None, max_failures: int = 5) -> Sweep:
    """Run ``seeds`` one after another; stops early after ``max_failures`` broken ones."""
    total = Sweep()
    digest = blake2b(digest_size=16)
    started = time.process_time()
    for seed in seeds:
        run = run_seed(seed)
        total.seeds += 1
        total.events += run.events
        total.requests += run.requests
        total.faults.update(run.faults)
        total.counts.update(run.counts)
        digest.update(run.trace_hash.encode())
        if run.failure is not None:
            total.failures.append(run.failure)
        if progress is not None:
            progress(run)
        if len(total.failures) >= max_failures:
            break
    total.seconds = time.process_time() - started
    total.trace_hash = digest.hexdigest()
    return total


def _failure(tape: Tape, world: World | None, invariant: str, text: str, script: Script | None) -> Failure:
    name = script.name if script else ""
    if world is None:
        return Failure(tape.seed, invariant, text, 0, 0, [], name)
    kernel = world.kernel
    return Failure(tape.seed, invariant, text, kernel.now_ns, kernel.events, kernel.story(STORY_LINES), name)
