"""When K and V are in the cache: events that transfers wait for, instead of the steps that were queued since."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from relay.kernels.backend import Batch
from relay.kernels.kv_frames import KvRange

KEPT = 32  # steps whose events are kept; never are so many queued


class _Recorded(NamedTuple):
    """An event and when it was recorded, counted."""

    number: int
    event: torch.cuda.Event


class LayerEvents:
    """``at`` is the place in the program after which each layer's K and V are written (``Program.sink_points``).

    Each block remembers the last step that wrote to it, so a read waits for that step's write of the layer and for no later one.
    Where that step has not come to the layer yet, what is to be read was written before, and the layer's latest event covers it.
    With ``ranks``, ``at`` is where all of them have met since, so an event holds for the pools of all.
    """

    def __init__(self, at: tuple[int, ...], num_blocks: int, block_size: int, *, ranks: bool = False) -> None:
        self._at = at
        self._block_size = block_size
        self._step = 0
        self._step_of = np.zeros(num_blocks, np.int64)  # by block
        self._recorded = 0
        self._events: list[list[_Recorded | None]] = [[None] * len(at) for _ in range(KEPT)]
        self._latest: list[_Recorded | None] = [None] * len(at)
        self._copied: torch.cuda.Event | None = None
        self._ranks, self._copying = ranks, False

    def begin(self, batch: Batch) -> None:
        """A step is about to be queued."""
        self._step += 1
        self._events[self._step % KEPT] = [None] * len(self._at)
        rows = np.repeat(np.arange(len(batch.slots)), np.diff(batch.row_starts))
        self._step_of[batch.block_tables[rows, batch.positions // self._block_size]] = self._step

    def ran(self, start: int, stop: int) -> None:
        """Ops [start, stop) of the step were queued on the current stream."""
        layers = [layer for layer, point in enumerate(self._at) if start < point <= stop]
        if layers:
            event = torch.cuda.Event()
            event.record()
            self._recorded += 1
            if self._copying:
                self._copied, self._copying = event, False
            events = self._events[self._step % KEPT]
            for layer in layers:
                events[layer] = self._latest[layer] = _Recorded(self._recorded, event)

    def copied(self) -> None:
        """A block of every layer was copied on the current stream."""
        self._copied = torch.cuda.Event()
        self._copied.record()
        self._copying = self._ranks  # others may be late with it, but not behind where the ranks meet

    def of(self, ranges: Sequence[KvRange]) -> list[torch.cuda.Event]:
        """All passed once what was queued for ``ranges`` is in the cache. Steps are queued on one stream, so of the events of
        several layers and frames the one recorded last covers the others."""
        steps: dict[
            tuple[int, int, int], int
        ] = {}  # by positions: frames of a launch are mostly other layers of the same ones
        last: _Recorded | None = None
        for one in ranges:
            positions = (id(one.block_table), one.first, one.count)
            step = steps.get(positions)
            if step is None:
                begin, end = one.first // self._block_size, (one.first + one.count - 1) // self._block_size + 1
                step = steps[positions] = int(self._step_of[one.block_table[begin:end]].max(initial=0))
            if step <= self._step - KEPT:
                continue
            of_step = self._events[step % KEPT]
            for layer in range(one.layer, one.layer + one.layers):
                known = of_step[layer] or self._latest[layer]
                if known is not None and (last is None or known.number > last.number):
                    last = known
        return [event for event in (last and last.event, self._copied) if event is not None]
