"""The scheduler: which rows the next step computes, and what its result means. Pure: no clock, no threads, no I/O.

Calls alternate ``plan`` → (runner) → ``update``; ``plan`` may be called once more while one step is in flight (plan-ahead
depth 1), because a decode row's input is named as "the last token of slot s". A token drawn for a sequence that ended
meanwhile is discarded, and its blocks and slot return only after the last step in flight that may touch them.

A step holds the decode rows first, then prefill chunks in order of arrival within ``max_num_batched_tokens``. When blocks run
out, the youngest running sequence is preempted: it keeps its tokens, loses its blocks and recomputes later, mostly from the
prefix cache. Preemption happens only with no step in flight: ``plan`` then returns None once, so that the pipeline drains.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from relay.engine.kv_space import KvSpace
from relay.engine.limits import SchedulerLimits
from relay.engine.sequence import CannotFit, PartKey, Reservation, Sequence, SequenceState, SequenceUpdate, sequence_of
from relay.engine.slots import Slots
from relay.engine.step import SlotBinding, StepPlan, StepResult, StepRow
from relay.ids import SequenceKey
from relay.kernels.backend import SampledToken
from relay.protocol.block_hash import UNIT_TOKENS
from relay.protocol.messages import Load, Work

__all__ = ["CannotFit", "Reservation", "Scheduler", "SchedulerLimits", "SequenceUpdate"]

RUNNING = SequenceState.RUNNING


@dataclass(slots=True)
class _Flight:
    """A planned step whose result is not known yet."""

    step: int
    rows: list[StepRow]
    sequences: list[Sequence]  # of the rows
    parts: list[PartKey]  # units of 16 tokens its prefill rows compute
    void: bool = False  # an earlier step failed: its result means nothing


class Scheduler:
    """Sequences of one engine. ``namespace`` is the numerics id: it separates prefix hashes of unequal bits."""

    def __init__(self, limits: SchedulerLimits, namespace: str) -> None:
        self.limits = limits
        self._namespace = namespace
        self._space = KvSpace(limits)
        self._slots = Slots(limits.max_num_seqs)
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._waiting: list[Sequence] = []  # by arrival
        self._prefilling: dict[SequenceKey, Sequence] = {}
        self._decoding: dict[SequenceKey, Sequence] = {}
        self._ready: dict[SequenceKey, Sequence] = {}  # activated, without a slot yet
        self._reserved: dict[SequenceKey, Sequence] = {}
        self._flights: deque[_Flight] = deque()
        self._trial: deque[Sequence] = deque()  # rows of a failed step, to run one by one until the culprit is found
        self._computing: dict[PartKey, int] = {}  # units of prompts in flight → last step that computes them
        self._tables: list[tuple[int, int, int]] = []  # block table entries to send with the next plan
        self._starved = False  # a waiting sequence found no blocks at the last plan
        self._arrivals = 0
        self._step = 0
        self._counters = dict.fromkeys(
            (
                "steps",
                "prefill_tokens",
                "decode_tokens",
                "cached_tokens",
                "copied_blocks",
                "preemptions",
                "step_errors",
            ),
            0.0,
        )

    # --- sequences come and go ------------------------------------------------------------------------------------

    def add(self, work: Work, *, prefill_only: bool = False) -> None:
        """Queue ``work`` for local compute. ``prefill_only`` (P): it ends with its first token, its blocks stay until ``release``.

        Raises CannotFit if it can never run here or the queue is full, ValueError if the key is known.
        """
        sequence = self._new_sequence(work, prefill_only)
        if len(self._waiting) >= self.limits.max_num_waiting:
            raise CannotFit(f"{len(self._waiting)} sequences are waiting, the limit is {self.limits.max_num_waiting}")
        self._sequences[sequence.key] = sequence
        self._waiting.append(sequence)

    def reserve(self, work: Work) -> Reservation | None:
        """D: take blocks for all of ``work.token_ids`` and keep room for its expected growth; None if that is too much now.

        The caller writes KV of positions ``cached_tokens``.. into the blocks, then calls ``activate`` (or ``cancel``, once
        nothing writes any more). Raises CannotFit and ValueError as ``add``.
        """
        sequence = self._new_sequence(work, False)
        if self._num_seated() >= self.limits.num_seats or (self._starved and self._waiting):
            return None
        length = len(sequence.token_ids)
        matched = self._space.match(sequence, length)
        if not self._admit(sequence, matched):
            return None
        sequence.state = SequenceState.RESERVED
        sequence.cached_tokens = sequence.num_computed = len(matched) * self.limits.block_size
        self._sequences[sequence.key] = self._reserved[sequence.key] = sequence
        return Reservation(sequence.key, sequence.cached_tokens, list(sequence.blocks))

    def activate(self, key: SequenceKey, first_token: SampledToken) -> list[SequenceUpdate]:
        """D: KV of all the work's tokens is in the blocks; ``first_token`` was drawn and reported by P.

        The sequence becomes runnable and its blocks join the prefix cache. If the first token ends it, the one update
        returned says so (without tokens). Raises KeyError if ``key`` holds no reservation.
        """
        sequence = self._reserved.pop(key)
        sequence.state = RUNNING
        length = len(sequence.token_ids)
        sequence.num_computed = sequence.num_planned = sequence.prefill_end = length
        self._space.publish(sequence)
        self._ready[key] = sequence
        finish = sequence.append(first_token.token_id)
        if finish is None:
            return []
        update = SequenceUpdate(key, sequence.num_outputs, [], finish, sequence.cached_tokens, num_computed=length)
        update.block_table = list(sequence.blocks) if sequence.capture else None
        self._end(sequence)
        return [update]

    def cancel(self, key: SequenceKey) -> None:
        """Stop and free in any state; unknown keys are ignored. A reservation's blocks must have no writer any more."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence)

    def release(self, key: SequenceKey) -> None:
        """P: the KV of a ``prefill_only`` sequence is needed no longer. Idempotent; other sequences are left alone."""
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.prefill_only:
            self._end(sequence)

    # --- steps ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute (now: a step in flight may change that)."""
        if len(self._flights) > 1:
            raise RuntimeError("two steps are in flight already")
        while self._trial and self._trial[0].state is not RUNNING:
            self._trial.popleft()
        solo = self._trial[0] if self._trial else None
        if solo is not None and self._flights:
            return None
        self._seat_ready()
        if not self._make_room():
            return None
        plan = StepPlan(self._step + 1, [])
        flight = _Flight(plan.step, plan.rows, [], [])
        self._plan_decodes(plan, flight, solo)
        self._plan_prefills(plan, flight, solo)
        if solo is None:
            self._plan_waiting(plan, flight)
        if not plan.rows:
            return None
        self._step = plan.step
        plan.released = self._slots.take_released()
        plan.new_blocks, self._tables = self._tables, []
        self._flights.append(flight)
        return plan

    def _plan_decodes(self, plan: StepPlan, flight: _Flight, solo: Sequence | None) -> None:
        rows, sequences = plan.rows, flight.sequences
        for sequence in self._decoding.values():
            position = sequence.num_planned
            if position >= sequence.stop_at or (solo is not None and sequence is not solo):
                continue
            if position >= sequence.capacity:
                self._tables.append((sequence.slot, len(sequence.blocks), self._space.grow(sequence)))
            if not sequence.bound:
                self._bind(sequence, plan)
            sequence.num_planned = position + 1
            rows.append(StepRow(sequence.slot, position, 1, None, True))
            sequences.append(sequence)
        plan.num_tokens = len(rows)

    def _plan_prefills(self, plan: StepPlan, flight: _Flight, solo: Sequence | None) -> None:
        for sequence in sorted(self._prefilling.values(), key=_arrival):
            if plan.num_tokens >= self.limits.max_num_batched_tokens:
                return
            if solo is None or sequence is solo:
                self._skip_cached(sequence)
                if not self._is_computed_elsewhere(sequence, sequence.num_planned):
                    self._plan_chunk(sequence, plan, flight)

    def _plan_waiting(self, plan: StepPlan, flight: _Flight) -> None:
        """Seat waiting sequences in order of arrival; one that waits for another's prefix lets the next go first."""
        self._starved = False
        admitted: set[Sequence] = set()
        for sequence in self._waiting:
            if plan.num_tokens >= self.limits.max_num_batched_tokens:
                break
            if self._num_seated() >= self.limits.num_seats or not self._slots.num_free:
                break
            if sequence.waits_for is not None and sequence.waits_for in self._computing:
                continue
            matched = self._space.match(sequence, len(sequence.token_ids) - 1)
            position = len(matched) * self.limits.block_size
            if self._is_computed_elsewhere(sequence, position):
                continue
            if not self._admit(sequence, matched):
                self._starved = True
                break
            admitted.add(sequence)
            sequence.state = RUNNING
            sequence.prefill_end = len(sequence.token_ids)
            sequence.num_computed = sequence.num_planned = position
            self._count_cached(sequence, 0, position)
            self._take_slot(sequence)
            self._prefilling[sequence.key] = sequence
            self._plan_chunk(sequence, plan, flight)
        if admitted:
            self._waiting = [sequence for sequence in self._waiting if sequence not in admitted]

    def _plan_chunk(self, sequence: Sequence, plan: StepPlan, flight: _Flight) -> None:
        """Add the sequence's next prefill row; a cut chunk ends at a block's end where it can."""
        size = self.limits.block_size
        start, end = sequence.num_planned, sequence.prefill_end
        if start % size == 0 and (source := self._space.copy_source(sequence, start, end - 1)) is not None:
            block, copied = source
            self._space.pool.acquire(block)  # so that nothing takes it before the step has copied it
            self._space.pool.release((block,), plan.step)
            plan.block_copies.append((block, sequence.blocks[start // size]))
            self._counters["copied_blocks"] += 1
            self._count_cached(sequence, start, start + copied)
            start += copied
        count = min(end - start, self.limits.max_num_batched_tokens - plan.num_tokens)
        if start + count < end and (start + count) // size * size > start:
            count = (start + count) // size * size - start
        if not sequence.bound:
            self._bind(sequence, plan)
        sequence.num_planned = start + count
        last = sequence.num_planned == end
        plan.rows.append(StepRow(sequence.slot, start, count, sequence.token_ids[start : start + count], last))
        plan.num_tokens += count
        flight.sequences.append(sequence)
        for position in range(start // size * size, start + count, UNIT_TOKENS):
            part = sequence.part_at(position)
            self._computing[part] = plan.step
            flight.parts.append(part)
        if last:
            self._decoding[sequence.key] = self._prefilling.pop(sequence.key)

    def _skip_cached(self, sequence: Sequence) -> None:
        """At a block's start: continue behind the blocks that others have published meanwhile."""
        size = self.limits.block_size
        start = sequence.num_planned
        while sequence.num_planned % size == 0 and sequence.num_planned + size < sequence.prefill_end:
            index = sequence.num_planned // size
            block = self._space.cached_block(sequence, index)
            if block is None:
                break
            self._space.adopt(sequence, index, block, self._last_step())
            self._tables.append((sequence.slot, index, block))
            sequence.num_planned += size
        self._count_cached(sequence, start, sequence.num_planned)

    def _is_computed_elsewhere(self, sequence: Sequence, position: int) -> bool:
        """Another sequence's row, in this step or in flight, computes what comes next here: waiting is cheaper than computing."""
        if position % self.limits.block_size or len(sequence.token_ids) - position < 2:
            return False
        part = sequence.part_at(position)
        sequence.waits_for = part if part in self._computing else None
        return sequence.waits_for is not None

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Take the result of the oldest step in flight; one update a sequence that drew tokens, ended or failed.

        Raises ValueError if the result is not of that step's shape.
        """
        if not self._flights or self._flights[0].step != result.step:
            raise ValueError(f"step {result.step} is not the oldest step in flight")
        flight = self._flights.popleft()
        computing = self._computing
        for part in flight.parts:
            if computing.get(part) == flight.step:
                del computing[part]
        updates: list[SequenceUpdate] = []
        self._counters["steps"] += 1
        if flight.void:
            pass
        elif result.error is not None:
            updates = self._roll_back(flight, result.error, set(result.failed_slots))
        else:
            self._take_tokens(flight, result, updates)
            if self._trial and flight.sequences == [self._trial[0]]:
                self._trial.popleft()
        self._space.pool.settle(flight.step)
        self._slots.settle(flight.step)
        return updates

    def _take_tokens(self, flight: _Flight, result: StepResult, updates: list[SequenceUpdate]) -> None:
        size = self.limits.block_size
        drawn, digests = result.tokens, result.logit_digests
        if len(drawn) != sum([row.sample for row in flight.rows]):
            raise ValueError(f"step {result.step} drew {len(drawn)} rows of {sum(row.sample for row in flight.rows)}")
        index = -1
        for row, sequence in zip(flight.rows, flight.sequences, strict=True):
            if row.sample:
                index += 1
            if sequence.state is not RUNNING:
                continue
            computed = sequence.num_computed = row.start + row.count
            if computed // size > sequence.num_published:
                self._space.publish(sequence)
            if not row.sample:
                continue
            (token,) = drawn[index]
            position = len(sequence.token_ids) - sequence.num_prompt
            finish = sequence.append(token.token_id)
            update = SequenceUpdate(sequence.key, position, [token], finish, 0, None, None, computed)
            if not sequence.reported:
                sequence.reported = True
                update.cached_tokens = sequence.cached_tokens
            if sequence.capture and digests is not None:
                update.logit_digests = [digests[index]]
            updates.append(update)
            if finish is not None or sequence.prefill_only:
                update.block_table = list(sequence.blocks) if sequence.capture else None
                self._hold(sequence) if sequence.prefill_only else self._end(sequence)
            elif row.token_ids is not None:
                self._space.list_tail(sequence)
        self._counters["decode_tokens"] += sum([row.token_ids is None for row in flight.rows])
        self._counters["prefill_tokens"] += sum([row.count for row in flight.rows if row.token_ids is not None])

    def _roll_back(self, flight: _Flight, error: str, blamed_slots: set[int]) -> list[SequenceUpdate]:
        """A step raised: fail the sequences to blame, take every other one back to what is known to be computed.

        Without a blamed slot the step's rows run one by one until each has passed or failed alone.
        """
        self._counters["step_errors"] += 1
        for later in self._flights:
            later.void = True
        self._computing.clear()
        blamed = [s for row, s in zip(flight.rows, flight.sequences, strict=True) if row.slot in blamed_slots]
        if len(flight.rows) == 1:
            blamed = flight.sequences
        updates = []
        for sequence in blamed:
            if sequence.state is RUNNING:
                updates.append(SequenceUpdate(sequence.key, sequence.num_outputs, [], failed=error))
                self._end(sequence)
        for sequence in [*self._prefilling.values(), *self._decoding.values()]:
            sequence.num_planned = sequence.num_computed
            sequence.bound = False
            if sequence.num_computed < sequence.prefill_end and sequence.key in self._decoding:
                self._prefilling[sequence.key] = self._decoding.pop(sequence.key)
        if not blamed:
            self._trial = deque(sequence for sequence in flight.sequences if sequence.state is RUNNING)
        return updates

    # --- seats, slots and blocks ------------------------------------------------------------------------------------

    def _new_sequence(self, work: Work, prefill_only: bool) -> Sequence:
        sequence = sequence_of(work, self.limits, self._namespace, self._arrivals, prefill_only)
        if sequence.key in self._sequences:
            raise ValueError(f"{sequence.key} is known already")
        self._arrivals += 1
        return sequence

    def _num_seated(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._ready) + len(self._reserved)

    def _admit(self, sequence: Sequence, matched: list[int]) -> bool:
        """Give the sequence blocks for its present tokens if its expected growth and that of all others would fit too.

        A sequence alone is admitted without regard to growth: nothing else will make room for it.
        """
        limits, space = self.limits, self._space
        length = len(sequence.token_ids)
        num_blocks = limits.blocks_for(length)
        target = limits.blocks_for(max(length, min(sequence.stop_at, length + limits.growth_tokens)))
        needed = space.cost(matched, num_blocks)
        others = [*self._prefilling.values(), *self._decoding.values(), *self._ready.values(), *self._reserved.values()]
        if others:
            needed += target - num_blocks + sum([max(0, s.target_blocks - len(s.blocks)) for s in others])
        if needed > space.pool.available:
            return False
        space.seat(sequence, matched, num_blocks)
        sequence.target_blocks = target
        return True

    def _make_room(self) -> bool:
        """Preempt until every decode row has its block. False if that has to wait for the step in flight."""
        while True:
            short = sum([s.num_planned >= s.capacity and s.num_planned < s.stop_at for s in self._decoding.values()])
            if short <= self._space.pool.available:
                return True
            if self._flights:
                return False
            running = [*self._prefilling.values(), *self._decoding.values(), *self._ready.values()]
            self._preempt(max(running, key=_arrival))

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._space.free(sequence, 0)
        sequence.high_water = max(sequence.high_water, sequence.num_computed)
        sequence.num_computed = sequence.num_planned = 0
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_arrival)
        self._counters["preemptions"] += 1

    def _hold(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.state = SequenceState.HELD

    def _end(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._space.free(sequence, self._last_step())
        sequence.state = SequenceState.DONE
        del self._sequences[sequence.key]

    def _leave(self, sequence: Sequence) -> None:
        """Out of whichever queue holds it; its slot is given back."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        for queue in (self._prefilling, self._decoding, self._ready, self._reserved):
            queue.pop(sequence.key, None)
        if sequence.slot >= 0:
            self._slots.give_back(sequence.slot, self._last_step())
            sequence.slot = -1
        sequence.bound = False

    def _last_step(self) -> int:
        """The newest step in flight; 0 if there is none."""
        return self._flights[-1].step if self._flights else 0

    def _seat_ready(self) -> None:
        while self._ready and self._slots.num_free:
            sequence = self._ready.pop(next(iter(self._ready)))
            self._take_slot(sequence)
            self._decoding[sequence.key] = sequence

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.take(sequence.key)

    def _bind(self, sequence: Sequence, plan: StepPlan) -> None:
        """The plan tells the runner everything about the sequence's slot."""
        prompt, outputs = sequence.token_ids[: sequence.num_prompt], sequence.token_ids[sequence.num_prompt :]
        slot = sequence.slot
        plan.bound.append(SlotBinding(slot, sequence.params, sequence.key.choice, prompt, outputs, sequence.capture))
        self._tables += [(slot, index, block) for index, block in enumerate(sequence.blocks)]
        sequence.bound = True

    def _count_cached(self, sequence: Sequence, start: int, stop: int) -> None:
        """Positions start..stop-1 need no computing; those computed here before a preemption are no cache hits."""
        new = stop - max(start, sequence.high_water)
        if new > 0 and not sequence.reported:
            sequence.high_water = stop
            sequence.cached_tokens += new
            self._counters["cached_tokens"] += new

    # --- views ------------------------------------------------------------------------------------------------------

    def key_of_slot(self, slot: int) -> SequenceKey:
        """Whose rows name ``slot`` in the steps in flight."""
        return self._slots.key(slot)

    def block_table(self, key: SequenceKey) -> list[int]:
        """The blocks of a sequence that holds some, in order. Raises KeyError for an unknown key."""
        return list(self._sequences[key].blocks)

    def has_work(self) -> bool:
        """There is something to compute or a result to wait for."""
        return bool(self._waiting or self._prefilling or self._decoding or self._ready or self._flights)

    def load(self) -> Load:
        """What is held and queued; ``counters`` only grow."""
        return Load(
            kv_used=self._space.pool.num_used,
            kv_total=self.limits.num_blocks,
            running=len(self._prefilling) + len(self._decoding) + len(self._ready),
            waiting=len(self._waiting),
            waiting_tokens=sum(len(s.token_ids) for s in self._waiting)
            + sum(s.prefill_end - s.num_planned for s in self._prefilling.values()),
            counters=dict(self._counters),
        )

    def cache_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(added, removed) prefix-cache unit hashes since the last call."""
        return self._space.cache.changes()

    def cached_units(self) -> list[bytes]:
        """All unit hashes in the prefix cache, to reset a router that lost count."""
        return self._space.cache.unit_hashes()

    def check(self) -> None:
        """Assert the invariants: every sequence is in one place, slots and blocks have exactly their holders (I8, I9)."""
        places = [*self._waiting, *self._prefilling.values(), *self._decoding.values()]
        places += [*self._ready.values(), *self._reserved.values()]
        held = [s for s in self._sequences.values() if s.state is SequenceState.HELD]
        assert len(places) + len(held) == len(set(places) | set(held)) == len(self._sequences), (
            "a sequence is lost or doubled"
        )
        assert all(self._sequences[s.key] is s for s in places), "a queue holds an ended sequence"
        assert all(s.state is SequenceState.WAITING and not s.blocks for s in self._waiting)
        assert [s.arrival for s in self._waiting] == sorted(s.arrival for s in self._waiting), "waiting is out of order"
        assert all(s.state is RUNNING and s.slot >= 0 for s in [*self._prefilling.values(), *self._decoding.values()])
        assert self._num_seated() <= self.limits.num_seats
        assert len(self._flights) <= 2
        for s in self._sequences.values():
            assert s.num_computed <= s.num_planned or s.state is SequenceState.RESERVED
            assert s.num_planned <= s.capacity
            assert s.num_planned <= len(s.token_ids) + len(self._flights)
            if s.state is RUNNING and not self._flights:
                assert s.num_computed == s.num_planned or s.key in self._prefilling, "a planned row has no step"
        self._slots.check([s.slot for s in self._sequences.values() if s.slot >= 0])
        self._space.check(s for s in self._sequences.values() if s.blocks)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
