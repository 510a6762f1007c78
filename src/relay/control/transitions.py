"""The state machines of the gateway as tables: what a choice, an attempt and a worker may do next."""

from enum import Enum


class ChoiceState(Enum):
    """Where one choice of one request stands."""

    WAITING = "waiting"  # in the gateway's queue
    PLACED = "placed"  # one live attempt, or two while one of them is a hedge
    ENDED = "ended"


class Trigger(Enum):
    """What moves a choice."""

    PLACE = "place"
    REOPEN = "reopen"  # its last live attempt failed
    END = "end"


_C, _T = ChoiceState, Trigger

CHOICE_TRANSITIONS: dict[tuple[ChoiceState, Trigger], ChoiceState] = {
    (_C.WAITING, _T.PLACE): _C.PLACED,
    (_C.WAITING, _T.END): _C.ENDED,
    (_C.PLACED, _T.REOPEN): _C.WAITING,
    (_C.PLACED, _T.END): _C.ENDED,
}


class AttemptState(Enum):
    """Where one attempt of a choice stands. It begins in RESERVING, or in RUNNING when one worker does both phases."""

    RESERVING = "reserving"  # Reserve sent to D
    PREFILLING = "prefilling"  # D accepted, Prefill sent to P
    HANDOFF = "handoff"  # P reported the first token, D has not spoken yet
    RUNNING = "running"  # one worker holds it (Run, or D after the handoff)
    ENDED = "ended"


class AttemptTrigger(Enum):
    """What moves an attempt."""

    ACCEPT = "accept"
    PREFILL_TOKENS = "prefill tokens"
    DECODE_TOKENS = "decode tokens"
    END = "end"


_A, _B = AttemptState, AttemptTrigger

ATTEMPT_TRANSITIONS: dict[tuple[AttemptState, AttemptTrigger], AttemptState] = {
    (_A.RESERVING, _B.ACCEPT): _A.PREFILLING,
    (_A.RESERVING, _B.END): _A.ENDED,
    (_A.PREFILLING, _B.PREFILL_TOKENS): _A.HANDOFF,
    (_A.PREFILLING, _B.DECODE_TOKENS): _A.RUNNING,
    (_A.PREFILLING, _B.END): _A.ENDED,
    (_A.HANDOFF, _B.DECODE_TOKENS): _A.RUNNING,
    (_A.HANDOFF, _B.END): _A.ENDED,
    (_A.RUNNING, _B.END): _A.ENDED,
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
