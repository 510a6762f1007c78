"""Faults that are signals to the processes of one worker, and what undoes them."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from relay.chaos.kinds import Kind
from relay.chaos.plan import Fault
from relay.chaos.proxy import Life

LONGEST_DRAIN_S = 0.4
SLOW_STOPPED_S, SLOW_RUNNING_S = 0.06, 0.03
SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "drain_kill": signal.SIGTERM,
    "segfault": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "slow": signal.SIGSTOP,
}


class Signals:
    """``counts``: signals that were sent, by name. ``later`` runs what has to be done afterwards; ``record`` notes what a second
    blow strikes."""

    def __init__(
        self,
        counts: Counter[str],
        later: Callable[[Coroutine[Any, Any, None]], None],
        record: Callable[[str, Life], None],
    ) -> None:
        self._counts = counts
        self._later = later
        self._record = record

    def send(self, fault: Fault, kind: Kind, life: Life) -> None:
        """Do it to ``life``, and see to it that it is undone."""
        number = SIGNALS[kind.deed]
        processes = {"agent": ["agent"], "both": ["engine", "agent"]}.get(kind.target, ["engine"])
        life.hurt = True
        life.draining = life.draining or number is signal.SIGTERM
        for process in processes:
            self._counts[number.name] += life.signal(process, number)
        if kind.deed == "stop":
            self._later(self._continue(life, processes, fault.hold_s))
        elif kind.deed == "drain_kill":
            self._later(self._kill_draining(fault, life, processes))
        elif kind.deed == "slow":
            self._later(self._slow(life, fault.hold_s))

    async def _kill_draining(self, fault: Fault, life: Life, processes: list[str]) -> None:
        """It was told to end, and is not left the time for it."""
        await asyncio.sleep(min(fault.hold_s, LONGEST_DRAIN_S))
        if life.running():
            self._record(fault.kind, life)
        for process in processes:
            self._counts["SIGKILL"] += life.signal(process, signal.SIGKILL)

    async def _continue(self, life: Life, processes: list[str], hold_s: float) -> None:
        await asyncio.sleep(hold_s)
        for process in processes:
            self._counts["SIGCONT"] += life.signal(process, signal.SIGCONT)
        life.hurt = False

    async def _slow(self, life: Life, hold_s: float) -> None:
        """Stopped two thirds of the time."""
        deadline = time.monotonic() + hold_s
        while time.monotonic() < deadline and life.signal("engine", signal.SIGSTOP):
            await asyncio.sleep(SLOW_STOPPED_S)
            life.signal("engine", signal.SIGCONT)
            await asyncio.sleep(SLOW_RUNNING_S)
        life.signal("engine", signal.SIGCONT)
        life.hurt = False
