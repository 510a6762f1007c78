"""Areas of device memory that another process writes to: D's pool of them, and P's mappings.

**Quarantine.** When a connection ends, kernels of P may still write to the area, though never to D's blocks. P holds the writing
end of a pipe, the lease, and closes it when its last kernel has ended and the area is unmapped, or by dying. Only then, and after a
pause in which the driver ends what a killed process had queued, does another connection get that area.
"""

import select
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from relay.kernels.kv_frames import SharingFailed
from relay.transfer.shm import Descriptor

MOST_AREAS = 8
GRACE_S = 2.0


class AreasBusy(SharingFailed):
    """There is none left at the moment."""


class DeviceMemory(Protocol):
    """The part of a device that the areas need (``relay.kernels.cuda.ipc``). Every method raises SharingFailed."""

    def allocate(self, size: int) -> Any: ...

    def handle(self, area: Any) -> bytes: ...

    def open(self, handle: bytes, size: int) -> Any: ...

    def close(self, area: Any) -> None: ...


class AreaPool:
    """D's areas: those in quarantine are given out again once their writer is proven gone."""

    def __init__(self, memory: DeviceMemory, size: int, grace_s: float = GRACE_S) -> None:
        self.size = size
        self._memory = memory
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._areas = 0
        self._quarantined: list[_Quarantined] = []

    def take(self) -> tuple[Any, bytes]:
        """An area and its handle. Raises SharingFailed."""
        with self._lock:
            area = self._proven_free(time.monotonic())
            if area is None:
                if self._areas >= MOST_AREAS:
                    raise AreasBusy(f"{MOST_AREAS} staging areas are in use or quarantined")
                area = self._memory.allocate(self.size)
                self._areas += 1
        try:
            return area, self._memory.handle(area)
        except SharingFailed:
            with self._lock:
                self._areas -= 1
            self._memory.close(area)
            raise

    def retire(self, area: Any, lease: Descriptor) -> None:
        """The connection is over; its writer may not know yet. When it does is noticed at once, so that the grace is over when the
        next connection comes and not begun by it."""
        one = _Quarantined(area, lease)
        with self._lock:
            self._quarantined.append(one)
        threading.Thread(target=self._watch, args=(one,), name="kv-lease", daemon=True).start()

    def _watch(self, one: "_Quarantined") -> None:
        _waithung_up(one.lease)
        with self._lock:
            one.ended_s = one.ended_s or time.monotonic()

    def _proven_free(self, now_s: float) -> Any:
        free = None
        kept = []
        for one in self._quarantined:
            if one.ended_s is None and hung_up(one.lease):
                one.ended_s = now_s
            if free is None and one.ended_s is not None and now_s - one.ended_s >= self._grace_s:
                free = one.area
            else:
                kept.append(one)
        self._quarantined = kept
        return free


@dataclass(slots=True)
class _Quarantined:
    """An area whose connection has ended; ``ended_s`` is when its writer had."""

    area: Any
    lease: Descriptor
    ended_s: float | None = None


class Mappings:
    """P's mapped areas. Unmapping waits for the device, and whatever the process then asks of CUDA waits too.

    So the area of a target that died, when its sequences are to go on at once and perhaps here, stays until another is mapped.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._of_dead: list[tuple[Any, str]] = []  # an area, and whose it was

    def begin(self, handle: bytes, size: int) -> Any:
        """Raises SharingFailed."""
        area = self._memory.open(handle, size)
        with self._lock:
            of_dead, self._of_dead = self._of_dead, []
        for old, peer in of_dead:
            self._close(old, peer)
        return area

    def end(self, area: Any, peer: str, *, dead: bool) -> None:
        """No kernel uses it any more."""
        if dead:
            with self._lock:
                self._of_dead.append((area, peer))
        else:
            self._close(area, peer)

    def _close(self, area: Any, peer: str) -> None:
        try:
            self._memory.close(area)
        except SharingFailed as error:  # of a target that is gone, perhaps
            print(f"an area of {peer} stays mapped: {error}", file=sys.stderr, flush=True)


def hung_up(lease: Descriptor) -> bool:
    """Whether the other end is closed: the writing end shows POLLHUP to the reader, the reading one POLLERR to the writer."""
    return bool(_ends(lease).poll(0))


def _waithung_up(lease: Descriptor) -> None:
    _ends(lease).poll()


def _ends(lease: Descriptor) -> select.poll:
    """Asked for nothing, poll tells of the other end's closing alone."""
    poll = select.poll()
    poll.register(lease.number, 0)
    return poll
