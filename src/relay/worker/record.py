"""Recording of a worker's core, and the same core run again from it. The scheduler is part of the core; KV bytes are not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relay.engine.limits import SchedulerLimits
from relay.engine.scheduler import Scheduler
from relay.record import codec, frames
from relay.record.codec import EventCodec
from relay.record.commit import commit
from relay.record.frames import BadRecording
from relay.record.recorder import CoreRecorder
from relay.record.replay import Player
from relay.record.writer import MAX_BYTES
from relay.worker.core import WorkerConfig, WorkerCore
from relay.worker.entries import DigestKv
from relay.worker.events import Event, OrderReceived, StepFinished, TimerFired


@dataclass(frozen=True, slots=True)
class Advanced:
    """Not an event: the shell called ``advance``."""


_codec = EventCodec(Event | Advanced)
_ROUTINE = (Advanced.__name__, StepFinished.__name__, TimerFired.__name__)


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a ``WorkerCore`` and its scheduler are made from."""

    config: WorkerConfig
    limits: SchedulerLimits
    namespace: str


class WorkerRecorder(CoreRecorder):
    """Records a worker's core, and the answers it gets about KV bytes."""

    def __init__(self, path: Path, name: str, settings: WorkerSettings, max_bytes: int = MAX_BYTES) -> None:
        """Raises UsageError if there can be no such file."""
        super().__init__(path, _codec, max_bytes)
        self._writer.begin(frames.head("worker", name, commit(), codec.encode(settings)))

    def digests(self, digest_kv: DigestKv) -> DigestKv:
        """``digest_kv`` for the core, whose answers are recorded: they come from bytes that no recording holds."""
        return self._writer.answering(digest_kv)


class WorkerPlayer(Player):
    """A fresh core for a recording of kind "worker"."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._answers: list[msgspec.Raw] = []
        self._lines: list[str] = []
        self.core = WorkerCore(settings.config, Scheduler(settings.limits, settings.namespace), self._digest_kv)

    @classmethod
    def of(cls, head: frames.Head) -> "WorkerPlayer":
        """Raises MsgspecError for settings of another version."""
        return cls(msgspec.msgpack.decode(head.settings, type=WorkerSettings))

    def play(self, frame: frames.Happened, answers: list[msgspec.Raw]) -> list[Any]:
        self._answers = answers
        event = _codec.event(frame)
        core, now_ns = self.core, frame.now_ns
        commands = core.advance(now_ns) if isinstance(event, Advanced) else core.handle(event, now_ns)
        if frame.name not in _ROUTINE:
            names = ", ".join([type(command).__name__ for command in commands]) or "nothing"
            self._lines.append(f"{frame.now_ns / 1e9:.6f} s {_brief(event)} → {names}")
        return commands

    def stories(self) -> list[str]:
        return self._lines

    def _digest_kv(self, block_table: list[int], num_tokens: int) -> list[bytes]:
        if not self._answers:
            raise BadRecording("the core asks for KV digests where the recorded one did not")
        return msgspec.msgpack.decode(self._answers.pop(0), type=list[bytes])


def _brief(event: object) -> str:
    """One line without tokens."""
    if not isinstance(event, OrderReceived):
        return str(event)
    order = event.order
    work = getattr(order, "work", order)
    names = [str(getattr(work, name)) for name in ("request", "choice", "attempt") if hasattr(work, name)]
    return f"{type(order).__name__} {'.'.join(names)}"
