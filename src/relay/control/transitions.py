"""Both state machines of the gateway as tables: what a choice and a worker may do next."""

from enum import Enum


class ChoiceState(Enum):
    """Where one choice of one request stands."""

    WAITING = "waiting"  # in the gateway's queue
    RESERVING = "reserving"  # Reserve sent to D
    PREFILLING = "prefilling"  # D accepted, Prefill sent to P
    HANDOFF = "handoff"  # P reported the first token, D has not spoken yet
    RUNNING = "running"  # one worker holds it (Run, or D after the handoff)
    ENDED = "ended"


class Trigger(Enum):
    """What moves a choice."""

    RESERVE = "reserve"
    RUN = "run"
    ACCEPT = "accept"
    PREFILL_TOKENS = "prefill tokens"
    DECODE_TOKENS = "decode tokens"
    REOPEN = "reopen"
    END = "end"


_C, _T = ChoiceState, Trigger

CHOICE_TRANSITIONS: dict[tuple[ChoiceState, Trigger], ChoiceState] = {
    (_C.WAITING, _T.RESERVE): _C.RESERVING,
    (_C.WAITING, _T.RUN): _C.RUNNING,
    (_C.WAITING, _T.END): _C.ENDED,
    (_C.RESERVING, _T.ACCEPT): _C.PREFILLING,
    (_C.RESERVING, _T.REOPEN): _C.WAITING,
    (_C.RESERVING, _T.END): _C.ENDED,
    (_C.PREFILLING, _T.PREFILL_TOKENS): _C.HANDOFF,
    (_C.PREFILLING, _T.DECODE_TOKENS): _C.RUNNING,
    (_C.PREFILLING, _T.REOPEN): _C.WAITING,
    (_C.PREFILLING, _T.END): _C.ENDED,
    (_C.HANDOFF, _T.DECODE_TOKENS): _C.RUNNING,
    (_C.HANDOFF, _T.REOPEN): _C.WAITING,
    (_C.HANDOFF, _T.END): _C.ENDED,
    (_C.RUNNING, _T.REOPEN): _C.WAITING,
    (_C.RUNNING, _T.END): _C.ENDED,
}


class WorkerState(Enum):
    """Where one worker stands; every launch is a new incarnation."""

    STOPPED = "stopped"  # not launched, or stopped for good
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"  # fenced; waits for the exit of the old process or for its restart delay


class WorkerTrigger(Enum):
    """What moves a worker."""

    LAUNCH = "launch"
    CONNECT = "connect"
    DRAIN = "drain"
    LOSE = "lose"
    STOP = "stop"


_W, _X = WorkerState, WorkerTrigger

WORKER_TRANSITIONS: dict[tuple[WorkerState, WorkerTrigger], WorkerState] = {
    (_W.STOPPED, _X.LAUNCH): _W.STARTING,
    (_W.LOST, _X.LAUNCH): _W.STARTING,
    (_W.STARTING, _X.CONNECT): _W.READY,
    (_W.READY, _X.DRAIN): _W.DRAINING,
    (_W.STARTING, _X.LOSE): _W.LOST,
    (_W.READY, _X.LOSE): _W.LOST,
    (_W.DRAINING, _X.LOSE): _W.LOST,
    (_W.STARTING, _X.STOP): _W.STOPPED,
    (_W.READY, _X.STOP): _W.STOPPED,
    (_W.DRAINING, _X.STOP): _W.STOPPED,
    (_W.LOST, _X.STOP): _W.STOPPED,
    (_W.STOPPED, _X.STOP): _W.STOPPED,
}
