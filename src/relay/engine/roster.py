"""Where every sequence of an engine is: one queue a state, and the slots of the running ones."""

from bisect import insort
from dataclasses import dataclass, fields

from relay.engine.limits import SchedulerLimits
from relay.engine.sequence import Sequence, SequenceState
from relay.engine.slots import Slots
from relay.ids import SequenceKey

RUNNING = SequenceState.RUNNING


@dataclass(slots=True)
class Counters:
    """What the scheduler has done so far; they only grow."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    copied_blocks: int = 0
    preemptions: int = 0
    step_errors: int = 0

    def as_dict(self) -> dict[str, float]:
        return {name: float(getattr(self, name)) for name in _COUNTERS}


_COUNTERS = tuple([field.name for field in fields(Counters)])


class Roster:
    """All sequences that have not ended. A *seated* one holds blocks and, when it runs, a slot; seats are bounded."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._num_seats = limits.num_seats
        self.slots = Slots(limits.max_num_seqs)
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.waiting: list[Sequence] = []  # by arrival
        self.prefilling: dict[SequenceKey, Sequence] = {}
        self.decoding: dict[SequenceKey, Sequence] = {}
        self.ready: dict[SequenceKey, Sequence] = {}  # activated, without a slot yet
        self.reserved: dict[SequenceKey, Sequence] = {}

    @property
    def num_seated(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.ready) + len(self.reserved)

    @property
    def has_seat(self) -> bool:
        return self.num_seated < self._num_seats

    def seated(self) -> list[Sequence]:
        return [*self.running(), *self.reserved.values()]

    def running(self) -> list[Sequence]:
        return [*self.prefilling.values(), *self.decoding.values(), *self.ready.values()]

    def prefilling_by_arrival(self) -> list[Sequence]:
        return sorted(self.prefilling.values(), key=_arrival)

    def youngest_running(self) -> Sequence:
        return max(self.running(), key=_arrival)

    def queue(self, sequence: Sequence) -> None:
        """Into the waiting queue, at its place by arrival."""
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_arrival)

    def start_prefill(self, sequence: Sequence) -> None:
        """The caller takes it from ``waiting``. Raises IndexError without a free slot."""
        sequence.state = RUNNING
        sequence.slot = self.slots.take(sequence.key)
        self.prefilling[sequence.key] = sequence

    def seat_ready(self) -> None:
        """Give slots to activated sequences, as far as there are any."""
        while self.ready and self.slots.num_free:
            sequence = self.ready.pop(next(iter(self.ready)))
            sequence.slot = self.slots.take(sequence.key)
            self.decoding[sequence.key] = sequence

    def leave(self, sequence: Sequence, state: SequenceState, last_step: int) -> None:
        """Out of its queue; its slot returns after ``last_step`` (0: now). A DONE sequence is forgotten."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        for queue in (self.prefilling, self.decoding, self.ready, self.reserved):
            queue.pop(sequence.key, None)
        if sequence.slot >= 0:
            self.slots.give_back(sequence.slot, last_step)
            sequence.slot = -1
        sequence.bound = False
        sequence.state = state
        if state is SequenceState.DONE:
            del self.sequences[sequence.key]

    def check(self) -> None:
        """Assert that every sequence is in exactly the place its state says, and slots have exactly their holders."""
        sequences, waiting, reserved = self.sequences, self.waiting, self.reserved
        running = self.running()
        places = [*waiting, *running, *reserved.values()]
        if not places and not sequences:
            self.slots.check([])
            return
        held = [s for s in sequences.values() if s.state is SequenceState.HELD]
        assert len(places) + len(held) == len({*places, *held}) == len(sequences), "a sequence is lost or doubled"
        assert not [s for s in places if sequences[s.key] is not s], "a queue holds an ended sequence"
        if waiting:
            busy = [s for s in waiting if s.blocks or s.state is not SequenceState.WAITING]
            assert not busy, "a waiting sequence is not idle"
            arrivals = [s.arrival for s in waiting]
            assert arrivals == sorted(arrivals), "waiting is out of order"
        for s in running:
            assert s.state is RUNNING, "a running sequence is not running"
            assert s.blocks, "a running sequence has no blocks"
            assert s.slot >= 0 or s.key in self.ready, "a running sequence has no slot"
        unreserved = [s for s in reserved.values() if s.state is not SequenceState.RESERVED]
        assert not unreserved, "a reservation is not reserved"
        assert self.num_seated <= self._num_seats, "more sequences than seats"
        self.slots.check([s.slot for s in sequences.values() if s.slot >= 0])


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
