"""What can happen to a worker core. Transfer events (``transfer/contract.py``) are events too."""

from dataclasses import dataclass

from relay.engine.step import StepResult
from relay.protocol.messages import Cancel, Drain, Prefill, Reserve, Run
from relay.transfer.contract import TransferEvent

Order = Run | Reserve | Prefill | Cancel | Drain


@dataclass(frozen=True, slots=True)
class OrderReceived:
    """``gateway`` (a connection) sent ``order``; answers go back the same way."""

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
class GatewayConnected:
    """``gateway`` (a connection, its number never used again) was welcomed by that life of the gateway ``name``."""

    gateway: int
    name: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The connection ended, or could not be made; it says nothing any more."""

    gateway: int
    reason: str


Event = OrderReceived | StepFinished | TimerFired | DrainRequested | GatewayConnected | GatewayLost | TransferEvent
