"""The heart of the simulation: one heap of calls, one virtual clock, one trace."""

from array import array
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

from relay.sim.tape import Tape

STORY_LINES = 400
TRACE_CALLS = 4096  # hashed at once


class Violation(Exception):
    """An invariant does not hold. ``invariant`` is its name in ``invariants.STATEMENTS``."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


class Kernel:
    """Makes calls in order of (time, number). Time is integer nanoseconds and moves only here.

    ``calls`` counts what the heap gave out: arrivals of bytes, timers, audits, the simulation's own business. ``events`` counts
    what the simulated processes handled: a message, a timer or a step, each once, where it is handled.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.now_ns = self.origin_ns = 0
        self.wall_ns = 1_700_000_000_000_000_000  # what the wall clock is ahead of ``now_ns``
        self.wall_readers: dict[str, None] = {}  # who has looked at it
        self.calls = 0
        self.events = 0
        self.counts: Counter[str] = Counter()  # sometimes(name)
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._story: deque[tuple[int, str, tuple[object, ...]]] = deque(maxlen=STORY_LINES)
        self._trace = blake2b(digest_size=16)
        self._times = array("q")
        self._names: list[str] = []
        self._witnessed: list[bytes] = []

    def begin(self, origin_ns: int) -> None:
        """The monotonic clock of this machine stands at ``origin_ns``. Nothing may depend on it: traces count from there."""
        self.now_ns = self.origin_ns = origin_ns

    def at(self, time_ns: int, handler: Callable[..., None], *arguments: Any) -> None:
        """Call ``handler`` at ``time_ns``, after everything scheduled earlier for that moment."""
        self._number += 1
        now_ns = self.now_ns
        heappush(self._heap, (time_ns if time_ns > now_ns else now_ns, self._number, handler, arguments))

    def after(self, delay_ns: int, handler: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._number, handler, arguments))

    def step(self) -> bool:
        """Make one call; False when there is none."""
        if not self._heap:
            return False
        self.now_ns, _, handler, arguments = heappop(self._heap)
        self.calls += 1
        self._times.append(self.now_ns - self.origin_ns)
        self._names.append(handler.__name__)
        if len(self._times) >= TRACE_CALLS:
            self._hash()
        handler(*arguments)
        return True

    @property
    def pending(self) -> int:
        return len(self._heap)

    def witness(self, data: bytes) -> None:
        """Make ``data`` part of the trace: two runs with equal traces saw the same bytes at the same times."""
        self._witnessed.append(data)

    @property
    def trace_hash(self) -> str:
        self._hash()
        return self._trace.hexdigest()

    def _hash(self) -> None:
        trace = self._trace
        trace.update(self._times.tobytes())
        trace.update("\n".join(self._names).encode())
        trace.update(b"".join(self._witnessed))
        self._times, self._names, self._witnessed = array("q"), [], []

    def sometimes(self, name: str) -> None:
        """Count an interesting moment. A name that no seed of a sweep ever counts is a hole in the simulation."""
        self.counts[name] += 1

    def tell(self, text: str, *arguments: object) -> None:
        """A line of the story; formatted only when the story is told."""
        self._story.append((self.now_ns - self.origin_ns, text, arguments))

    def story(self) -> list[tuple[int, str]]:
        """The last lines with their times, oldest first."""
        return [(at, text.format(*args)) for at, text, args in self._story]
