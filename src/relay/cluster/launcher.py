"""What starts and stops worker processes: the protocol every launcher implements, and its data.

A launch is described by data alone (it may cross to another machine): no inherited descriptors, no objects. Ends are events.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start. ``name`` is unique for each launch, for example ``decode-0.3``."""

    name: str
    argv: list[str]
    environment: dict[str, str] = {}  # added to the launcher's own


class LaunchExit(msgspec.Struct, frozen=True):
    """The end of a launch: exit status, or signal, or why it could not start. ``last_lines`` is the end of its output."""

    name: str
    status: int | None = None
    signal: int | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()


ExitCallback = Callable[[LaunchExit], None]


class Launcher(Protocol):
    """Every ``start`` is answered by exactly one ``LaunchExit`` on the event loop, never from within ``start`` itself."""

    def start(self, spec: LaunchSpec) -> None:
        """Begin a launch. Raises ValueError for a name that is running."""
        ...

    def stop(self, name: str, *, kill: bool) -> None:
        """SIGTERM, or SIGKILL to everything the launch started. Unknown or ended names are ignored."""
        ...

    async def close(self, grace_s: float) -> None:
        """Stop everything: SIGTERM, after ``grace_s`` SIGKILL. Returns when nothing is left."""
        ...
