"""P3, P4, P6 and P7 on a CUDA device at the heads and widths of models, in both 16-bit types.

``pytest -m gpu tests/cuda`` on a machine with one.
"""

import importlib.util
import random

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch
from benchmarks import gpu_model

from relay.models.config import ModelConfig, RopeConfig

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
