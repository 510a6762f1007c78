"""What can happen to a worker core. Transfer events (``transfer/contract.py``) are events too."""

from dataclasses import dataclass

from relay.engine.step import StepResult
from relay.protocol.messages import Cancel, Drain, Prefill, Reserve, Run
from relay.transfer.contract import TransferEvent

Order = Run | Reserve | Prefill | Cancel | Drain


@dataclass(frozen=True, slots=True)
class OrderReceived:
    """``gateway`` sent ``order``; answers go back to the same gateway."""

    gateway: int
    order: Order


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The oldest step in flight is done (or raised: ``result.error``)."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer set by ``SetTimer`` is due."""

    name: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """SIGTERM: as a Drain from every gateway."""


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The control connection ended. Nobody is left to take this engine's tokens."""

    gateway: int
    reason: str


Event = OrderReceived | StepFinished | TimerFired | DrainRequested | GatewayLost | TransferEvent
