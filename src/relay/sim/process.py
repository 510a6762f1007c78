"""A process: it runs callbacks, stands still while it is stopped (SIGSTOP), and runs none once it is dead."""

from collections import deque
from collections.abc import Callable
from typing import Any

from relay.sim.kernel import Kernel


class Process:
    """What waits while it is stopped runs at the thaw, in order."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.alive = True
        self.awake_since_ns = kernel.now_ns
        self._stops = 0
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    def run(self, handler: Callable[..., object], *arguments: Any) -> None:
        if not self.alive:
            return
        if self._stops:
            self._backlog.append((handler, arguments))
        else:
            handler(*arguments)

    def guard(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """``handler``, run in this process."""

        def guarded(argument: Any) -> None:
            if self.alive and not self._stops:
                handler(argument)
            else:
                self.run(handler, argument)

        return guarded

    def after(self, delay_ns: int, handler: Callable[..., object], *arguments: Any) -> None:
        """A timer of this process."""
        self.kernel.after(delay_ns, self.run, handler, *arguments)

    def stop(self) -> None:
        self._stops += 1

    def thaw(self) -> None:
        self._stops = max(0, self._stops - 1)
        self.awake_since_ns = self.kernel.now_ns
        while self.alive and not self._stops and self._backlog:
            handler, arguments = self._backlog.popleft()
            handler(*arguments)

    def die(self) -> None:
        self.alive = False
        self._backlog.clear()
