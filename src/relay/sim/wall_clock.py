"""The wall clock of a run: it jumps, and nobody may look at it (I14)."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from relay.sim.kernel import Kernel


@contextmanager
def watched(kernel: Kernel) -> Iterator[None]:
    """While the block runs, ``time.time`` of this thread tells the run's wall clock and notes who asked."""
    original, original_ns, owner = time.time, time.time_ns, threading.get_ident()

    def now_ns() -> int:
        if threading.get_ident() != owner:
            return original_ns()
        frame = sys._getframe(2)
        kernel.wall_readers[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"] = None
        return kernel.now_ns + kernel.wall_ns

    def wall_ns() -> int:
        return now_ns()

    def wall() -> float:
        return now_ns() / 1e9

    time.time, time.time_ns = wall, wall_ns
    try:
        yield
    finally:
        time.time, time.time_ns = original, original_ns
