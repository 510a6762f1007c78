"""Steps as CUDA graphs: one a size, captured on second use or before, which serves every step that it can hold.

Sizes are few: of decode steps by rows and splits; of steps with prompts, up to ``PROMPT_SIZES`` tokens, where launching op by op
takes longer than computing, by tokens, sequences and the length of the longest. What a step has less than its graph is padding
(``step.fill``). The graphs that draw serve steps of plain rows; other steps replay one that ends with the logits and launch their
sampler. Larger steps, and those that are run a layer at a time, are launched op by op.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from relay.kernels.backend import Batch
from relay.kernels.cuda.attention_decode import split_count
from relay.kernels.cuda.attention_prefill import in_one_round
from relay.kernels.cuda.softmax import SPLIT
from relay.kernels.cuda.step import Layout, Shape, Step, empty, fill

if TYPE_CHECKING:
    from relay.kernels.cuda.backend import CudaBackend

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
PROMPT_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
SEQUENCES = (4, 16, 64)  # of a step with prompts
MOST_PROMPT_GRAPHS = 256


class GraphSize(NamedTuple):
    """What a graph holds at most: the sizes of its ``Layout``."""

    rows: int
    sequences: int
    width: int
    sampled: int
    decodes: int
    programs: int
    splits: int
    keys: int


@dataclass(slots=True)
class _Captured:
    layout: Layout
    buffer: torch.Tensor  # the packed integers the graph reads
    step: Step
    graph: torch.cuda.CUDAGraph


class StepGraphs:
    """Replays the step of the smallest captured size that holds the batch. All graphs share one memory pool."""

    def __init__(self, backend: "CudaBackend", max_rows: int, max_tokens: int) -> None:
        self._backend = backend
        self._sizes = _up_to(SIZES, max_rows)
        self._sequences = _up_to(SEQUENCES, max_rows)
        self._tokens = _up_to(PROMPT_SIZES, min(max_tokens, PROMPT_SIZES[-1]))
        self._graphs: dict[tuple[GraphSize, bool], _Captured] = {}
        self._seen: set[tuple[GraphSize, bool]] = set()  # of prompts, once
        self._pool: Any = None

    @property
    def most_tokens(self) -> int:
        """Of a step with prompts that has a graph, or will have one."""
        return self._tokens[-1]

    def forget(self) -> None:
        """Drop all graphs: buffers they point at are about to move."""
        self._graphs.clear()

    def warm_up(self, longest: int) -> None:
        """Capture what steps of sequences of at most ``longest`` tokens need; of steps with prompts what is usual."""
        splits = 1
        while splits <= split_count(longest):
            for rows in self._sizes:
                for draw in (False, True):
                    self._get(self._decode_size(rows, splits), draw)
            splits *= 2
        for splits in {1, min(2, split_count(longest))}:
            for rows in self._tokens:
                self._get(self._prompt_size(rows, self._sequences[0], 0, False, splits, 0), True)
                for sequences in self._sequences[1:3]:
                    self._get(self._prompt_size(rows, sequences, sequences, False, splits, 0), True)

    def replay(self, batch: Batch, shape: Shape, draw: bool) -> Step | None:
        """Run the step from its graph on the current stream; None where none holds it, or where it is the first of its size."""
        size = self._size_of(batch, shape)
        if size is None or (size.programs and not self._is_usual(size, draw)):
            return None
        captured = self._get(size, draw)
        backend = self._backend
        packed, slot = backend._staging.host(captured.layout.words)
        fill(captured.layout, packed, batch, shape, backend._max_rows)
        backend._staging.upload(slot, captured.layout.words, captured.buffer)
        captured.graph.replay()
        return captured.step

    def _size_of(self, batch: Batch, shape: Shape) -> GraphSize | None:
        """The smallest that holds the step; None: there is none."""
        tokens, sequences = len(batch.token_ids), len(shape.counts)
        if shape.only_decode:
            rows = _holding(self._sizes, sequences)
            if rows is None or len(batch.sampled_rows) != sequences:
                return None
            return self._decode_size(rows, split_count(shape.longest))
        rows, most = _holding(self._tokens, tokens), _holding(self._sequences, sequences)
        if rows is None or most is None:
            return None
        few = len(shape.programs) <= self._programs(rows, self._sequences[0])
        splits = split_count(int(batch.positions[batch.row_starts[1:] - 1].max()) + 1)
        return self._prompt_size(rows, most, most if len(shape.decode) else 0, not few, splits, shape.keys)

    def _decode_size(self, rows: int, splits: int) -> GraphSize:
        return GraphSize(rows, rows, self._width(splits), rows, rows, 0, splits, 0)

    def _prompt_size(self, rows: int, sequences: int, decodes: int, many: bool, splits: int, keys: int) -> GraphSize:
        """``many``: programs for as many prompts as there are sequences, and not for a few."""
        backend = self._backend
        programs = self._programs(rows, sequences if many else self._sequences[0])
        _, heads, block_size, dim = backend._device.caches[0][0].shape
        # As the rank with the most heads would: a capture runs the step once more, and there all ranks meet.
        shared = in_one_round(keys, max(heads, backend._most_heads), block_size, dim)
        return GraphSize(
            rows, sequences, self._width(splits), sequences, decodes, programs, splits, 0 if shared else 1 << 30
        )

    def _programs(self, rows: int, prompts: int) -> int:
        """As many as ``prefill_work`` makes at most for that many prompts of ``rows`` tokens together."""
        return -(-rows * self._backend._group // self._backend._tile_rows) + prompts

    def _width(self, splits: int) -> int:
        return max(1, splits * SPLIT // self._backend._block_size)

    def _is_usual(self, size: GraphSize, draw: bool) -> bool:
        """Whether a size of steps with prompts is worth its graph, which takes as long as the step that it would serve."""
        if (size, draw) in self._graphs:
            return True
        first = (size, draw) not in self._seen
        self._seen.add((size, draw))
        return not first and sum(one.programs > 0 for one, _ in self._graphs) < MOST_PROMPT_GRAPHS

    def _get(self, size: GraphSize, draw: bool) -> _Captured:
        if (size, draw) not in self._graphs:
            self._graphs[size, draw] = self._capture(size, draw)
        return self._graphs[size, draw]

    def _capture(self, size: GraphSize, draw: bool) -> _Captured:
        backend = self._backend
        backend.reserve(size.rows, size.sampled)
        layout = Layout(*size)
        buffer = torch.from_numpy(empty(layout, backend._max_rows)).to(backend._device.name)
        step = layout.views(buffer)  # padding only: the run before the capture writes no cache
        backend.launch_all(step, draw)  # compiles what is not compiled yet
        backend._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Transfer threads go on asking for their events, which a capture of the whole process would not bear.
        with torch.cuda.graph(graph, pool=self._pool, stream=backend._stream, capture_error_mode="thread_local"):
            backend.launch_all(step, draw)
        if self._pool is None:
            self._pool = graph.pool()
        return _Captured(layout, buffer, step, graph)


def _up_to(sizes: tuple[int, ...], largest: int) -> list[int]:
    return [size for size in sizes if size < largest] + [largest]


def _holding(sizes: list[int], count: int) -> int | None:
    return next((size for size in sizes if size >= count), None)
