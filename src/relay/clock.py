"""The only place that reads a clock. Pure code takes ``now_ns`` as an argument instead."""

import time
from datetime import datetime
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time in integer nanoseconds."""

    def now_ns(self) -> int: ...


class MonotonicClock:
    """The machine's monotonic clock: wall-clock jumps change nothing."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


def local_time() -> datetime:
    """The machine's local date and time, for chat templates that print it; measures nothing."""
    return datetime.now()
