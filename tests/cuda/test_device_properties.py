"""P1 to P5 on a CUDA device for what ``test_device`` leaves out: float16, tiles of attention, frames of KV, resuming.

``pytest -m gpu tests/cuda`` on a machine with one. Models' heads and widths: ``test_device_paths``; int8:
``test_device_int8``; KV from one process's
device to another's: ``test_device_ipc``.
"""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from relay.kernels.cuda import attention_hopper
from relay.kernels.cuda.launch import shared_limit
from relay.kernels.cuda.linear import LinearTile, linear
from relay.kernels.cuda.linear_choice import LinearLayer, probing_rows, tiles_for, use_exact_library
from relay.kernels.kv_frames import KvRange, Span, payload_digest
from relay.kernels.probe import GEOMETRY
from relay.protocol.sampling import SamplingParams
from tests.cuda.device_model import BLOCK, ROWS, Model, accumulators
from tests.cuda.paged_attention import check_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*preferred_blas_library.*"),
]


@pytest.mark.parametrize(("outputs", "depth"), [(6144, 4096), (576, 1536), (40, 96)])
def test_float16_rows_and_tiles(outputs: int, depth: int) -> None:
    """P1 and P2: any number of rows in any tile, and what a model's layer chose, library included."""
    device = torch.device("cuda")
    x, w = (probing_rows(count, depth, device, torch.float16) for count in (257, outputs))
    want = accumulators(x, w)
    tiles = [tile for shared in (shared_limit(), 99 << 10) for tile in tiles_for(outputs, depth, shared).values()]
    for tile in [*tiles, LinearTile(64, 64, 64, 4, 3)]:
        for rows in ROWS:
            y = torch.full((rows, outputs), float("nan"), device=device)
            linear(x[257 - rows :].contiguous(), w, y, tile)
            assert torch.equal(y, want[257 - rows :]), (tile, rows)
    use_exact_library()
    layer = LinearLayer(outputs, depth, dtype=torch.float16)
    layer.test(w, 257)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 512 - 257), value=float("nan"))
    for rows in ROWS:
        y = torch.zeros(512, outputs, dtype=torch.float16, device=device)
        layer(padded, w, y, rows)
        assert torch.equal(y[:rows], want[:rows].half()), rows


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
def test_attention_in_the_tiles_of_every_gpu(dim: int, dtype: torch.dtype) -> None:
    """P3 for rows and warps that this GPU would not choose, and where the last key seen is the first of a block."""
    check_tiles(dim, (16, 64), dtype, "cuda", hopper=attention_hopper.supported(64, dim))


class Area:
    """Memory of a device that frames lie in."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.full((size,), 255, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("on_device", [True, False])
def test_frames_are_the_bytes_of_plain_indexing(on_device: bool) -> None:
    """Gathered from blocks anywhere, of any layers and positions; scattered again, they touch nothing else."""
    model = Model()
    backend, kv = model.backend, model.backend._device.kv
    kv.normal_(generator=torch.Generator(device="cuda").manual_seed(6))
    heads, dim = GEOMETRY.num_kv_heads, GEOMETRY.head_dim
    for layer, layers, first, count in ((0, 2, 0, 77), (1, 1, 3, 1), (0, 1, 15, 2), (0, 2, 5, 250)):
        table, other = model.table(256), model.table(256)
        size = layers * 2 * count * heads * dim * 2
        area = Area(size + 8192)
        place = Span(area, 4096, size) if on_device else memoryview(bytearray(size))
        rows = kv[layer : layer + layers, :, torch.from_numpy(table).long().cuda()]
        rows = rows.transpose(3, 4).reshape(layers, 2, -1, heads * dim)[:, :, first : first + count]
        want = rows.contiguous().view(torch.uint8).flatten().cpu().numpy().tobytes()
        assert backend.stage([(KvRange(layer, layers, first, count, table), place)]).wait() == [payload_digest(want)]
        got = area.tensor.cpu().numpy().tobytes() if on_device else bytes(place)
        assert got == (b"\xff" * 4096 + want + b"\xff" * 4096 if on_device else want)
        before = kv.clone()
        torch.cuda.synchronize()
        assert backend.collect([(KvRange(layer, layers, first, count, other), place)]).wait() == [payload_digest(want)]
        expected = before.clone()
        positions = torch.arange(first, first + count)
        blocks = torch.from_numpy(other).long()[positions // BLOCK].cuda()
        expected[layer : layer + layers, :, blocks, :, (positions % BLOCK).cuda()] = (
            rows.reshape(layers, 2, count, heads, dim).permute(2, 0, 1, 3, 4)
        )  # fmt: skip
        assert torch.equal(kv, expected), (layer, layers, first, count)


def test_draws_go_on_from_any_place_and_in_any_batch() -> None:
    """P5: the stream of tokens is the same for a sequence resumed at any place, beside others that are none of its business."""
    model = Model()
    prompt = [int(token) for token in np.random.default_rng(8).integers(0, GEOMETRY.vocab, 40)]
    kinds = [
        SamplingParams(max_tokens=64, temperature=0.9, seed=5),
        SamplingParams(max_tokens=64, temperature=1.2, top_k=9, top_p=0.8, seed=6),
        SamplingParams(max_tokens=64, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3, seed=7),
    ]
    for slot, kind in enumerate(kinds):
        model.backend.bind_slot(slot, kind, slot, prompt, [])
    tables = [model.table(64) for _ in kinds]
    pieces = [(np.array(prompt), 0, tables[slot], slot) for slot in range(3)]
    streams: list[list[int]] = [[], [], []]
    for step in range(12):
        model.step(pieces)
        for slot in range(3):
            streams[slot].append(model.drawn[slot])
        pieces = [(np.array([-1]), 40 + step, tables[slot], slot) for slot in range(3)]
    for resumed in (1, 5, 11):
        for slot, kind in enumerate(kinds):
            place = 10 + slot
            model.backend.bind_slot(place, kind, slot, prompt, streams[slot][:resumed])
            model.backend.bind_slot(20, kinds[0], 0, [3], [])
            table, beside = model.table(64), model.table(64)
            known = np.array(prompt + streams[slot][:resumed])
            model.step([(np.array([3]), 0, beside, 20), (known, 0, table, place)])
            got = [model.drawn[1]]
            for step in range(resumed + 1, 12):
                model.step([(np.array([-1]), 39 + step, table, place)])
                got.append(model.drawn[0])
            assert got == streams[slot][resumed:], (resumed, slot)
