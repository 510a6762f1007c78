"""What the supervisor and its gateways say to each other over a socket pair; framing as in ``protocol/framing.py``."""

from relay.protocol.messages import EngineExited, Message

# --- gateway → supervisor -------------------------------------------------------------------------------------------


class StartWorker(Message, tag="start_worker"):
    """Start this incarnation, unless it or a later one was started: then the present one is told."""

    worker: str
    incarnation: int
    role: str
    cause: str = ""


class KillWorker(Message, tag="kill_worker"):
    """SIGKILL to everything of this incarnation. Idempotent. ``word``: told with its end to every gateway."""

    worker: str
    incarnation: int
    word: EngineExited | None = None


class GatewayReady(Message, tag="gateway_ready"):
    """It serves. ``max_model_len``: the context it found room for."""

    max_model_len: int


class WorkerHopeless(Message, tag="worker_hopeless"):
    """The worker cannot start at all: the supervisor, which has its output, says why and ends."""

    worker: str
    status: int | None
    reason: str


class GatewayFailed(Message, tag="gateway_failed"):
    """The gateway cannot start: the text for the user, and the exit code."""

    exit_code: int
    text: str


class WorkersLeave(Message, tag="workers_leave"):
    """An operator ordered ``workers`` (empty: all) to drain; the supervisor passes it on to the other gateways."""

    workers: list[str]
    stay_out: bool


# --- supervisor → gateway -------------------------------------------------------------------------------------------


class WorkerExited(Message, tag="worker_exited"):
    worker: str
    incarnation: int
    status: int | None = None
    signal: int | None = None
    reason: str = ""
    engine: EngineExited | None = None


class WorkerPresent(Message, tag="worker_present"):
    """This incarnation was started, for whichever gateway."""

    worker: str
    incarnation: int


class GatewayLife(Message, tag="gateway_life"):
    """One gateway as it is now."""

    id: str
    epoch: int
    pid: int


class GatewayLives(Message, tag="gateway_lives"):
    """All gateways, for status pages; sent when it changes."""

    gateways: list[GatewayLife]


class Begin(Message, tag="begin"):
    """First of all messages. ``config`` is a ``ServeConfig`` as JSON; ``max_model_len`` 0: nobody knows yet.

    ``present`` and ``exited`` are what was started, and what of it has ended; ``kept_out`` shall not be started again.
    """

    gateway: str
    epoch: int
    config: bytes
    complete: bool
    max_model_len: int
    present: list[WorkerPresent]
    exited: list[WorkerExited]
    kept_out: list[str]


class Pong(Message, tag="pong"):
    """To a ``Ping``: its event loop turns."""


class Ping(Message, tag="ping"):
    """Asked every second of a gateway that serves."""


GatewayToSupervisor = Pong | StartWorker | KillWorker | GatewayReady | WorkerHopeless | GatewayFailed | WorkersLeave
SupervisorToGateway = Begin | Ping | WorkerExited | WorkerPresent | GatewayLives | WorkersLeave
