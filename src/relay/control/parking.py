"""Prompts computed while every decode worker is full: their KV waits on P under a lease, once a choice; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relay.config import SECOND
from relay.control.commands import SendToEngine
from relay.control.state import LIVE, ClusterState
from relay.control.transitions import WorkerState
from relay.ids import WorkerKey
from relay.protocol.messages import Cancel

if TYPE_CHECKING:
    from relay.control.attempts import Attempt
    from relay.control.requests import Choice
    from relay.control.workers import Worker

MAX_PARKED = 64  # half of what the queue looks at: parked choices may not hide those that wait for a first token


@dataclass(frozen=True, slots=True)
class Parked:
    """Where the KV of a choice is, under which attempt, and until when. Kept when it is over: a choice is parked once."""

    worker: WorkerKey
    attempt: int
    until_ns: int


class Parking:
    """Who is parked where."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def home(self, choice: Choice, now_ns: int) -> Worker | None:
        """The worker that keeps the KV of ``choice`` now."""
        parked = choice.parked
        if parked is None or now_ns >= parked.until_ns:
            return None
        worker = self._state.current(parked.worker)
        return worker if worker is not None and worker.state is WorkerState.READY else None

    def allows(self, choice: Choice, decoders: list[Worker], now_ns: int) -> bool:
        """Whether ``choice`` should be computed although nobody has room for it."""
        state = self._state
        if not state.config.retry.park_lease_s or choice.parked is not None or now_ns < choice.park_after_ns:
            return False
        if choice.request.suspicion.total or choice.transfer_failures:
            return False
        return len(state.parked) < MAX_PARKED and all(worker.full or not worker.has_room for worker in decoders)

    def park(self, attempt: Attempt, now_ns: int) -> None:
        """The first token of ``attempt`` is committed."""
        lease_ns = int(self._state.config.retry.park_lease_s * SECOND)
        attempt.choice.parked = Parked(attempt.decode.key, attempt.number, now_ns + lease_ns)
        self._state.parked[attempt.choice] = None
        self._state.counters["parked"] += 1

    def refused(self, choice: Choice, after_ns: int) -> None:
        """P keeps enough already."""
        choice.park_after_ns = after_ns

    def gone(self, choice: Choice, worker: Worker, attempt: int) -> None:
        """``worker`` keeps it no more, since it needed the room."""
        parked = choice.parked
        if parked is not None and (parked.worker, parked.attempt) == (worker.key, attempt) and parked.until_ns:
            self._state.parked.pop(choice, None)
            self._state.changed = True
            choice.parked = replace(parked, until_ns=0)

    def leave(self, choice: Choice, to: Worker | None = None) -> None:
        """The KV is needed no more, or goes on from there to ``to``, whose next order takes it over."""
        self._state.parked.pop(choice, None)
        parked = choice.parked
        if parked is None or not parked.until_ns:
            return
        choice.parked = replace(parked, until_ns=0)
        worker = self._state.current(parked.worker)
        if worker is not None and worker is not to and worker.state in LIVE:
            cancel = Cancel(choice.request.id, choice.index, parked.attempt)
            self._state.commands.append(SendToEngine(worker.key, cancel))
