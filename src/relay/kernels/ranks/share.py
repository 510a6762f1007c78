"""One rank's share of a CPU worker: the C kernels between meetings."""

import mmap
from typing import Protocol

import numpy as np

from relay.kernels.backend import Batch, QueueingBackend
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import Buffer, Program
from relay.kernels.ranks.exchange import Exchange
from relay.kernels.ranks.split import RankProgram, Sum, split_program
from relay.kernels.ranks.weights import RankWeights
from relay.kernels.weights import WeightSource

PAGE = mmap.PAGESIZE


def pool_bytes(num_blocks: int, block_size: int, layers: int, kv_width: int, dtype: str) -> int:
    """Bytes of a rank's KV pool, rounded up to pages."""
    size = num_blocks * layers * 2 * block_size * kv_width * (4 if dtype == "float32" else 2)
    return -(-size // PAGE) * PAGE


class Share(Protocol):
    """One rank's part of a worker, whatever computes it: the calls of a ``Backend`` that differ with ranks, made by every rank in
    the same order as those of ``backend`` itself, which is a whole one of this part.
    """

    @property
    def backend(self) -> CpuBackend | QueueingBackend: ...

    def load(self, program: Program, weights: WeightSource) -> None: ...

    def handle(self) -> bytes:
        """What the other ranks need to know of this one before they meet; after ``load``."""
        ...

    def connect(self, handles: list[bytes]) -> None:
        """``handles`` of all ranks, by rank."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str, memory: int, offset: int) -> bytes:
        """What rank 0 needs in order to map this rank's pool."""
        ...

    def run(self, start: int, stop: int, batch: Batch) -> None: ...


class RankShare:
    """Makes the calls of a ``Backend`` on its part of the model, and meets the other ranks where the program says.

    Every rank draws every token itself, from the same logits, so their slots stay equal.
    """

    def __init__(self, backend: CpuBackend, exchange: Exchange, ranks: int, rank: int) -> None:
        self.backend, self.exchange = backend, exchange
        self._ranks, self._rank = ranks, rank
        self.part: RankProgram
        self._runs = 0

    def load(self, program: Program, weights: WeightSource) -> None:
        self.part = split_program(program, self._ranks, self._rank)
        self._sums = {
            index: weights.vector(meeting.bias)
            for index, meeting in self.part.meetings.items()
            if isinstance(meeting, Sum) and meeting.bias is not None
        }
        self._stops = sorted(self.part.meetings)
        self.backend.load(self.part.program, RankWeights(weights, self.part.cuts))

    def handle(self) -> bytes:
        return b""

    def connect(self, handles: list[bytes]) -> None:
        """Ranks of one machine's processors met when they were started."""

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str, memory: int, offset: int) -> bytes:
        """The pool lies at ``offset`` of the memfd ``memory``, which rank 0 maps anyway."""
        g = self.part.program.geometry
        size = pool_bytes(num_blocks, block_size, g.num_layers, g.kv_width, dtype)
        mapped = np.frombuffer(mmap.mmap(memory, size, offset=offset), np.uint8)
        self.backend.allocate_kv(num_blocks, block_size, dtype, memory=mapped)
        return b""

    def run(self, start: int, stop: int, batch: Batch) -> None:
        """Ops [start, stop) with the meetings among them; returns when every rank has come to the end.

        A batch that does not fit raises before the first meeting, on every rank alike.
        """
        self._runs += 1
        at = start
        if start == stop:
            self.backend.run(start, stop, batch)  # checks the batch
        for index in self._stops:
            if start <= index < stop:
                self.backend.run(at, index + 1, batch)
                self._meet(index, batch)
                at = index + 1
        if at < stop:
            self.backend.run(at, stop, batch)
        self.exchange.wait()

    def _meet(self, index: int, batch: Batch) -> None:
        meeting = self.part.meetings[index]
        self.exchange.name = (self._runs, index)
        if isinstance(meeting, Sum):
            rows = len(batch.token_ids)
            total = self.exchange.sum(self.backend.buffer(meeting.src)[:rows])
            if index in self._sums:
                total = total + self._sums[index]
            x = self.backend.buffer(Buffer.X)[:rows]
            np.add(x, total, out=x)
            return
        first, last = meeting.parts[self._rank]
        logits = self.backend.buffer(Buffer.L)[: len(batch.sampled_rows)]
        self.exchange.gather(logits[:, : last - first], meeting.parts, logits)
