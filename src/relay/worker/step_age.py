"""How long a step has taken by the engine's own doing: wall time less the time it was stopped or waited for a processor.

On a machine with more work than processors a step may take ten times as long as it should and be healthy; a hung step waits for
nothing the scheduler of the kernel could give, and one that loops forever gets its share. So both still age. A stopped engine
(SIGSTOP, a debugger) is frozen, not hung, and where nobody looked (the agent stood still too) nothing is known.
"""

import os
from collections.abc import Callable

from relay.worker.status_page import Phase

Waits = dict[int, int]  # thread → nanoseconds it has waited for a processor since it began
LOOK_AFTER_MS = 200  # steps that are over sooner are not looked at
LONG_STEP_MS = 500  # from here on heartbeats say whose step it is
MAX_GAP_NS = 600_000_000  # between two looks: a longer one means that the agent itself did not run
STOPPED = ("T", "t")


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
        self._looked_ns: int | None = None
        self._was_stopped = False
        self._lost_ns = 0  # of step ``_lost_of``: it was stopped, or nobody looked
        self._lost_of = -1

    def own_ms(self, step: int, phase: Phase, age_ms: int, state: str, now_ns: int) -> int:
        """``age_ms`` of ``phase`` after ``step`` finished steps, less what was not the engine's doing since it was noticed."""
        looked_ns = now_ns if self._looked_ns is None else self._looked_ns
        since_ns = max(looked_ns, now_ns - age_ms * 1_000_000)
        stopped = state in STOPPED
        if step != self._lost_of or phase not in ("stepping", "draining"):
            self._lost_of, self._lost_ns = step, 0
        if stopped or self._was_stopped or now_ns - looked_ns > MAX_GAP_NS:
            self._lost_ns += max(0, now_ns - since_ns)
        self._looked_ns, self._was_stopped = now_ns, stopped
        if phase != "stepping" or age_ms < LOOK_AFTER_MS:
            return age_ms
        waits = self._read()
        if step != self._step:
            self._step, self._before = step, waits
        waited_ns = max((now - self._before.get(thread, now) for thread, now in waits.items()), default=0)
        return max(0, age_ms - (waited_ns + self._lost_ns) // 1_000_000)
