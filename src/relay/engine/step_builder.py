"""Builds the next step: decode rows first, then prefill chunks in order of arrival, then sequences that start."""

from dataclasses import dataclass

from relay.engine.admission import admit
from relay.engine.kv_space import KvSpace
from relay.engine.limits import SchedulerLimits
from relay.engine.roster import Counters, Roster
from relay.engine.sequence import PartKey, Sequence
from relay.engine.step import SlotBinding, StepPlan, StepRow
from relay.protocol.block_hash import UNIT_TOKENS


@dataclass(slots=True)
class Flight:
    """A planned step whose result is not known yet."""

    step: int
    rows: list[StepRow]
    sequences: list[Sequence]  # of the rows
    parts: list[PartKey]  # units of 16 tokens its prefill rows compute
    alone: bool = False  # of a suspect: nothing else may be in flight with it
    void: bool = False  # an earlier step failed: its result means nothing


class StepBuilder:
    """Turns the roster into rows. Of every unit of prompt tokens at most one sequence computes it at a time."""

    def __init__(self, limits: SchedulerLimits, roster: Roster, space: KvSpace, counters: Counters) -> None:
        self._limits = limits
        self._roster = roster
        self._space = space
        self._counters = counters
        self._computing: dict[PartKey, int] = {}  # units in flight → last step that computes them
        self._tables: list[tuple[int, int, int]] = []  # block table entries to send with the next plan
        self.starved = False  # a waiting sequence found no blocks at the last build

    def build(self, step: int, last_step: int, solo: Sequence | None = None) -> tuple[StepPlan, Flight] | None:
        """Step number ``step``, with ``last_step`` in flight (0: none). None without rows.

        Only the row of ``solo`` if given; without it none of those that want a step for themselves.

        The caller has made room: every decode row that needs a block finds one.
        """
        plan = StepPlan(step, [])
        flight = Flight(step, plan.rows, [], [])
        self._decodes(plan, flight, solo)
        self._prefills(plan, flight, solo, last_step)
        if solo is None or solo in self._roster.waiting:
            self._starts(plan, flight, solo)
        if not plan.rows:
            return None
        plan.released = self._roster.slots.take_released()
        plan.new_blocks, self._tables = self._tables, []
        return plan, flight

    def landed(self, flight: Flight) -> None:
        """The step's result is there: what it computed is in flight no longer."""
        computing = self._computing
        for part in flight.parts:
            if computing.get(part) == flight.step:
                del computing[part]

    def count_cached(self, sequence: Sequence, start: int, stop: int) -> None:
        """Positions start..stop-1 need no computing; those computed here before a preemption are no cache hits."""
        new = stop - max(start, sequence.high_water)
        if new > 0 and not sequence.reported:
            sequence.high_water = stop
            sequence.cached_tokens += new
            self._counters.cached_tokens += new

    def _decodes(self, plan: StepPlan, flight: Flight, solo: Sequence | None) -> None:
        rows, sequences = plan.rows, flight.sequences
        for sequence in self._roster.decoding.values():
            position = sequence.num_planned
            if position >= sequence.stop_at or (sequence is not solo and (solo is not None or sequence.alone)):
                continue
            if position >= sequence.capacity:
                self._tables.append((sequence.slot, len(sequence.blocks), self._space.grow(sequence)))
            if not sequence.bound:
                self._bind(sequence, plan)
            sequence.num_planned = position + 1
            rows.append(StepRow(sequence.slot, position, 1, None, True))
            sequences.append(sequence)
        plan.num_tokens = len(rows)

    def _prefills(self, plan: StepPlan, flight: Flight, solo: Sequence | None, last_step: int) -> None:
        for sequence in self._roster.prefilling_by_arrival():
            if plan.num_tokens >= self._limits.max_num_batched_tokens:
                return
            if sequence is solo or (solo is None and not sequence.alone):
                self._skip_cached(sequence, last_step)
                if not self._is_computed_elsewhere(sequence, sequence.num_planned):
                    self._chunk(sequence, plan, flight)

    def _starts(self, plan: StepPlan, flight: Flight, solo: Sequence | None) -> None:
        """Seat waiting sequences in order of arrival; one that waits for another's prefix lets the next go first."""
        roster, space, limits = self._roster, self._space, self._limits
        self.starved = False
        started: set[Sequence] = set()
        for sequence in roster.waiting if solo is None else [solo]:
            if solo is None and sequence.alone:
                if sequence.starved:
                    self.starved = True
                    break
                continue
            if plan.num_tokens >= limits.max_num_batched_tokens or not roster.has_seat or not roster.slots.num_free:
                break
            if sequence.waits_for is not None and sequence.waits_for in self._computing:
                continue
            matched = space.match(sequence, len(sequence.token_ids) - 1)
            position = len(matched) * limits.block_size
            if self._is_computed_elsewhere(sequence, position):
                continue
            sequence.starved = not admit(sequence, matched, roster, space, limits)
            if sequence.starved:
                self.starved = True
                break
            started.add(sequence)
            roster.start_prefill(sequence)
            sequence.prefill_end = len(sequence.token_ids)
            sequence.num_computed = sequence.num_planned = position
            self.count_cached(sequence, 0, position)
            self._chunk(sequence, plan, flight)
        if started:
            roster.waiting = [sequence for sequence in roster.waiting if sequence not in started]

    def _chunk(self, sequence: Sequence, plan: StepPlan, flight: Flight) -> None:
        """Add the sequence's next prefill row; a cut chunk ends at a block's end where it can."""
        size = self._limits.block_size
        end = sequence.prefill_end
        start = self._copy_start(sequence, plan)
        count = min(end - start, self._limits.max_num_batched_tokens - plan.num_tokens)
        if start + count < end and (start + count) // size * size > start:
            count = (start + count) // size * size - start
        count = self._space.own_tokens(sequence, start, count)
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
            self._roster.decoding[sequence.key] = self._roster.prefilling.pop(sequence.key)

    def _copy_start(self, sequence: Sequence, plan: StepPlan) -> int:
        """Where the next chunk starts: behind what can be copied from a block that begins with the same tokens."""
        start = sequence.num_planned
        size = self._limits.block_size
        source = None if start % size else self._space.copy_source(sequence, start, sequence.prefill_end - 1)
        if source is None:
            return start
        block, copied = source
        self._space.pool.acquire(block)  # nothing may take it before the step has copied it
        self._space.pool.release((block,), plan.step)
        plan.block_copies.append((block, sequence.blocks[start // size]))
        self._counters.copied_blocks += 1
        self.count_cached(sequence, start, start + copied)
        return start + copied

    def _skip_cached(self, sequence: Sequence, last_step: int) -> None:
        """At a block's start: continue behind the blocks that others have published meanwhile."""
        size = self._limits.block_size
        start = sequence.num_planned
        while sequence.num_planned % size == 0 and sequence.num_planned + size < sequence.prefill_end:
            index = sequence.num_planned // size
            block = self._space.cached_block(sequence, index)
            if block is None:
                break
            self._space.adopt(sequence, index, block, last_step)
            self._tables.append((sequence.slot, index, block))
            sequence.num_planned += size
        self.count_cached(sequence, start, sequence.num_planned)

    def _is_computed_elsewhere(self, sequence: Sequence, position: int) -> bool:
        """Another sequence's row, in this step or in flight, computes what comes next here: waiting is cheaper."""
        if position % self._limits.block_size or len(sequence.token_ids) - position < 2:
            return False
        part = sequence.part_at(position)
        sequence.waits_for = part if part in self._computing else None
        return sequence.waits_for is not None

    def _bind(self, sequence: Sequence, plan: StepPlan) -> None:
        """The plan tells the runner everything about the sequence's slot."""
        prompt, outputs = sequence.token_ids[: sequence.num_prompt], sequence.token_ids[sequence.num_prompt :]
        slot = sequence.slot
        plan.bound.append(SlotBinding(slot, sequence.params, sequence.key.choice, prompt, outputs, sequence.capture))
        self._tables += [(slot, index, block) for index, block in enumerate(sequence.blocks)]
        sequence.bound = True
