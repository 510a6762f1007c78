"""The scheduler: which rows the next step computes, and what its result means. Pure: no clock, no threads, no I/O.

Calls alternate ``plan`` → (runner) → ``update``; ``plan`` may be called once more while one step is in flight (plan-ahead
depth 1), because a decode row's input is named as "the last token of slot s". A token drawn for a sequence that ended
meanwhile is discarded, and its blocks and slot return only after the last step in flight that may touch them.

A step holds the decode rows first, then prefill chunks in order of arrival within ``max_num_batched_tokens``. When blocks run
out, the youngest running sequence is preempted: it keeps its tokens, loses its blocks and recomputes later, mostly from the
prefix cache. Preemption happens only with no step in flight: ``plan`` then returns None once, so that the pipeline drains.
"""

from collections import deque

from relay.engine.admission import admit
from relay.engine.kv_space import KvSpace
from relay.engine.limits import SchedulerLimits
from relay.engine.roster import RUNNING, Counters, Roster
from relay.engine.sequence import (
    CannotFit,
    QueueFull,
    Reservation,
    Sequence,
    SequenceState,
    SequenceUpdate,
    sequence_of,
)
from relay.engine.step import StepPlan, StepResult
from relay.engine.step_builder import Flight, StepBuilder
from relay.ids import SequenceKey
from relay.kernels.backend import SampledToken
from relay.protocol.messages import Load, Work

__all__ = ["CannotFit", "QueueFull", "Reservation", "Scheduler", "SchedulerLimits", "SequenceUpdate"]


_STEPS = (SequenceState.WAITING, RUNNING)  # states in which a sequence has rows, now or soon


