"""The page of memory by which an engine shows its agent that it moves; no lock, no call, no allocation.

Four 8-byte little-endian fields: steps finished, phase, monotonic time of the last change of phase, draining. The agent owns the
memory (a memfd named by ``/proc/<agent>/fd/<n>``), so nothing is left behind however either process ends.
"""

import mmap
import os
import struct
from typing import Literal

Phase = Literal["starting", "loading", "ready", "stepping", "draining", "compiling"]
PHASES: tuple[Phase, ...] = ("starting", "loading", "ready", "stepping", "draining", "compiling")
PAGE_BYTES = 4096
_STEP, _PHASE, _SINCE, _DRAINING = 0, 8, 16, 24
_STUCK_MS = 1000  # a step older than this is reported as such even while draining


class StatusPage:
    """Each field is written by one thread of the engine at a time; the agent reads."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def open(cls, path: str) -> "StatusPage":
        """Map the page the agent made; an empty ``path`` gives a private one nobody reads."""
        if not path:
            return cls(mmap.mmap(-1, PAGE_BYTES))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)

    @classmethod
    def create(cls) -> tuple["StatusPage", str]:
        """A new page and the path under which other processes of this user may map it while this one lives."""
        descriptor = os.memfd_create("relay-status", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE_BYTES)
        return cls(mmap.mmap(descriptor, PAGE_BYTES)), f"/proc/{os.getpid()}/fd/{descriptor}"

    def set_phase(self, phase: Phase, now_ns: int) -> None:
        struct.pack_into("<Q", self._memory, _SINCE, now_ns)
        struct.pack_into("<Q", self._memory, _PHASE, PHASES.index(phase))

    def finish_step(self) -> None:
        step = struct.unpack_from("<Q", self._memory, _STEP)[0]
        struct.pack_into("<Q", self._memory, _STEP, step + 1)

    def set_draining(self) -> None:
        struct.pack_into("<Q", self._memory, _DRAINING, 1)

    def read(self, now_ns: int) -> tuple[int, Phase, int]:
        """(steps finished, phase, its age in ms)."""
        step, index, since_ns, draining = struct.unpack_from("<QQQQ", self._memory, 0)
        phase = PHASES[min(index, len(PHASES) - 1)]
        age_ms = max(0, now_ns - since_ns) // 1_000_000 if since_ns else 0
        if draining and not (phase == "stepping" and age_ms > _STUCK_MS):
            phase = "draining"
        return step, phase, age_ms
