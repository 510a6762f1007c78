"""Which workers compute a choice: longest cached prefix against load, within one numerics id."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from relay.control.requests import Choice
from relay.control.state import ClusterState
from relay.control.transitions import WorkerState
from relay.control.workers import Worker
from relay.protocol.block_hash import UNIT_TOKENS

SEQUENCE_COST_TOKENS = 32  # a running sequence delays a newcomer about as much as this many prompt tokens
SUSPECT_COST_TOKENS = 1 << 40


@dataclass(slots=True)
class Placement:
    """``prefill`` None: ``decode`` computes everything. Counts are of tokens not cached there."""

    decode: Worker
    prefill: Worker | None
    uncached_decode: int
    uncached_prefill: int


class Router:
    """Chooses by one cost in tokens: those booked on the worker, those of this choice it has not cached, and its sequences.

    With equal load the longest cached prefix wins; a long prefix does not draw everything to one worker whose queue is longer
    than what the prefix saves. Roles are preferences: without a live decode worker any worker decodes, without a live
    prefill worker D prefills.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def any_room(self) -> bool:
        """Whether looking at the queue can be worth while at all."""
        for worker in self._state.workers.values():
            if worker.state is WorkerState.READY and (worker.has_room or worker.exclusive is not None):
                return True
        return False

    def choose(self, choice: Choice, now_ns: int) -> Placement | None:
        """A placement for ``choice`` now, or None: it waits."""
        ready = [worker for worker in self._state.ready_workers() if self._may_serve(worker, choice)]
        if not ready:
            return None
        if choice.blames >= self._state.config.retry.max_blames - 1:
            return self._alone(choice, ready)
        decoders = [worker for worker in ready if worker.role != "prefill"] or ready
        prefillers = [worker for worker in ready if worker.role == "prefill" and worker not in decoders]
        uncached = {worker.id: self._uncached(worker, choice) for worker in ready}

        decode = self._cheapest(decoders, uncached, lambda worker: worker.has_room)
        if decode is None:
            return None
        if not prefillers or self._prefers_one_worker(choice, uncached[decode.id]):
            return Placement(decode, None, uncached[decode.id], 0)
        with_kv_room = self._cheapest(decoders, uncached, lambda worker: worker.can_reserve)
        if with_kv_room is None:
            patience_ns = int(self._state.config.retry.full_patience_s * 1e9)
            if choice.full_since_ns and now_ns - choice.full_since_ns >= patience_ns:
                return Placement(decode, None, uncached[decode.id], 0)
            return None
        prefill = self._cheapest(prefillers, uncached, lambda worker: worker.has_room)
        if prefill is None:
            return None
        return Placement(with_kv_room, prefill, uncached[with_kv_room.id], uncached[prefill.id])

    def _may_serve(self, worker: Worker, choice: Choice) -> bool:
        return choice.numerics_id is None or worker.numerics_id == choice.numerics_id

    def _prefers_one_worker(self, choice: Choice, uncached: int) -> bool:
        config = self._state.config
        return uncached < config.short_prompt_tokens or choice.transfer_failures >= config.retry.max_transfer_failures

    def _uncached(self, worker: Worker, choice: Choice) -> int:
        cached = worker.cached_units(choice.hashes(worker.numerics_id)) * UNIT_TOKENS
        return max(1, choice.num_tokens - cached)  # the last token is always computed

    @staticmethod
    def _cheapest(workers: Iterable[Worker], uncached: dict[str, int], fits: Callable[[Worker], bool]) -> Worker | None:
        best: Worker | None = None
        best_cost = 0
        for worker in workers:
            if not fits(worker):
                continue
            cost = worker.backlog_tokens + uncached[worker.id] + SEQUENCE_COST_TOKENS * len(worker.live)
            if worker.suspect:
                cost += SUSPECT_COST_TOKENS
            if best is None or cost < best_cost:
                best, best_cost = worker, cost
        return best

    def _alone(self, choice: Choice, ready: list[Worker]) -> Placement | None:
        """A choice that may be killing engines runs where nothing else does: one worker is kept free for it."""
        kept = next((worker for worker in ready if worker.exclusive is choice), None)
        if kept is None:
            free = [worker for worker in ready if worker.exclusive is None]
            if not free:
                return None
            kept = min(free, key=lambda worker: (len(worker.live), worker.role == "prefill"))
            kept.exclusive = choice
        return None if kept.live else Placement(kept, None, choice.num_tokens, 0)
