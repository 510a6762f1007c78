"""What the recorders of all cores have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from relay.record.codec import EventCodec
from relay.record.writer import MAX_BYTES, Writer

Event = TypeVar("Event")
Command = TypeVar("Command")


class CoreRecorder:
    """Writes to ``path`` what one core is told and decides. One recorder serves one core."""

    def __init__(self, path: Path, events: EventCodec, max_bytes: int = MAX_BYTES) -> None:
        """Raises UsageError if there can be no such file."""
        self._writer = Writer(path, max_bytes)
        self._events = events

    def happened(self, event: Any, now_ns: int) -> None:
        """The core is about to handle ``event``, or was changed from outside as it says."""
        if self._writer.recording:
            self._writer.happened(self._events.frame(now_ns, event))

    def decided(self, commands: list[Any]) -> None:
        """What the event led to."""
        self._writer.decided(commands)

    def close(self, reason: str = "closed") -> None:
        """Nothing follows. Idempotent."""
        self._writer.close(reason)


def decide(
    recorder: CoreRecorder | None, handle: Callable[[Event, int], list[Command]], event: Event, now_ns: int
) -> list[Command]:
    """The commands of ``handle(event, now_ns)``, recorded where there is a recorder."""
    if recorder is None:
        return handle(event, now_ns)
    recorder.happened(event, now_ns)
    commands = handle(event, now_ns)
    recorder.decided(commands)
    return commands
