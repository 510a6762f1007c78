"""Where the ranks of one worker meet on a CPU: shared memory for what they exchange, eventfds to wait for each other.

Memory is a memfd and waiting is a semaphore a pair of ranks, both passed by descriptor, so nothing outlives the processes and a
waiting rank sleeps. Each meeting uses the other of two areas than the one before. One wait a meeting is then enough: whoever
writes an area again has seen everybody arrive at the meeting in between, and so leave the one that read it.

Everybody also brings the name of the meeting they think it is. Ranks that differ have failed differently and must not add.
"""

import mmap
import os
from dataclasses import dataclass

import numpy as np

from relay.errors import DeviceLostError
from relay.kernels.ranks.split import Range, fold

AREAS = 2
HEADER = 16  # floats before what a rank brings: the meeting's name, as two int64


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Descriptors of one worker's exchange: ``bells[i][j]`` is rung by rank i and waited for by rank j."""

    ranks: int
    floats: int  # of one rank's area
    memory: int
    bells: tuple[tuple[int, ...], ...]

    @classmethod
    def create(cls, ranks: int, floats: int) -> "MeetingPlace":
        memory = os.memfd_create("relay-ranks")
        floats = -(-floats // HEADER) * HEADER + HEADER
        os.ftruncate(memory, AREAS * ranks * floats * 4)
        flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        bells = tuple(tuple(os.eventfd(0, flags) for _ in range(ranks)) for _ in range(ranks))
        return cls(ranks, floats, memory, bells)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.memory, *(bell for row in self.bells for bell in row))

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class Exchange:
    """One rank's end. Every rank must make the same calls in the same order; each returns when all have arrived."""

    def __init__(self, place: MeetingPlace, rank: int) -> None:
        self._place, self._rank = place, rank
        self._others = [other for other in range(place.ranks) if other != rank]
        memory = mmap.mmap(place.memory, AREAS * place.ranks * place.floats * 4)
        areas = np.frombuffer(memory, np.float32).reshape(AREAS, place.ranks, place.floats)
        self._areas, self._names = areas[:, :, HEADER:], areas[:, :, :4].view(np.int64)
        self.name = (0, 0)  # of the next meeting: (call, op)
        self._area = 0
        self.meetings = 0
        self.bytes_brought = 0

    def sum(self, partial: np.ndarray) -> np.ndarray:
        """The canonical sum of every rank's float32 [rows, width] ``partial``: the same bits for each of them."""
        parts = self._bring(partial)
        return fold([part[: partial.size].reshape(partial.shape) for part in parts])

    def gather(self, own: np.ndarray, parts: tuple[Range, ...], whole: np.ndarray) -> None:
        """Put every rank's float32 [rows, columns of its part] into its columns of ``whole`` [rows, all]."""
        rows = len(whole)
        for (first, last), brought in zip(parts, self._bring(own), strict=True):
            whole[:, first:last] = brought[: rows * (last - first)].reshape(rows, last - first)

    def wait(self) -> None:
        """Return when every rank has called this as often as we have."""
        for other in self._others:
            os.eventfd_write(self._place.bells[self._rank][other], 1)
        for other in self._others:
            os.eventfd_read(self._place.bells[other][self._rank])

    def _bring(self, values: np.ndarray) -> list[np.ndarray]:
        """Everybody's area once all have brought theirs; unchanged until the meeting after the next."""
        area, names = self._areas[self._area], self._names[self._area]
        self._area = (self._area + 1) % AREAS
        area[self._rank, : values.size].reshape(values.shape)[...] = values
        names[self._rank] = self.name
        self.meetings += 1
        self.bytes_brought += values.size * 4
        self.wait()
        if not (names == self.name).all():
            raise DeviceLostError(f"ranks met at different places: {names.tolist()}")
        return list(area)
