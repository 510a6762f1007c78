"""What happens to the gateway: the only inputs of ``GatewayCore.handle``."""

from dataclasses import dataclass
from typing import Literal

from relay.control.contract import Submission
from relay.ids import WorkerKey
from relay.protocol.messages import EngineExited, Hello, Message

ProcessName = Literal["agent", "engine"]
TimerKey = tuple[str, str]  # (kind, worker id or "")


@dataclass(slots=True)
class Started:
    """The shell listens; launch the workers."""


@dataclass(slots=True)
class WorkerConnected:
    """A process said hello on a new connection; ``connection`` is the shell's name for it."""

    connection: int
    hello: Hello


@dataclass(slots=True)
class ConnectionLost:
    """An accepted connection ended (EOF, reset, bad frame, send buffer over its bound)."""

    worker: WorkerKey
    process: ProcessName
    reason: str


@dataclass(slots=True)
class WorkerMessage:
    """A message on an accepted connection of one incarnation of a worker."""

    worker: WorkerKey
    message: Message


@dataclass(slots=True)
class WorkerStarted:
    """The launcher has started this incarnation, for whichever gateway. What this core launched itself is no news to it."""

    worker: WorkerKey


@dataclass(slots=True)
class LauncherExited:
    """The launcher saw the end of what it started for this incarnation; ``reason`` if it could not even start it.

    ``engine``: the agent's last word about its engine, where it left one, or that of the gateway that had it killed for a hang.
    """

    worker: WorkerKey
    status: int | None = None
    signal: int | None = None
    reason: str = ""
    engine: EngineExited | None = None


@dataclass(slots=True)
class RequestSubmitted:
    """A validated request; ``request`` is unique over all gateways and their lives."""

    request: int
    submission: Submission


@dataclass(slots=True)
class RequestCancelled:
    """The client is gone."""

    request: int


@dataclass(slots=True)
class ChoiceFinished:
    """A stop string matched in the text path."""

    request: int
    choice: int


@dataclass(slots=True)
class TimerFired:
    key: TimerKey


@dataclass(slots=True)
class DrainRequested:
    """Take no new requests; ``Quiesced`` follows when the last one ended."""


@dataclass(slots=True)
class LeaveOrdered:
    """An operator wants ``workers`` (empty: all) drained and restarted, or kept out; ``rolling``: one after another.

    ``told``: another gateway took the order and sees to it; this one must know.
    """

    workers: tuple[str, ...]
    stay_out: bool = False
    rolling: bool = False
    told: bool = False


@dataclass(slots=True)
class StopRequested:
    """End now: what still runs fails, workers are stopped and stay so."""


Event = (
    Started
    | WorkerConnected
    | ConnectionLost
    | WorkerMessage
    | WorkerStarted
    | LauncherExited
    | RequestSubmitted
    | RequestCancelled
    | ChoiceFinished
    | TimerFired
    | DrainRequested
    | StopRequested
    | LeaveOrdered
)
