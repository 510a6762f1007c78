"""Which graph serves a step: a function of the step alone, so that ranks of one worker choose alike. No GPU."""

import importlib.util
import types
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from relay.kernels.cuda import attention_hopper, attention_prefill, rank_share
from relay.kernels.cuda.graphs import GraphSize, StepGraphs
from relay.kernels.cuda.step import shape_of
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
