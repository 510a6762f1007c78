"""What the gateway's core wants done: the only outputs of ``GatewayCore.handle``, to be carried out in order."""

from dataclasses import dataclass

from relay.control.contract import Delivery, RequestFailure
from relay.control.events import ProcessName, TimerKey
from relay.ids import WorkerKey
from relay.protocol.messages import EngineExited, Message, Role


@dataclass(slots=True)
class AcceptConnection:
    """Bind the connection to this incarnation's process and send Welcome."""

    connection: int
    worker: WorkerKey
    process: ProcessName


@dataclass(slots=True)
class RejectConnection:
    """Send Rejected and close."""

    connection: int
    reason: str


@dataclass(slots=True)
class SendToEngine:
    worker: WorkerKey
    message: Message


@dataclass(slots=True)
class SendToAgent:
    worker: WorkerKey
    message: Message


@dataclass(slots=True)
class CloseWorker:
    """Fence: drop every connection of this incarnation; nothing it says counts any more."""

    worker: WorkerKey


@dataclass(slots=True)
class LaunchWorker:
    """``cause``: why the life before ended, empty for the first."""

    worker: WorkerKey
    role: Role
    cause: str = ""


@dataclass(slots=True)
class StopWorker:
    """Ask this incarnation to end (SIGTERM), or end it (SIGKILL). Idempotent.

    ``word``: what speaks against its engine, to be told with its end to every gateway, as the agent's last word is.
    """

    worker: WorkerKey
    kill: bool
    word: EngineExited | None = None


@dataclass(slots=True)
class WorkerGaveUp:
    """The worker cannot start at all (only before the cluster was ever complete)."""

    worker: WorkerKey
    status: int | None
    signal: int | None
    reason: str


@dataclass(slots=True)
class ClusterReady:
    """Every worker is ready for the first time."""


@dataclass(slots=True)
class Quiesced:
    """Draining, and no request is left."""


@dataclass(slots=True)
class Refuse:
    """The submitted request was not taken."""

    request: int
    failure: RequestFailure


@dataclass(slots=True)
class LeaveRefused:
    """The order to leave was not taken."""

    reason: str


@dataclass(slots=True)
class Deliver:
    request: int
    delivery: Delivery


@dataclass(slots=True)
class Fail:
    """The request ended without finishing; nothing follows."""

    request: int
    failure: RequestFailure


@dataclass(slots=True)
class Ended:
    """Every choice of the request finished or was stopped; nothing follows."""

    request: int


@dataclass(slots=True)
class SetTimer:
    """(Re)arm the timer ``key`` for the monotonic time ``at_ns``."""

    key: TimerKey
    at_ns: int


@dataclass(slots=True)
class CancelTimer:
    key: TimerKey


Command = (
    AcceptConnection
    | RejectConnection
    | SendToEngine
    | SendToAgent
    | CloseWorker
    | LaunchWorker
    | StopWorker
    | WorkerGaveUp
    | ClusterReady
    | Quiesced
    | Refuse
    | LeaveRefused
    | Deliver
    | Fail
    | Ended
    | SetTimer
    | CancelTimer
)
