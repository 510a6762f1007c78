"""Which graph serves a step: a function of the step alone, so that ranks of one worker choose alike. No GPU."""

import importlib.util
import types
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from relay.kernels.backend import Batch
from relay.kernels.cuda import attention_hopper, attention_prefill, rank_share
from relay.kernels.cuda.attention_decode import split_count
from relay.kernels.cuda.graphs import GraphSize, StepGraphs
from relay.kernels.cuda.step import Layout, fill, shape_of
from relay.kernels.probe import ProbeWeights, probe_program
from relay.kernels.program import Program
from tests.cuda.batches import batch_of

BLOCK = 64


class Backend:
    """What graphs and a rank's share ask of a ``CudaBackend``."""

    dtype = "bfloat16"
    _block_size, _tile_rows, _group = BLOCK, 128, 4
    _most_heads = 0

    def set_meetings(self, meetings: Any, areas: Any, kept: Any, most_heads: int) -> None:
        self._most_heads = most_heads

    def load(self, program: Program, weights: Any) -> None:
        g = program.geometry
        cache = torch.empty(1, g.num_kv_heads, BLOCK, g.head_dim, device="meta")
        self._device = types.SimpleNamespace(caches=[(cache, cache)])

    def add_vector(self, name: str, values: Any) -> None: ...


def rank_of(whole: Program, ranks: int, rank: int) -> Backend:
    backend = Backend()
    with mock.patch.object(rank_share, "DeviceMemory"), mock.patch.object(torch.cuda, "synchronize"):
        share = rank_share.CudaRankShare(backend, "cuda:0", ranks, rank, 2048, 64)  # type: ignore[arg-type]
        share.load(whole, ProbeWeights())
    return backend


def test_ranks_choose_alike_whatever_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that captured by itself would meet nobody in the run before."""
    monkeypatch.setattr(attention_prefill, "_hopper", lambda block_size, dim: True)
    monkeypatch.setattr(attention_hopper, "_l2_bytes", lambda: 50 << 20)
    whole = probe_program()
    whole = replace(whole, geometry=replace(whole.geometry, num_heads=20, num_kv_heads=5, head_dim=128))
    ranks = [rank_of(whole, 3, rank) for rank in range(3)]
    heads = [backend._device.caches[0][0].shape[1] for backend in ranks]
    assert len(set(heads)) == 2, "the heads of this model go evenly"
    chosen: set[int] = set()
    for end in range(1 << 12, 1 << 16, 1 << 11):
        batch = batch_of([([1, 2], end - 2, [0] * (end // BLOCK), 0)])
        shape = shape_of(batch, Backend._group, Backend._tile_rows)
        sizes: set[GraphSize | None] = {StepGraphs(one, 64, 2048)._size_of(batch, shape) for one in ranks}  # type: ignore[arg-type]
        assert len(sizes) == 1, (end, sizes)
        chosen.update(size.keys for size in sizes if size is not None)
    assert len(chosen) == 2, "no step is on either side of what the second-level cache holds"


def some_step(chance: np.random.Generator) -> Batch:
    """Prompts and decode rows, some behind many tokens that are computed already."""
    pieces = []
    for slot in range(int(chance.integers(1, 65))):
        count = int(chance.choice([1, 1, 2, 3, 17, 60]))
        first = int(chance.choice([0, 5, 500, 3000, 20000])) if chance.random() < 0.3 else 0
        table = chance.integers(1, 1000, -(-(first + count) // BLOCK))
        pieces.append(([7] * count, first, table, slot))
    return batch_of(pieces)


def test_a_graph_holds_every_step_that_chooses_it() -> None:
    backend = rank_of(probe_program(), 1, 0)
    graphs = StepGraphs(backend, 64, 2048)  # type: ignore[arg-type]
    chance = np.random.default_rng(1)
    held = few = 0
    while held < 200:
        batch = some_step(chance)
        shape = shape_of(batch, Backend._group, Backend._tile_rows)
        size = graphs._size_of(batch, shape)
        if size is None:
            assert len(batch.token_ids) > graphs.most_tokens or shape.only_decode
            continue
        held += 1
        few += size.programs < graphs._programs(size.rows, size.sequences)
        longest = int(batch.positions.max()) + 1
        assert size.width * BLOCK >= longest
        assert size.splits >= split_count(longest)
        layout = Layout(*size)
        packed = np.full(layout.words, -7, np.int32)
        fill(layout, packed, batch, shape, 64)  # raises where something does not fit
        tables = layout.host(packed, "block_tables")[: len(batch.slots), : batch.block_tables.shape[1]]
        assert np.array_equal(tables, batch.block_tables)
    assert 0 < few < held
