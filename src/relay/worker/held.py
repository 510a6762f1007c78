"""What a worker holds for one sequence, and the table of what may happen to it."""

from dataclasses import dataclass
from enum import StrEnum

from relay.ids import SequenceKey
from relay.protocol.messages import Work
from relay.worker.token_log import TokenLog


class HeldState(StrEnum):
    RUNNING = "running"  # computing here, tokens go to the gateway
    PREFILLING = "prefilling"  # P: until the first token is drawn
    HANDED_OFF = "handed_off"  # P: until D acknowledges
    PARKED = "parked"  # P: computed, until a D has room or the lease ends
    RESERVED = "reserved"  # D: until the KV is complete


class HeldEvent(StrEnum):
    FIRST_TOKEN_DRAWN = "first_token_drawn"
    TRANSFER_COMPLETED = "transfer_completed"
    PARKED = "parked"


TRANSITIONS: dict[tuple[HeldState, HeldEvent], HeldState] = {
    (HeldState.PREFILLING, HeldEvent.FIRST_TOKEN_DRAWN): HeldState.HANDED_OFF,
    (HeldState.PREFILLING, HeldEvent.PARKED): HeldState.PARKED,
    (HeldState.RESERVED, HeldEvent.TRANSFER_COMPLETED): HeldState.RUNNING,
}
"""Every state also ends, by finish, failure, cancellation or acknowledgement: the sequence is then held no more."""


@dataclass(slots=True)
class Held:
    """One sequence on this worker. ``key`` is its name in the scheduler for life, ``name`` what its owner calls it."""

    key: SequenceKey
    name: SequenceKey
    gateway: int | None  # who asked for it and hears of it; None: an orphan
    work: Work
    state: HeldState
    transfer: int | None = None
    slot: int | None = None  # P: the slot of its rows
    announced: int = 0  # P: positions before are announced to the transfer; P and D: or need not be sent
    log: TokenLog | None = None  # kept for a gateway that may take over

    def move(self, event: HeldEvent) -> None:
        """Raises KeyError for a transition that is not in the table: a bug here, not bad input."""
        self.state = TRANSITIONS[self.state, event]
