"""Decode steps as CUDA graphs: one a (batch size, splits, whether it draws itself), captured on first use or before.

The graphs that draw serve steps of plain rows; other steps replay one that ends with the logits and launch their sampler.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from relay.kernels.backend import Batch
from relay.kernels.cuda.attention_decode import split_count
from relay.kernels.cuda.step import Layout, Shape, Step, fill

if TYPE_CHECKING:
    from relay.kernels.cuda.backend import CudaBackend

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(slots=True)
class _Captured:
    layout: Layout
    buffer: torch.Tensor  # the packed integers the graph reads
    step: Step
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Replays the step of the smallest captured size that holds the batch. All graphs share one memory pool."""

    def __init__(self, backend: "CudaBackend", max_rows: int) -> None:
        self._backend = backend
        self._sizes = [size for size in SIZES if size < max_rows] + [max_rows]
        self._graphs: dict[tuple[int, int, bool], _Captured] = {}
        self._pool: Any = None

    def forget(self) -> None:
        """Drop all graphs: buffers they point at are about to move."""
        self._graphs.clear()

    def warm_up(self, longest: int) -> None:
        """Capture every size for sequences of at most ``longest`` tokens."""
        splits = 1
        while splits <= split_count(longest):
            for size in self._sizes:
                for draw in (False, True):
                    self._get(size, splits, draw)
            splits *= 2

    def replay(self, batch: Batch, shape: Shape, draw: bool) -> Step | None:
        """Run the step from its graph on the current stream; None where no size holds it."""
        size = next((size for size in self._sizes if size >= len(shape.counts)), None)
        if size is None:
            return None
        captured = self._get(size, split_count(shape.longest), draw)
        backend = self._backend
        packed, slot = backend._staging.host(captured.layout.words)
        fill(captured.layout, packed, batch, shape, backend._max_rows)
        backend._staging.upload(slot, captured.layout.words, captured.buffer)
        captured.graph.replay()
        return captured.step

    def _get(self, size: int, splits: int, draw: bool) -> _Captured:
        if (size, splits, draw) not in self._graphs:
            self._graphs[size, splits, draw] = self._capture(size, splits, draw)
        return self._graphs[size, splits, draw]

    def _capture(self, size: int, splits: int, draw: bool) -> _Captured:
        backend = self._backend
        backend.reserve(size, size)
        layout = Layout(size, size, max(1, splits * 512 // backend._block_size), size, size, 0, splits)
        buffer = torch.zeros(layout.words, dtype=torch.int32, device=backend._device.name)
        step = layout.views(buffer)
        step.positions.fill_(-1)  # padding only: the run before the capture writes no cache
        step.sampled_slots.fill_(backend._max_rows)
        backend.launch_all(step, draw)  # compiles what is not compiled yet
        backend._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Transfer threads go on asking for their events, which a capture of the whole process would not bear.
        with torch.cuda.graph(graph, pool=self._pool, stream=backend._stream, capture_error_mode="thread_local"):
            backend.launch_all(step, draw)
        if self._pool is None:
            self._pool = graph.pool()
        return _Captured(layout, buffer, step, graph)
