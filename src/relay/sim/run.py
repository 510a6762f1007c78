"""One run: a tape played through, with all that came of it."""

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from relay.sim.invariants import STATEMENTS
from relay.sim.kernel import Violation
from relay.sim.swarm import Swarm
from relay.sim.tape import Edits, ForeignTape, Tape
from relay.sim.wall_clock import watched
from relay.sim.world import World, fault_counts

STORY_LINES = 34  # a whole report has at most 40 lines


@dataclass(slots=True)
class Failure:
    """A broken invariant, with everything to see it again."""

    seed: int
    invariant: str
    text: str
    now_ns: int
    events: int
    story: list[str]
    edits: Edits
    scenario: str = ""
    mutant: str = ""

    @property
    def replay_command(self) -> str:
        return replay_command(self.seed, self.edits, self.scenario, self.mutant)

    def report(self, replay: str = "") -> str:
        """For people, with the command that shows it again."""
        name = f"scenario {self.scenario}, " if self.scenario else ""
        lines = [
            f"{name}seed {self.seed}: {self.invariant} is broken after {self.events} events, at {self.now_ns / 1e6:.3f} ms",
            f"  {self.invariant}: {STATEMENTS.get(self.invariant, 'the simulation itself')}",
            f"  {self.text}",
            "the story:",
            *[f"  {line}" for line in self.story],
            f"replay: {replay or self.replay_command}",
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Run:
    """What one run did. ``cells``: how often a fault ("fault") struck in a moment, by "fault/moment"."""

    seed: int
    events: int
    requests: int
    faults: dict[str, int]
    counts: dict[str, int]
    cells: dict[str, int]
    trace_hash: str
    failure: Failure | None
    story: list[str] = field(default_factory=list)
    cpu_s: float = 0.0


class Script(Protocol):
    """What may take the place of drawn requests and faults: a directed scenario."""

    @property
    def name(self) -> str: ...

    @property
    def swarm(self) -> Swarm: ...

    def run(self, world: World) -> None: ...


def replay_command(seed: int, edits: Edits, scenario: str = "", mutant: str = "") -> str:
    """What to type to see a run again; a run with edits other than a direction needs its tape."""
    options = [f"--scenario {scenario}"] if scenario else []
    options.append(f"--seed {seed}")
    if edits.directed is not None:
        options.append(f"--directed '{edits.directed[0]}:{edits.directed[1]}'")
    if mutant:
        options.append(f"--only '{mutant}'")
    return f"relay sim {' '.join(options)}"


def run_tape(tape: Tape, script: Script | None = None, *, story: bool = False) -> Run:
    """Play one tape through; ``story``: tell it even if nothing breaks.

    A broken invariant is in ``failure``; a tape that does not fit raises ForeignTape.
    """
    world: World | None = None
    failure = None
    name = script.name if script else ""
    started = time.process_time()
    try:
        world = World(tape, script.swarm if script else None)
        with watched(world.kernel):
            if script is None:
                world.run()
            else:
                script.run(world)
        if world.kernel.wall_readers:
            raise Violation("I14", f"the wall clock was read at {', '.join(world.kernel.wall_readers)}")
        if tape.unused:
            raise ForeignTape(
                f"the tape holds choices this program does not make ({tape.unused} of them): it was recorded by another version"
            )
    except ForeignTape:
        raise
    except Violation as violation:
        failure = _failure(tape, world, violation.invariant, violation.text, name)
    except Exception as error:  # whatever a core raises is a finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno} in {where.name})"
        failure = _failure(tape, world, "core", text, name)
    if world is None:
        raise AssertionError(f"the world of seed {tape.seed} could not be made: {failure}")
    kernel = world.kernel
    counters: Counter[str] = Counter()
    for node in world.gateways.values():
        counters.update(node.core.state.counters)
    return Run(
        seed=tape.seed,
        events=kernel.events,
        requests=len(world.clients),
        faults=fault_counts(world),
        counts={**kernel.counts, **{f"gateway: {name}": count for name, count in counters.items() if count}},
        cells={f"{fault}/{moment}": count for (fault, moment), count in world.struck.cells.items()},
        trace_hash=kernel.trace_hash,
        failure=failure,
        story=world.story(STORY_LINES) if story else [],
        cpu_s=time.process_time() - started,
    )


def run_seed(seed: int, edits: Edits | None = None) -> Run:
    return run_tape(Tape(seed, edits))


def _failure(tape: Tape, world: World | None, invariant: str, text: str, scenario: str) -> Failure:
    kernel = world.kernel if world else None
    return Failure(
        seed=tape.seed,
        invariant=invariant,
        text=text,
        now_ns=kernel.now_ns - kernel.origin_ns if kernel else 0,
        events=kernel.events if kernel else 0,
        story=world.story(STORY_LINES) if world else [],
        edits=tape.edits,
        scenario=scenario,
        mutant=tape.mutant,
    )
