"""Where threads leave events for the core's loop."""

import os
from collections import deque

from relay.worker.events import Event


class Inbox:
    """``post`` from any thread or signal handler; the loop waits on ``fileno`` with a selector."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._wakeup

    def post(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._wakeup, 1)

    def clear_wakeup(self) -> None:
        """After the selector said readable, before the events are taken."""
        os.eventfd_read(self._wakeup)

    def take(self) -> Event | None:
        """The oldest event, or None."""
        return self._events.popleft() if self._events else None
