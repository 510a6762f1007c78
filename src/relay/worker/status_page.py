"""The page of memory by which an engine shows its agent that it moves, and with what; no lock, no call into the kernel.

8-byte words of the machine: steps finished, phase, monotonic time of the last change of phase, draining, steps begun, whether the
engine holds the mutex of its ``DeathWatch``; from byte 64 that mutex; then two slots for the manifests of the steps in flight
(``steps finished`` < number ≤ ``steps begun``). A manifest is complete in its slot before its step counts as begun, and says its
number and CRC, so that a reader at any instant, and after any death of the engine, finds whole ones or none. The agent owns the
memory (a memfd named by ``/proc/<agent>/fd/<n>``): it outlives the engine, and nothing is left behind however either ends.
"""

import mmap
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple
from zlib import crc32

from relay.protocol.messages import ComputedRow
from relay.worker.death_watch import DeathWatch

Phase = Literal["starting", "loading", "ready", "stepping", "draining", "compiling"]
PHASES: tuple[Phase, ...] = ("starting", "loading", "ready", "stepping", "draining", "compiling")
MAX_ROWS = 1 << 16  # of a manifest: as many as a step may have tokens
MAX_IN_FLIGHT = 2
_WORD = 8
_WORD_MASK = (1 << 64) - 1
_STEP, _PHASE, _SINCE, _DRAINING, _BEGUN, _HELD, _MUTEX, _SLOTS = 0, 1, 2, 3, 4, 5, 8, 16
_NUMBER, _COUNT, _CRC, _ROWS = 0, 1, 2, 3
_ROW_WORDS = 4
_SLOT_WORDS = _ROWS + _ROW_WORDS * MAX_ROWS
PAGE_BYTES = _WORD * (_SLOTS + MAX_IN_FLIGHT * _SLOT_WORDS)  # sparse: only what was written takes memory
_STUCK_MS = 1000  # a step older than this is reported as such even while draining
_TRIES = 3  # readings of a page that changes meanwhile


class ManifestRow(NamedTuple):
    """One sequence's part of a step, by its owner's name for it. ``end``: the position after its last."""

    request: int
    choice: int
    attempt: int
    end: int


class StatusPage:
    """Each field is written by one thread of the engine at a time; the agent reads."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._death = DeathWatch(memory, _MUTEX * _WORD)

    @classmethod
    def open(cls, path: str) -> "StatusPage":
        """Map the page the agent made; an empty ``path`` gives a private one nobody else reads."""
        if not path:
            page = cls(mmap.mmap(-1, PAGE_BYTES))
            page._death.prepare()
            return page
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
        page = cls(mmap.mmap(descriptor, PAGE_BYTES))
        page._death.prepare()
        return page, f"/proc/{os.getpid()}/fd/{descriptor}"

    # --- the engine -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on the calling thread's end is the engine's, and the agent knows at once."""
        self._death.hold()
        self._words[_HELD] = 1

    def set_phase(self, phase: Phase, now_ns: int) -> None:
        self._words[_SINCE] = now_ns
        self._words[_PHASE] = PHASES.index(phase)

    @property
    def phase(self) -> Phase:
        """What was set last."""
        return PHASES[min(self._words[_PHASE], len(PHASES) - 1)]

    def begin_step(self, rows: Sequence[ManifestRow], now_ns: int) -> None:
        """A step that computes ``rows`` begins. Raises RuntimeError with two in flight. Rows beyond MAX_ROWS are not named."""
        words = self._words
        number = words[_BEGUN] + 1
        if number - words[_STEP] > MAX_IN_FLIGHT:
            raise RuntimeError(f"step {number} begins with {MAX_IN_FLIGHT} in flight")
        rows = rows[:MAX_ROWS]
        data = _packed([word for row in rows for word in row])
        slot = _slot(number)
        words[slot + _NUMBER] = 0
        words[slot + _COUNT] = len(rows)
        words[slot + _CRC] = crc32(data, number)
        start = (slot + _ROWS) * _WORD
        self._bytes[start : start + len(data)] = data
        words[slot + _NUMBER] = number
        words[_BEGUN] = number
        self.set_phase("stepping", now_ns)

    def finish_step(self) -> None:
        """The oldest step in flight is done: it is nobody's fault any more."""
        self._words[_STEP] += 1

    def set_draining(self) -> None:
        self._words[_DRAINING] = 1

    # --- the agent ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """The engine has come so far that ``watch`` is possible."""
        return self._words[_HELD] == 1

    def watch(self, died: Callable[[], None]) -> None:
        """``died`` is called on another thread when the engine that holds this page ends, however it does."""
        self._death.watch(died)

    def read(self, now_ns: int) -> tuple[int, Phase, int]:
        """(steps finished, phase, its age in ms)."""
        words = self._words
        step, index, since_ns = words[_STEP], words[_PHASE], words[_SINCE]
        phase = PHASES[min(index, len(PHASES) - 1)]
        age_ms = max(0, now_ns - since_ns) // 1_000_000 if since_ns else 0
        if words[_DRAINING] and not (phase == "stepping" and age_ms > _STUCK_MS):
            phase = "draining"
        return step, phase, age_ms

    def manifest(self) -> list[ManifestRow]:
        """The rows of the steps in flight at one instant; empty if there are none or the page is damaged."""
        for _ in range(_TRIES):
            finished, begun = self._words[_STEP], self._words[_BEGUN]
            if begun - finished > MAX_IN_FLIGHT:
                return []
            rows = [row for number in range(finished + 1, begun + 1) for row in self._rows(number)]
            if (self._words[_STEP], self._words[_BEGUN]) == (finished, begun):
                return rows
        return []

    def _rows(self, number: int) -> list[ManifestRow]:
        words, slot = self._words, _slot(number)
        count = words[slot + _COUNT]
        if words[slot + _NUMBER] != number or count > MAX_ROWS:
            return []
        start = (slot + _ROWS) * _WORD
        data = bytes(self._bytes[start : start + count * _ROW_WORDS * _WORD])
        if crc32(data, number) != words[slot + _CRC]:
            return []
        flat = array("Q", data).tolist()
        return [ManifestRow(*flat[at : at + _ROW_WORDS]) for at in range(0, len(flat), _ROW_WORDS)]


def manifest_of(rows: Sequence[ManifestRow]) -> tuple[list[ComputedRow], bool]:
    """What gateways are told: ``rows`` (each knows its own requests), and whether all of them are of one request."""
    return [ComputedRow(*row) for row in rows], len({row.request for row in rows}) == 1


def _packed(words: list[int]) -> bytes:
    try:
        return array("Q", words).tobytes()
    except OverflowError:  # a number no gateway of ours gives: name something rather than end the engine
        return array("Q", [word & _WORD_MASK for word in words]).tobytes()


def _slot(number: int) -> int:
    """First word of the slot that step ``number`` uses."""
    return _SLOTS + number % MAX_IN_FLIGHT * _SLOT_WORDS
