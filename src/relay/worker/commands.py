"""What a worker core asks of its shell; carried out in order, before anything else is handled."""

from dataclasses import dataclass

import msgspec
import numpy as np

from relay.engine.step import StepPlan
from relay.transfer.contract import ReceiveOrder, SendOrder
from relay.transfer.frame import Handoff
from relay.worker.status_page import ManifestRow


@dataclass(frozen=True, slots=True)
class SendToGateway:
    """``gateway`` is a connection; None: all that are welcome."""

    gateway: int | None
    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class CloseGateway:
    """End this connection: it belongs to an older life of its gateway. No event follows."""

    gateway: int


@dataclass(frozen=True, slots=True)
class SinkRow:
    """What a step's row means to a transfer: after layer i is written, positions first..first+count-1 may be sent.

    Positions gap..first-1 are in the blocks before the step's first layer (prefix cache, copied blocks).
    """

    transfer: int
    gap: int
    first: int
    count: int
    block_table: np.ndarray  # int32 [blocks], never changed afterwards


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run ``plan`` after the steps started before; answer StepFinished.

    ``manifest`` names the rows for whoever must explain the engine's end. ``sinks`` holds those that are to be streamed.
    ``failures`` is the number of failed steps the plan knows of: if more have failed by the time it runs, it builds on what was
    never computed, its result is void and nothing of it may be streamed.
    """

    plan: StepPlan
    sinks: dict[int, SinkRow]
    failures: int
    manifest: list[ManifestRow]


@dataclass(frozen=True, slots=True)
class OpenSend:
    order: SendOrder


@dataclass(frozen=True, slots=True)
class ForgetUnsent:
    """The transfer's blocks are about to be given away; see ``Transport.forget_unsent``."""

    transfer: int


@dataclass(frozen=True, slots=True)
class SendHandoff:
    transfer: int
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class OpenReceive:
    order: ReceiveOrder


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """End it on this side and tell the peer. No event follows."""

    transfer: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Answer TimerFired(name) at ``at_ns``; a later one of the same name replaces it."""

    name: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Exit:
    """Flush what is to be sent and end the process."""

    status: int
    reason: str


TransferCommand = OpenSend | ForgetUnsent | SendHandoff | OpenReceive | AbortTransfer

Command = SendToGateway | CloseGateway | StartStep | SetTimer | Exit | TransferCommand
