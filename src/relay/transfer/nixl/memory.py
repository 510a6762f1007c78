"""The bytes of staging areas: sealed memfds that are mapped anew for each connection and kept between them."""

import fcntl
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from relay.transfer.channel import ChannelClosed
from relay.transfer.nixl.staging import AreaEvent, NoArea, StagingAreas, StagingLoad
from relay.transfer.shm import SEALS, Descriptor, Ring

MAX_AREAS = 64


class StagingMemory:
    """Rings of ``ring_bytes`` over areas that no earlier connection's writes can reach. Called by any thread."""

    def __init__(self, ring_bytes: int, max_areas: int = MAX_AREAS) -> None:
        self._ring_bytes = ring_bytes
        self._lock = threading.Lock()
        self._areas = StagingAreas(max_areas)
        self._memory: dict[int, Descriptor] = {}
        self._events: deque[tuple[int, AreaEvent]] = deque()  # appended to without a lock: a finalizer runs anywhere

    def lend(self) -> tuple[Ring, Callable[[], None]]:
        """A ring, and what to call once the process that may write it has ended. Raises ChannelClosed.

        That nobody here refers to the ring's bytes any more shows by itself: they are unmapped then.
        """
        with self._lock:
            self._take_events()
            try:
                number = self._areas.lend()
            except NoArea as error:
                raise ChannelClosed(str(error)) from error
            try:
                ring = self._map(number)
            except OSError as error:
                self._areas.agent_gone(number)
                self._areas.released(number)
                raise ChannelClosed(f"no staging area: {error}") from error
        weakref.finalize(ring.bytes.obj, self._events.append, (number, AreaEvent.RELEASED)).atexit = False
        return ring, partial(self._events.append, (number, AreaEvent.AGENT_GONE))

    def load(self) -> StagingLoad:
        with self._lock:
            self._take_events()
            return self._areas.load()

    def _map(self, number: int) -> Ring:
        memory = self._memory.get(number)
        if memory is None:
            memory = Descriptor(os.memfd_create("relay-kv-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(memory.number, self._ring_bytes)
            fcntl.fcntl(memory.number, fcntl.F_ADD_SEALS, SEALS)
            self._memory[number] = memory
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK  # counters of an earlier connection say nothing about this one
        return Ring(memory, Descriptor(os.eventfd(0, flags)), Descriptor(os.eventfd(0, flags)))

    def _take_events(self) -> None:
        while self._events:
            number, event = self._events.popleft()
            if event is AreaEvent.RELEASED:
                self._areas.released(number)
            else:
                self._areas.agent_gone(number)
