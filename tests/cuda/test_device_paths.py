"""P3, P4, P6 and P7 on a CUDA device at the heads and widths of models, in both 16-bit types and in int8.

``pytest -m gpu tests/cuda`` on a machine with one.
"""

import importlib.util
import random

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch
from benchmarks import gpu_model

from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from relay.models.config import ModelConfig, RopeConfig
from relay.protocol.sampling import SamplingParams
from tests.cuda.device_model import Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*preferred_blas_library.*"),
]


class Found:
    """Stands for the report of ``gpu_model``."""

    def __init__(self) -> None:
        self.rows: dict[str, dict] = {}

    def put(self, name: str, value: dict) -> None:
        self.rows[name] = value


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "dtype"),
    [
        (8, 2, 128, 64, "bfloat16"),
        (9, 3, 64, 64, "float16"),
        (4, 4, 64, 16, "bfloat16"),
        (8, 1, 128, 16, "float16"),
    ],
)
def test_every_path_of_a_model(
    heads: int, kv_heads: int, dim: int, block: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3, P4, P6, P7 over edges of tiles and splits: chunks, decode in batches and graphs, with and without dependent launch."""
    config = ModelConfig(
        architecture="llama", vocab=512, hidden=256, intermediate=512, num_layers=2, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, rms_eps=1e-5, max_positions=1024, rope=RopeConfig(theta=1e4),
        tied_embeddings=False,
    )  # fmt: skip
    monkeypatch.setattr(gpu_model, "BLOCK", block)
    torch.manual_seed(2)
    random.seed(2)
    found = Found()
    gpu_model.check(found, "model", config, dtype)
    row = found.rows["p4/model"]
    assert row["wrong"] == []
    assert row["checks"] > 60


def test_every_path_in_int8() -> None:
    """P4 with quantised weights: whole, chunked, decoded in a graph and outside of one."""
    backend = CudaBackend(max_rows=32, max_tokens=512, quantized=True)
    backend.load(probe_program(), ProbeWeights())
    assert backend._device.scales, "weights are in int8"
    model = Model(backend=backend)
    tokens = np.random.default_rng(4).integers(0, GEOMETRY.vocab, 300)
    model.backend.bind_slot(0, SamplingParams(max_tokens=64, temperature=0.0), 0, [1], [])
    whole = model.table(300)
    want = model.step([(tokens, 0, whole, 0)])
    kv = model.kv(whole, 300)
    assert np.isfinite(want).all()
    for chunk in (7, 64, 299):
        table = model.table(300)
        for first in range(0, 300, chunk):
            got = model.step([(tokens[first : first + chunk], first, table, 0)], cuts=probe_program().sink_points)
        assert np.array_equal(got, want), f"chunks of {chunk}"
        assert model.kv(table, 300) == kv, f"KV of chunks of {chunk}"
    model.step([(tokens[:299], 0, table, 0)])
    row = [(tokens[299:], 299, table, 0)]
    assert np.array_equal(model.step(row), want), "decode in a graph"
    model.backend._graphs = None
    assert np.array_equal(model.step(row), want), "decode outside a graph"
