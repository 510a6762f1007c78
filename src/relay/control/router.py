"""Which workers compute a choice: longest cached prefix against load, within one numerics id."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from relay.config import SECOND
from relay.control.attempts import Attempt
from relay.control.breaker import EVERYTHING
from relay.control.parking import Parking
from relay.control.requests import Choice
from relay.control.state import ClusterState
from relay.control.workers import Worker
from relay.protocol.block_hash import UNIT_TOKENS

SEQUENCE_COST_TOKENS = 32  # a running sequence delays a newcomer about as much as this many prompt tokens
COMPUTE_WEIGHT = 2  # a token computed again costs this request its wait and everybody the work
BREAKER_COST_TOKENS = 1 << 38  # more than any load: taken only where nothing else has room
SUSPECT_COST_TOKENS = 1 << 40


@dataclass(slots=True)
class Placement:
    """``prefill`` None: ``decode`` computes everything. Counts are of tokens not cached there."""

    decode: Worker
    prefill: Worker | None
    uncached_decode: int
    uncached_prefill: int
    parks: bool = False  # up to the first token only: nobody has room for the rest

    @property
    def uncached(self) -> int:
        """Tokens that this placement makes somebody compute."""
        return self.uncached_decode if self.prefill is None else self.uncached_prefill


class Router:
    """Chooses by one cost in tokens: those booked on the worker, its sequences, and twice those of this choice it has not cached.

    So the longest cached prefix wins until load outweighs what it saves. Roles are preferences: without a live decode
    worker any worker decodes, without a live prefill worker D prefills. So are breakers: a worker over what its breaker allows
    is taken when no other has room, wherever the prefix is cached. A KV transfer over a bad link is not: D computes instead.
    """

    def __init__(self, state: ClusterState, parking: Parking) -> None:
        self._state = state
        self._parking = parking

    def any_room(self) -> bool:
        """Whether looking at the queue can be worth while at all."""
        return any(worker.has_room for worker in [*self._state.ready_workers(), *self._state.last_of_their_kind()])

    def crowded(self) -> bool:
        """No worker that would decode has room: ``choose`` has nothing for a choice that any numerics suit."""
        ready = self._state.ready_workers()
        decoders = [worker for worker in ready if worker.role != "prefill"] or ready
        return not any(worker.has_room for worker in decoders)

    def choose(self, choice: Choice, now_ns: int) -> Placement | None:
        """A placement for ``choice`` now, or None: it waits."""
        request = choice.request
        suspicion = request.suspicion
        unsure = suspicion.unexplained + suspicion.lingering
        if unsure and suspicion.blames + unsure >= self._state.config.retry.max_blames - 1:
            return None  # whether it must run alone is about to be known
        holder = self._holder(choice)
        if holder is not None:
            return Placement(holder, None, 1, 0)
        placement = self._place(choice, now_ns)
        if placement is None or len(request.choices) == 1:
            return placement
        return self._together(choice, placement)

    def _together(self, choice: Choice, placement: Placement) -> Placement | None:
        """``placement`` of one choice of several, or one beside the others: they must not take more engines than it takes to
        know that it is them (decision 0012). All that die of one thing at once must leave one engine for the proof.
        """
        request = choice.request
        others = [each for each in request.choices if each is not choice]
        computing, decoders = _engines(others)
        if request.suspicion.total:  # on one engine, and not first on P and then on D
            if placement.decode in computing or not computing:
                placement.prefill = None
                return placement
            homes = computing
        elif not any(each.committed for each in request.choices) and computing:
            if (placement.prefill or placement.decode) in computing and self._few(decoders, placement.decode):
                return placement
            homes = computing
        elif self._few(decoders, placement.decode):
            return placement
        else:
            homes = decoders
        ready = self._state.ready_workers()
        for home in homes:
            if home.role != "prefill" and home.has_room and self._may_serve(home, choice) and home in ready:
                return Placement(home, None, self._uncached(home, choice), 0)
        return None

    def _few(self, engines: list[Worker], another: Worker) -> bool:
        """Whether ``engines`` and ``another`` may all fall at once to one request that nothing speaks against yet."""
        return another in engines or len(engines) < self._state.config.retry.max_blames - 1

    def _place(self, choice: Choice, now_ns: int) -> Placement | None:
        ready = [worker for worker in self._state.ready_workers() if self._may_serve(worker, choice)]
        if not ready and choice.numerics_id is not None:
            ready = [worker for worker in self._state.last_of_their_kind() if self._may_serve(worker, choice)]
        return self._parked(ready, choice, now_ns) or self._among(ready, choice, now_ns)

    def _parked(self, ready: list[Worker], choice: Choice, now_ns: int) -> Placement | None:
        """A prefill worker that computes ``choice`` and keeps its KV, while every decode worker is full."""
        decoders = [worker for worker in ready if worker.role != "prefill"]
        if not decoders or not self._parking.allows(choice, decoders, now_ns):
            return None
        prefillers = [worker for worker in ready if worker.role == "prefill"]
        uncached = {worker.id: self._uncached(worker, choice) for worker in prefillers}
        allowance = self._allowances(prefillers, now_ns)
        home = self._cheapest(prefillers, uncached, allowance, lambda worker: worker.has_room)
        return None if home is None else Placement(home, None, uncached[home.id], 0, parks=True)

    def _holder(self, choice: Choice) -> Worker | None:
        """A worker that computes ``choice`` already, for a gateway that is gone."""
        key = (choice.request.submission.resume_key, choice.index)
        if not key[0]:
            return None
        ready = self._state.ready_workers()
        fits = (w for w in ready if key in w.orphans and w.has_room and self._may_serve(w, choice))
        return next(fits, None)

    def choose_hedge(self, attempt: Attempt, now_ns: int) -> Placement | None:
        """A second placement beside ``attempt``: other workers of the same numerics that nothing speaks against, or None."""
        choice, numerics_id = attempt.choice, attempt.decode.numerics_id
        fine = [
            worker
            for worker in self._state.ready_workers()
            if worker.numerics_id == numerics_id
            and not worker.doubted
            and not attempt.on(worker)
            and self._may_serve(worker, choice)
            and len(worker.live) < self._allowance(worker, now_ns)
        ]
        placement = self._among(fine, choice, now_ns)
        if placement is None:
            return None
        # Hedges of its choices must not take a third engine.
        choices = choice.request.choices
        computing, decoders = _engines(choices)
        fits = self._few(decoders, placement.decode)
        if not any(each.committed for each in choices):
            fits = fits and self._few(computing, placement.prefill or placement.decode)
        return placement if fits else None

    def _among(self, ready: list[Worker], choice: Choice, now_ns: int) -> Placement | None:
        """The best placement on some of ``ready``."""
        if not ready:
            return None
        decoders = [worker for worker in ready if worker.role != "prefill"] or ready
        if not any(worker.has_room for worker in decoders):
            return None
        prefillers = [worker for worker in ready if worker.role == "prefill" and worker not in decoders]
        uncached = {worker.id: self._uncached(worker, choice) for worker in ready}
        allowance = self._allowances(ready, now_ns)
        decode = self._cheapest(decoders, uncached, allowance, lambda worker: worker.has_room)
        if decode is None:
            return None
        alone = Placement(decode, None, uncached[decode.id], 0)
        retry = self._state.config.retry
        if not prefillers or choice.transfer_failures >= retry.max_transfer_failures:
            return alone
        short = self._state.config.short_prompt_tokens
        if uncached[decode.id] < short:
            # Unless the rest of its prefix is on its way to D: then it waits, and D has the prefix once instead of many times.
            return alone if choice.num_tokens - self._cached_tokens(decode, choice) < short else None
        with_kv_room = None
        if now_ns >= choice.reserve_after_ns:
            with_kv_room = self._cheapest(decoders, uncached, allowance, lambda worker: worker.can_reserve)
        home = self._parking.home(choice, now_ns)
        if with_kv_room is None and home is not None:
            return None  # under its lease it waits for room
        if with_kv_room is None:
            patient = not choice.full_since_ns or now_ns - choice.full_since_ns < int(retry.full_patience_s * SECOND)
            return None if patient else alone
        # During an upgrade workers differ: KV crosses only between equal numerics.
        pairable = [
            worker
            for worker in prefillers
            if worker.numerics_id == with_kv_room.numerics_id and self._link_has_room(worker, with_kv_room, now_ns)
        ]
        if not pairable:
            return Placement(with_kv_room, None, uncached[with_kv_room.id], 0)
        candidates = [home] if home in pairable and home is not None else pairable
        prefill = self._cheapest(candidates, uncached, allowance, lambda worker: worker.has_room)
        if prefill is None:
            return None
        return Placement(with_kv_room, prefill, uncached[with_kv_room.id], uncached[prefill.id])

    def _allowance(self, worker: Worker, now_ns: int) -> int:
        return self._state.breakers.workers[worker.id].allowance(now_ns, worker.max_live)

    def _allowances(self, ready: list[Worker], now_ns: int) -> dict[str, int]:
        """Sequences each may have by its breaker. With more than half open, open ones count as closed: it is not them."""
        found = {worker.id: self._allowance(worker, now_ns) for worker in ready}
        if 2 * sum(not allowed for allowed in found.values()) > len(found):
            return {worker: allowed or EVERYTHING for worker, allowed in found.items()}
        return found

    def _link_has_room(self, prefill: Worker, decode: Worker, now_ns: int) -> bool:
        allowed = self._state.breakers.link_allowance(prefill.id, decode.id, now_ns)
        return allowed == EVERYTHING or sum(attempt.decode is decode for attempt in prefill.live) < allowed

    def _may_serve(self, worker: Worker, choice: Choice) -> bool:
        if worker.id in choice.distrusted:
            return False
        if choice.numerics_id is not None:
            return worker.numerics_id == choice.numerics_id
        # The first token pins the whole request: no two choices of it may be on their way to different ones.
        others = (attempt for each in choice.request.choices if each is not choice for attempt in each.attempts)
        return all(attempt.decode.numerics_id == worker.numerics_id for attempt in others)

    @staticmethod
    def _cached_tokens(worker: Worker, choice: Choice) -> int:
        return worker.cached_units(choice.hashes(worker.numerics_id)) * UNIT_TOKENS

    @staticmethod
    def _uncached(worker: Worker, choice: Choice) -> int:
        """Tokens to compute or receive there, counting what is on its way; the last token is always computed."""
        coming = worker.coming_units(choice.hashes(worker.numerics_id)) * UNIT_TOKENS
        return max(1, choice.num_tokens - coming)

    @staticmethod
    def _cheapest(
        workers: Iterable[Worker],
        uncached: dict[str, int],
        allowance: dict[str, int],
        fits: Callable[[Worker], bool],
    ) -> Worker | None:
        best: Worker | None = None
        best_cost = 0
        for worker in workers:
            if not fits(worker):
                continue
            cost = (
                worker.backlog_tokens + COMPUTE_WEIGHT * uncached[worker.id] + SEQUENCE_COST_TOKENS * len(worker.live)
            )
            if len(worker.live) >= allowance[worker.id]:
                cost += BREAKER_COST_TOKENS
            if worker.doubted:
                cost += SUSPECT_COST_TOKENS
            if best is None or cost < best_cost:
                best, best_cost = worker, cost
        return best


def _engines(choices: Iterable[Choice]) -> tuple[list[Worker], list[Worker]]:
    """Where ``choices`` are computed now, and where they are decoded, now or after their prompt."""
    attempts = [attempt for choice in choices for attempt in choice.attempts]
    computing = dict.fromkeys(attempt.prefill or attempt.decode for attempt in attempts)
    return list(computing), list(dict.fromkeys(attempt.decode for attempt in attempts))
