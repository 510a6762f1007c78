"""When things happened: wrappers that write down the times of copies and of a prompt's layers, and change nothing."""

import threading
import time
from typing import NamedTuple

import numpy as np

from relay.kernels.backend import Backend, Batch, LayerSink
from relay.kernels.kv_frames import Heads
from relay.kernels.program import Program, SelectRows


class Copy(NamedTuple):
    """One copy between blocks and a frame; times of CLOCK_MONOTONIC, which all processes of a host share."""

    layer: int
    first: int
    start_ns: int
    end_ns: int


class StampedStore:
    """A fused store that remembers its copies."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.reads: list[Copy] = []
        self.writes: list[Copy] = []
        for name in ("read_kv_crc", "write_kv_crc"):
            if not hasattr(backend, name):
                raise TypeError(f"{type(backend).__name__} has no {name}")

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        self.read_kv_crc(layer, block_table, first, count, out, heads)

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        self.write_kv_crc(layer, block_table, first, count, data, heads)

    def read_kv_crc(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> int:
        start_ns = time.monotonic_ns()
        move = self._backend.read_kv_crc  # type: ignore[attr-defined]
        checksum: int = move(layer, block_table, first, count, out, heads)
        self.reads.append(Copy(layer, first, start_ns, time.monotonic_ns()))
        return checksum

    def write_kv_crc(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> int:
        start_ns = time.monotonic_ns()
        move = self._backend.write_kv_crc  # type: ignore[attr-defined]
        checksum: int = move(layer, block_table, first, count, data, heads)
        self.writes.append(Copy(layer, first, start_ns, time.monotonic_ns()))
        return checksum


def transfer_cpu_s() -> float:
    """Processor time of this process's transfer threads since they began; those that ended do not count."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("kv-") and thread.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))


class LayerStamps:
    """Watches a backend: ``last_layer_ns`` is when the last layer of the latest step ended, before the head begins."""

    def __init__(self, backend: Backend, program: Program) -> None:
        self._run = backend.run
        self._head = next(index for index, op in enumerate(program.ops) if isinstance(op, SelectRows))
        self.last_layer_ns = 0
        backend.run = self.run  # type: ignore[method-assign]

    def run(self, start: int, stop: int, batch: Batch) -> None:
        if start < self._head < stop:
            self._run(start, self._head, batch)
            self.last_layer_ns = time.monotonic_ns()
            self._run(self._head, stop, batch)
        else:
            self._run(start, stop, batch)


class StampedSink:
    """A layer sink that remembers when each layer of each step was announced."""

    def __init__(self, inner: LayerSink | None) -> None:
        self._inner = inner
        self.written_ns: list[tuple[int, int]] = []  # (layer, time)

    def layer_written(self, layer: int, row: int) -> None:
        self.written_ns.append((layer, time.monotonic_ns()))
        if self._inner is not None:
            self._inner.layer_written(layer, row)
