"""How long a step has taken by the engine's own doing: wall time less the time its threads waited for a processor.

On a machine with more work than processors a step may take ten times as long as it should and be healthy; a hung step waits for
nothing the scheduler of the kernel could give, and one that loops forever gets its share. So both still age.
"""

import os
from collections.abc import Callable

Waits = dict[int, int]  # thread → nanoseconds it has waited for a processor since it began
LOOK_AFTER_MS = 200  # steps that are over sooner are not looked at


def thread_waits(pid: int) -> Waits:
    """From ``/proc/<pid>/task/*/schedstat``; empty where the kernel keeps no such statistics."""
    waits: Waits = {}
    folder = f"/proc/{pid}/task"
    try:
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/schedstat") as file:
                waits[int(thread)] = int(file.read().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return waits  # a thread or all of them just ended
    return waits


class StepAge:
    """``read`` gives the waits of the engine's threads now."""

    def __init__(self, read: Callable[[], Waits]) -> None:
        self._read = read
        self._step = -1
        self._before: Waits = {}

    def own_ms(self, step: int, age_ms: int) -> int:
        """``age_ms`` of the running step after ``step`` finished ones, less the longest wait of any thread since it was noticed."""
        if age_ms < LOOK_AFTER_MS:
            return age_ms
        waits = self._read()
        if step != self._step:
            self._step, self._before = step, waits
            return age_ms
        waited_ns = max((now - self._before.get(thread, now) for thread, now in waits.items()), default=0)
        return max(0, age_ms - waited_ns // 1_000_000)
