"""P1 and P4 on a CUDA device with int8 weights. ``pytest -m gpu tests/cuda`` on a machine with one."""

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.int8_product import Int8Tile
from relay.kernels.cuda.linear_choice import probing_rows
from relay.kernels.cuda.linear_int8 import linear_int8, pack_codes, quantize, tile_elsewhere, tile_for
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from relay.protocol.sampling import SamplingParams
from tests.cuda.device_model import ROWS, Model, accumulators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*preferred_blas_library.*"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "depth"), [(6144, 4096), (8208, 1120), (576, 1536), (40, 96)])
def test_int8_rows(outputs: int, depth: int, dtype: torch.dtype) -> None:
    """P1: the 16-bit canon's accumulators of the same integers, times a scale, whatever the number of rows."""
    check_rows(outputs, depth, dtype, lambda rows: tile_for(rows, outputs))


def test_int8_rows_with_tiles_of_other_gpus() -> None:
    check_rows(1008, 1120, torch.bfloat16, tile_elsewhere)


def check_rows(outputs: int, depth: int, dtype: torch.dtype, choose: Callable[[int], Int8Tile]) -> None:
    device = torch.device("cuda")
    x, w = (probing_rows(count, depth, device, dtype) for count in (257, outputs))
    codes, scales = quantize(w)
    want = accumulators(x, codes.to(dtype)) * scales
    packed = pack_codes(codes)
    for rows in ROWS:
        y = torch.full((rows, outputs), float("nan"), device=device)
        linear_int8(x[257 - rows :].contiguous(), packed, scales, y, choose(rows))
        assert torch.equal(y, want[257 - rows :]), rows


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
