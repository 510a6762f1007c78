"""The only place that reads a clock. Pure code takes ``now_ns`` as an argument instead."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time in integer nanoseconds."""

    def now_ns(self) -> int: ...


class MonotonicClock:
    """The machine's monotonic clock: wall-clock jumps change nothing."""

    def now_ns(self) -> int:
        return time.monotonic_ns()