class Scheduler:
    """Sequences of one engine. ``namespace`` is the numerics id: it separates prefix hashes of unequal bits."""

    def __init__(self, limits: SchedulerLimits, namespace: str) -> None:
        self.limits = limits
        self._namespace = namespace
        self._counters = Counters()
        self.space = KvSpace(limits)
        self._roster = Roster(limits)
        self._builder = StepBuilder(limits, self._roster, self.space, self._counters)
        self._flights: deque[Flight] = deque()
        self._suspects: dict[SequenceKey, Sequence] = {}  # with rows that want a step for themselves
        self._suspect_next = False  # turns between them and everybody else
        self._trial: deque[Sequence] = deque()  # rows of a failed step, to run one by one until the culprit is found
        self._arrivals = 0
        self._step = 0

    # --- sequences come and go ------------------------------------------------------------------------------------

    def add(self, work: Work, *, prefill_only: bool = False) -> None:
        """Queue ``work`` for local compute. ``prefill_only`` (P): it ends with its first token, its blocks stay until ``release``.

        Raises CannotFit if it can never run here, QueueFull if too many wait already, ValueError if the key is known.
        """
        sequence = self._new_sequence(work, prefill_only)
        if len(self._roster.waiting) >= self.limits.max_num_waiting:
            raise QueueFull(
                f"{len(self._roster.waiting)} sequences are waiting, the limit is {self.limits.max_num_waiting}"
            )
        self._roster.sequences[sequence.key] = sequence
        self._roster.queue(sequence)

    def reserve(self, work: Work) -> Reservation | None:
        """D: take blocks for all of ``work.token_ids`` and keep room for its expected growth; None if that is too much now.

        The caller writes KV of positions ``cached_tokens``.. into the blocks, then calls ``activate`` (or ``cancel``, once
        nothing writes any more). Raises CannotFit and ValueError as ``add``.
        """
        sequence = self._new_sequence(work, False)
        if not self._roster.has_seat or (self._builder.starved and self._roster.waiting):
            return None
        matched = self.space.match(sequence, len(sequence.token_ids))
        if not admit(sequence, matched, self._roster, self.space, self.limits):
            return None
        sequence.state = SequenceState.RESERVED
        sequence.num_computed = sequence.num_planned = len(matched) * self.limits.block_size
        self._roster.sequences[sequence.key] = self._roster.reserved[sequence.key] = sequence
        self._builder.count_cached(sequence, 0, sequence.num_computed)
        return Reservation(sequence.key, sequence.num_computed, list(sequence.blocks))

    def activate(self, key: SequenceKey, first_token: SampledToken) -> list[SequenceUpdate]:
        """D: KV of all the work's tokens is in the blocks; ``first_token`` was drawn and reported by P.

        The sequence becomes runnable and its blocks join the prefix cache. If the first token ends it, the one update
        returned says so (without tokens). Raises KeyError if ``key`` holds no reservation.
        """
        sequence = self._roster.reserved.pop(key)
        self._roster.ready[key] = sequence
        sequence.state = RUNNING
        length = len(sequence.token_ids)
        sequence.num_computed = sequence.num_planned = sequence.prefill_end = length
        self.space.publish(sequence)
        finish = sequence.append(first_token.token_id)
        if finish is None:
            return []
        update = SequenceUpdate(key, sequence.num_outputs, [], finish, sequence.cached_tokens, num_computed=length)
        update.block_table = list(sequence.blocks) if sequence.capture else None
        self._end(sequence)
        return [update]

    def cancel(self, key: SequenceKey) -> None:
        """Stop and free in any state; unknown keys are ignored. A reservation's blocks must have no writer any more."""
        sequence = self._roster.sequences.get(key)
        if sequence is not None:
            self._end(sequence)

    def release(self, key: SequenceKey) -> None:
        """P: the KV of a ``prefill_only`` sequence is needed no longer. Idempotent; other sequences are left alone."""
        sequence = self._roster.sequences.get(key)
        if sequence is not None and sequence.prefill_only:
            self._end(sequence)

    # --- steps ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute now (a result, ``add``, ``activate`` or ``release`` change that)."""
        if len(self._flights) > 1:
            raise RuntimeError("two steps are in flight already")
        trial = self._trial
        while trial and trial[0].state is not RUNNING:
            trial.popleft()
        if trial and self._flights:
            return None
        self._roster.seat_ready()
        if not self._make_room():
            return None
        built = self._builder.build(self._step + 1, self._last_step(), trial[0]) if trial else self._take_turns()
        if built is None:
            return None
        plan, flight = built
        self._step = plan.step
        self._flights.append(flight)
        return plan

    def _take_turns(self) -> tuple[StepPlan, Flight] | None:
        """The next step for all, or for one suspect alone: with nothing else in flight before its end."""
        step, last_step = self._step + 1, self._last_step()
        suspects = [sequence for sequence in self._suspects.values() if sequence.alone and sequence.state in _STEPS]
        if self._flights and (self._flights[-1].alone or (suspects and self._suspect_next)):
            return None
        if not suspects:
            return self._builder.build(step, last_step)
        turns: list[Sequence | None] = [*suspects, None] if self._suspect_next else [None, *suspects]
        for suspect in turns:
            if suspect is not None and self._flights:
                return None
            built = self._builder.build(step, last_step, suspect)
            if built is not None:
                self._suspect_next = suspect is None
                if suspect is not None:
                    built[1].alone = True
                    self._suspects[suspect.key] = self._suspects.pop(suspect.key)  # the others' turn comes first
                return built
        return None

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Take the result of the oldest step in flight; one update a sequence that drew tokens, ended or failed.

        Raises ValueError if the result is not of that step's shape.
        """
        if not self._flights or self._flights[0].step != result.step:
            raise ValueError(f"step {result.step} is not the oldest step in flight")
        flight = self._flights.popleft()
        self._builder.landed(flight)
        self._counters.steps += 1
        updates: list[SequenceUpdate] = []
        if flight.void:
            pass
        elif result.error is not None:
            updates = self._roll_back(flight, result.error, set(result.failed_slots))
        else:
            updates = self._take_tokens(flight, result)
            if self._trial and flight.sequences == [self._trial[0]]:
                self._trial.popleft()
        self.space.pool.settle(flight.step)
        self._roster.slots.settle(flight.step)
        return updates

    def _take_tokens(self, flight: Flight, result: StepResult) -> list[SequenceUpdate]:
        drawn, digests = result.tokens, result.logit_digests
        wanted = sum([row.sample for row in flight.rows])
        if len(drawn) != wanted:
            raise ValueError(f"step {result.step} drew for {len(drawn)} rows, not {wanted}")
        size = self.limits.block_size
        updates: list[SequenceUpdate] = []
        index = -1
        num_prefill = 0
        for row, sequence in zip(flight.rows, flight.sequences, strict=True):
            if row.token_ids is not None:
                num_prefill += row.count
            if row.sample:
                index += 1
            if sequence.state is not RUNNING:
                continue
            computed = sequence.num_computed = row.start + row.count
            if computed // size > sequence.num_published:
                self.space.publish(sequence)
            if not row.sample:
                continue
            (token,) = drawn[index]
            position = len(sequence.token_ids) - sequence.num_prompt
            finish = sequence.append(token.token_id)
            update = SequenceUpdate(sequence.key, position, [token], finish, 0, None, None, computed)
            updates.append(update)
            if not sequence.reported:
                sequence.reported = True
                update.cached_tokens = sequence.cached_tokens
            if sequence.capture and digests is not None:
                update.logit_digests = [digests[index]]
            if finish is not None or sequence.prefill_only:
                update.block_table = list(sequence.blocks) if sequence.capture else None
                if sequence.prefill_only:
                    self._roster.leave(sequence, SequenceState.HELD, self._last_step())
                else:
                    self._end(sequence)
            elif row.token_ids is not None:
                self.space.list_tail(sequence)
        self._counters.prefill_tokens += num_prefill
        self._counters.decode_tokens += sum([row.token_ids is None for row in flight.rows])
        return updates

    def _roll_back(self, flight: Flight, error: str, blamed_slots: set[int]) -> list[SequenceUpdate]:
        """A step raised: fail the sequences to blame, take every other one back to what is known to be computed.

        Without a blamed slot the step's rows run one by one until each has passed or failed alone. The backend's slots may
        have seen part of the step, so every running sequence is bound again.
        """
        self._counters.step_errors += 1
        for later in self._flights:
            later.void = True
        blamed = [s for row, s in zip(flight.rows, flight.sequences, strict=True) if row.slot in blamed_slots]
        if len(flight.rows) == 1:
            blamed = flight.sequences
        updates = []
        for sequence in blamed:
            if sequence.state is RUNNING:
                updates.append(SequenceUpdate(sequence.key, sequence.num_outputs, [], failed=error))
                self._end(sequence)
        roster = self._roster
        for sequence in roster.running():
            sequence.num_planned = sequence.num_computed
            sequence.bound = False
            if sequence.num_computed < sequence.prefill_end and sequence.key in roster.decoding:
                roster.prefilling[sequence.key] = roster.decoding.pop(sequence.key)
        if not blamed:
            self._trial = deque(sequence for sequence in flight.sequences if sequence.state is RUNNING)
        return updates

    def _make_room(self) -> bool:
        """Preempt until every decode row has its block. False if that has to wait for the step in flight."""
        while True:
            decoding = self._roster.decoding.values()
            short = sum([s.num_planned >= s.capacity and s.num_planned < s.stop_at for s in decoding])
            if short <= self.space.pool.available:
                return True
            if self._flights:
                return False
            self._preempt(self._roster.youngest_running())

    def _preempt(self, sequence: Sequence) -> None:
        self._roster.leave(sequence, SequenceState.WAITING, 0)
        self.space.free(sequence, 0)
        sequence.high_water = max(sequence.high_water, sequence.num_computed)
        sequence.num_computed = sequence.num_planned = 0
        self._roster.queue(sequence)
        self._counters.preemptions += 1

    def _end(self, sequence: Sequence) -> None:
        last_step = self._last_step()
        self._roster.leave(sequence, SequenceState.DONE, last_step)
        self._suspects.pop(sequence.key, None)
        self.space.free(sequence, last_step)

    def _last_step(self) -> int:
        """The newest step in flight; 0 if there is none."""
        return self._flights[-1].step if self._flights else 0

    def _new_sequence(self, work: Work, prefill_only: bool) -> Sequence:
        sequence = sequence_of(work, self.limits, self._namespace, self._arrivals, prefill_only)
        if sequence.key in self._roster.sequences:
            raise ValueError(f"{sequence.key} is known already")
        self._arrivals += 1
        if sequence.solo_until:
            self._suspects[sequence.key] = sequence
        return sequence

    # --- views ------------------------------------------------------------------------------------------------------

    def key_of_slot(self, slot: int) -> SequenceKey:
        """Whose rows name ``slot`` in the steps in flight."""
        return self._roster.slots.key(slot)

    def block_table(self, key: SequenceKey) -> list[int]:
        """The blocks of a sequence, in order (none while it waits). Raises KeyError for an unknown key."""
        return list(self._roster.sequences[key].blocks)

    def keys(self) -> list[SequenceKey]:
        """All sequences that have not ended."""
        return list(self._roster.sequences)

    def has_work(self) -> bool:
        """There is something to compute or a result to wait for."""
        roster = self._roster
        return bool(roster.waiting or roster.prefilling or roster.decoding or roster.ready or self._flights)

    def load(self) -> Load:
        """What is held and queued; ``counters`` only grow."""
        roster = self._roster
        queued = sum([len(s.token_ids) for s in roster.waiting])
        return Load(
            kv_used=self.space.pool.num_used,
            kv_total=self.limits.num_blocks,
            running=len(roster.running()),
            waiting=len(roster.waiting),
            waiting_tokens=queued + sum([s.prefill_end - s.num_planned for s in roster.prefilling.values()]),
            counters=self._counters.as_dict(),
        )

    @property
    def num_preemptions(self) -> int:
        """Of this scheduler's life."""
        return self._counters.preemptions

    def cache_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(added, removed) prefix-cache unit hashes since the last call."""
        return self.space.cache.changes()

    def cached_units(self) -> list[bytes]:
        """All unit hashes in the prefix cache, to reset a router that lost count."""
        return self.space.cache.unit_hashes()

    def check(self) -> None:
        """Assert the invariants: every sequence is in one place; slots and blocks have exactly their holders (I8, I9)."""
        self._roster.check()
        assert len(self._flights) <= 2, "more than two steps are in flight"
        for s in self._roster.sequences.values():
            assert s.num_computed <= s.num_planned <= s.capacity, f"{s.key} is planned beyond its blocks"
            assert s.num_planned <= len(s.token_ids) + len(self._flights), f"{s.key} is planned beyond its tokens"
            assert s.num_published <= s.num_computed // self.limits.block_size, (
                f"{s.key} has published what is not computed"
            )
        self.space.check(self._roster.sequences.values())
