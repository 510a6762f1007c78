"""Recording of a gateway's core, and the same core run again from it.

The shell is given a ``Recorder`` and tells it every event before the core sees it and the commands after. What the shell changes in
the core without an event (the context length) is recorded as one.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from relay.control.contract import ModelInfo
from relay.control.core import GatewayCore
from relay.control.events import Event, WorkerMessage
from relay.control_config import ControlConfig
from relay.ids import WorkerKey
from relay.protocol.messages import AgentToGateway, EngineToGateway, Role
from relay.record import codec, frames
from relay.record.codec import EventCodec
from relay.record.commit import commit
from relay.record.recorder import CoreRecorder
from relay.record.replay import Player
from relay.record.writer import MAX_BYTES

REPLAY_STORY_ENTRIES = 1 << 20


class _FromWorker(msgspec.Struct):
    """WorkerMessage, with the messages that there are."""

    worker: WorkerKey
    message: AgentToGateway | EngineToGateway


_codec = EventCodec(Event | ModelInfo, {WorkerMessage: _FromWorker})


class GatewaySettings(msgspec.Struct, frozen=True):
    """What a ``GatewayCore`` is made from."""

    config: ControlConfig
    model: ModelInfo
    slots: list[tuple[str, Role]]


class GatewayRecorder(CoreRecorder):
    """Records a gateway's core; what the shell changes in it by itself (its ``ModelInfo``) is recorded as an event."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Raises UsageError if there can be no such file."""
        super().__init__(path, _codec, max_bytes)

    def attach(self, core: GatewayCore, name: str = "gateway") -> None:
        """Before the core's first event."""
        state = core.state
        slots = [(worker.id, worker.role) for worker in state.workers.values()]
        settings = codec.encode(GatewaySettings(state.config, state.model, slots))
        self._writer.begin(frames.head("gateway", name, commit(), settings))


@dataclass(slots=True)
class GatewayPlayer(Player):
    """A fresh core for a recording of kind "gateway"."""

    core: GatewayCore

    @classmethod
    def of(cls, head: frames.Head) -> "GatewayPlayer":
        """Raises MsgspecError for settings of another version."""
        settings = msgspec.msgpack.decode(head.settings, type=GatewaySettings)
        config = replace(settings.config, story_entries=REPLAY_STORY_ENTRIES)
        return cls(GatewayCore(config, settings.model, settings.slots))

    def play(self, frame: frames.Happened, answers: list[msgspec.Raw]) -> list[Any]:
        event = _codec.event(frame)
        if isinstance(event, ModelInfo):
            self.core.state.model = event
            return []
        return list(self.core.handle(event, frame.now_ns))

    def stories(self) -> list[str]:
        return [f"{at / 1e9:.6f} s {text}" for at, text in self.core.state.story.everything()]
