"""Which rows of a step are streamed: positions of P's prompts, announced to their transfers once each."""

import numpy as np

from relay.engine.scheduler import Scheduler
from relay.worker.commands import SinkRow
from relay.worker.held import HeldState
from relay.worker.table import HeldTable


class Announcer:
    """Finds the sequence behind a step's row and remembers how far it has been announced."""

    def __init__(self, scheduler: Scheduler, held: HeldTable) -> None:
        self._scheduler = scheduler
        self._held = held

    def sink(self, slot: int, start: int, count: int) -> SinkRow | None:
        """What the row at ``slot`` means to a transfer; None for rows that stay here."""
        held = self._held.by_slot.get(slot)
        if held is None:
            held = self._held.by_key.get(self._scheduler.key_of_slot(slot))
            if held is None or held.state is not HeldState.PREFILLING:
                return None
            held.slot = slot
            self._held.by_slot[slot] = held
        end = start + count
        if held.transfer is None or end <= held.announced:
            return None
        table = np.array(self._scheduler.block_table(held.key), np.int32)
        gap = held.announced
        first = max(start, gap)
        held.announced = end
        return SinkRow(held.transfer, gap, first, end - first, table)

    def start_over(self) -> None:
        """A step raised: what it did not reach comes again; known ranges are ignored."""
        for held in self._held.by_slot.values():
            held.announced = 0

    def preempted(self, released: list[int]) -> list[int]:
        """Slots that were taken away: a prompt that lost its slot before its first token lost its blocks too, and will be
        computed and announced anew. Returns the transfers that must forget what they have not sent."""
        transfers = []
        for slot in released:
            held = self._held.by_slot.pop(slot, None)
            if held is not None and held.state is HeldState.PREFILLING and held.transfer is not None:
                held.slot = None
                held.announced = 0
                transfers.append(held.transfer)
        return transfers
