"""A smaller run that breaks the same invariant: without faults and requests that do not matter, without delays, shorter.

Every candidate is the seed with other edits, so a run of its own; one is taken if the same invariant breaks in it, after no more
events.
Lists are halved as in delta debugging (Zeller and Hildebrandt, 2002): whole halves first, single ones last.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from relay.sim.plan import draw as draw_plan
from relay.sim.run import Failure, Run, run_tape
from relay.sim.swarm import draw as draw_swarm
from relay.sim.tape import Edits, Tape

BUDGET_S = 30.0

# Choices that make a run quieter or shorter at the value 0, in the order tried.
QUIET = (
    "split",
    "jitter us",
    "jitter ms",
    "stop string",
    "step computes late",
    "load ms",
    "too long",
    "latency",
    "outage ms",
    "thaw order",
    "deadline",
    "n",
    "step_ms",
    "token_ns",
    "chaos_ms",
    "penalty",
    "eos",
    "max_tokens",
)
NEVER = {"split": 999, "stop string": 999, "too long": 999, "deadline": 999}  # per mille: 0 would mean always


@dataclass(slots=True)
class Shrunk:
    """``tape`` replays ``failure``; counts before and after."""

    tape: Tape
    failure: Failure
    tried: int
    faults: tuple[int, int]
    requests: tuple[int, int]
    events: tuple[int, int]

    def summary(self) -> str:
        """One line."""
        parts = [
            f"{name} {before} → {after}"
            for name, (before, after) in (("faults", self.faults), ("requests", self.requests), ("events", self.events))
        ]
        probes = " (the probes are not counted)" if not self.requests[1] else ""
        return f"shrunk in {self.tried} runs: {', '.join(parts)}{probes}"


def shrink(failure: Failure, budget_s: float = BUDGET_S, play: Callable[[Tape], Run] | None = None) -> Shrunk:
    """The smallest run found within ``budget_s`` seconds. ``play`` runs a tape (default: with its planted bug)."""
    return _Search(failure, budget_s, play or _play).run()


def _play(tape: Tape) -> Run:
    if not tape.mutant:
        return run_tape(tape)
    from relay.sim.mutants import by_name, planted

    with planted(by_name(tape.mutant)):
        return run_tape(tape)


class _Search:
    def __init__(self, failure: Failure, budget_s: float, play: Callable[[Tape], Run]) -> None:
        self._best = failure
        self._first = failure
        self._deadline = time.monotonic() + budget_s
        self._play = play
        self._tried = 0

    def run(self) -> Shrunk:
        seed, mutant = self._first.seed, self._first.mutant
        requests, faults = self._planned(self._first.edits)
        if self._first.edits.directed is None:
            self._drop([name for name in reversed(faults) if name not in self._best.edits.without])
        self._drop([name for name in reversed(requests) if name not in self._best.edits.without])
        for label in QUIET:
            fixed = {**self._best.edits.fixed, label: NEVER.get(label, 0)}
            self._try(msgspec.structs.replace(self._best.edits, fixed=fixed))
        remaining_requests, remaining_faults = self._planned(self._best.edits)
        self._drop(list(reversed(remaining_faults)) if self._first.edits.directed is None else [])
        self._drop(list(reversed(remaining_requests)))
        tape = Tape(seed, self._best.edits, keep=True, mutant=mutant)
        last = self._play(tape).failure
        if last is None or last.invariant != self._first.invariant:
            raise AssertionError(f"seed {seed} with {self._best.edits} breaks {self._best.invariant} only sometimes")
        remaining_requests, remaining_faults = self._planned(self._best.edits)
        return Shrunk(
            tape,
            last,
            self._tried,
            (len(faults), len(remaining_faults)),
            (len(requests), len(remaining_requests)),
            (self._first.events, last.events),
        )

    def _planned(self, edits: Edits) -> tuple[list[str], list[str]]:
        """Names of the requests and faults of a run."""
        tape = Tape(self._first.seed, edits)
        with tape.within("swarm"):
            swarm = draw_swarm(tape)
        requests, faults = draw_plan(tape, swarm)
        return [one.name for one in requests], [one.name for one in faults]

    def _drop(self, names: list[str]) -> None:
        """Leave out as many of ``names`` as can be: all, halves, quarters, … single ones."""
        size = len(names)
        while size:
            at = 0
            while at < len(names):
                part = names[at : at + size]
                without = (*self._best.edits.without, *part)
                if self._try(msgspec.structs.replace(self._best.edits, without=without)):
                    del names[at : at + size]
                else:
                    at += size
            size //= 2

    def _try(self, edits: Edits) -> bool:
        """Whether the same breaks with ``edits``, after no more events; if so they are the best so far."""
        if time.monotonic() >= self._deadline:
            return False
        self._tried += 1
        found = self._play(Tape(self._first.seed, edits, mutant=self._first.mutant)).failure
        if found is None or found.invariant != self._first.invariant or found.events > self._best.events:
            return False
        self._best = found
        return True
