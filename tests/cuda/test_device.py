"""The backend on a CUDA device: P1 to P7 at small sizes. ``pytest -m gpu tests/cuda`` on a machine with one."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from relay.errors import UsageError
from relay.kernels.backend import Batch
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.launch import shared_limit
from relay.kernels.cuda.linear import LinearTile, linear
from relay.kernels.cuda.linear_choice import probing_rows, tall_tile, tiles_for
from relay.kernels.probe import GEOMETRY, probe_digest, probe_program
from relay.kernels.sampler import SlotState, draw
from relay.protocol.sampling import SamplingParams
from tests.cuda.device_model import BLOCK, Model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytestmark = pytest.mark.filterwarnings("ignore:.*preferred_blas_library.*")


def params(**more: object) -> SamplingParams:
    return SamplingParams(max_tokens=64, **more)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_clear_line() -> None:
    with pytest.raises(UsageError, match="no CUDA device"):
        CudaBackend()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("outputs", "depth"), [(6144, 4096), (4096, 4096), (576, 1536), (40, 96)])
def test_linear_tiles_and_rows(outputs: int, depth: int) -> None:
    device = torch.device("cuda")
    x, w = probing_rows(257, depth, device), probing_rows(outputs, depth, device)
    reference = torch.empty(257, outputs, device=device)
    linear(x, w, reference, tall_tile(shared_limit()))
    tiles = [tile for shared in (shared_limit(), 99 << 10) for tile in tiles_for(outputs, depth, shared).values()]
    for tile in [*tiles, LinearTile(64, 64, 64, 4, 3)]:
        for rows in (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 129, 257):
            y = torch.full((rows, outputs), float("nan"), device=device)
            linear(x[257 - rows :].contiguous(), w, y, tile)
            assert torch.equal(y, reference[257 - rows :]), (tile, rows)


@pytest.mark.gpu
@needs_gpu
def test_every_path_gives_the_same_bits() -> None:
    model = Model()
    tokens = np.random.default_rng(0).integers(0, GEOMETRY.vocab, 300)
    for slot in range(32):
        model.backend.bind_slot(slot, params(temperature=0.7, seed=slot), 0, [1], [])
    whole = model.table(300)
    want = model.step([(tokens, 0, whole, 0)])
    kv = model.kv(whole, 300)
    assert np.isfinite(want).all()
    for chunk in (1, 7, 64, 100):
        table = model.table(300)
        for first in range(0, 300, chunk):
            got = model.step([(tokens[first : first + chunk], first, table, 1)], cuts=probe_program().sink_points)
        assert np.array_equal(got, want), f"chunks of {chunk}"
        assert model.kv(table, 300) == kv, f"KV of chunks of {chunk}"
    stops = [1, 2, 15, 16, 17, 63, 64, 65, 128, 200, 255, 256, 257, 299]
    rows, references = [], []
    for slot, stop in enumerate(stops):
        table = model.table(300)
        references.append(model.step([(tokens[: stop + 1], 0, model.table(300), 31)])[0])
        model.step([(tokens[:stop], 0, table, slot)])
        rows.append((tokens[stop : stop + 1], stop, table, slot))
    graph = model.step(rows)
    graphs, model.backend._graphs = model.backend._graphs, None
    eager = model.step(rows)
    mixed = model.step([*rows, (tokens[:50], 0, model.table(300), 30)])
    model.backend._graphs = graphs
    assert np.array_equal(graph, np.stack(references)), "decode in a graph"
    assert np.array_equal(eager, graph), "decode outside a graph"
    assert np.array_equal(mixed[: len(rows)], graph), "decode beside a prompt"
    assert np.array_equal(model.step(rows[::-1]), graph[::-1]), "another order"
    for _ in range(50):
        assert np.array_equal(model.step(rows), graph), "a repetition"


@pytest.mark.gpu
@needs_gpu
def test_transferred_kv_continues_as_if_computed_here() -> None:
    model = Model()
    tokens = np.random.default_rng(1).integers(0, GEOMETRY.vocab, 120)
    model.backend.bind_slot(0, params(seed=1), 0, [1], [])
    here, there = model.table(120), model.table(120)
    model.step([(tokens[:100], 0, here, 0)])
    raw = bytearray(100 * model.backend.kv_bytes_per_token_layer())
    for layer in range(GEOMETRY.num_layers):
        model.backend.read_kv(layer, here, 0, 100, memoryview(raw))
        model.backend.write_kv(layer, there, 0, 100, memoryview(raw))
    copy = model.table(16)
    model.backend.copy_block(int(there[2]), int(copy[0]))
    there[2] = copy[0]
    want = model.step([(tokens[100:], 100, here, 0)])
    assert np.array_equal(model.step([(tokens[100:], 100, there, 0)]), want)


@pytest.mark.gpu
@needs_gpu
def test_draws_equal_the_definition_and_follow_the_device_token() -> None:
    model = Model()
    prompt = [int(t) for t in np.random.default_rng(2).integers(0, GEOMETRY.vocab, 40)]
    kinds = [
        params(temperature=0.0),
        params(temperature=0.9, seed=5),
        params(temperature=1.3, min_p=0.1, seed=(1 << 64) - 1),
        params(temperature=0.8, top_k=5, top_p=0.7, seed=9, logprobs=2),
        params(temperature=1.1, top_p=0.8, seed=11),
        params(temperature=1.1, top_k=7, min_p=0.01, seed=12),
        params(temperature=0.8, repetition_penalty=1.3, logit_bias={3: 2.0}, seed=10),
    ]
    states, tables = [], []
    for slot, kind in enumerate(kinds):
        model.backend.bind_slot(slot, kind, slot, prompt, [])
        states.append(SlotState(kind, slot, prompt))
        tables.append(model.table(60))
    pieces = [(np.array(prompt), 0, tables[slot], slot) for slot in range(len(kinds))]
    for step in range(8):
        logits = model.step(pieces)
        want = [draw(logits[slot], states[slot], slot).token_id for slot in range(len(kinds))]
        assert model.drawn == want
        for state, token in zip(states, want, strict=True):
            state.push(token)
        pieces = [(np.array([-1]), 40 + step, tables[slot], slot) for slot in range(len(kinds))]


@pytest.mark.gpu
@needs_gpu
def test_a_step_may_be_queued_before_the_last_is_fetched() -> None:
    results = []
    for ahead in (False, True):
        model = Model()
        prompt = np.arange(20)
        for slot in range(3):
            kind = params(temperature=0.8, seed=slot, top_k=3 if slot == 2 else 0)
            model.backend.bind_slot(slot, kind, 0, prompt.tolist(), [])
        tables = [model.table(40) for _ in range(3)]
        pieces = [(prompt, 0, table, slot) for slot, table in enumerate(tables)]
        waiting: list[Batch] = []
        drawn: list[list[int]] = []
        for step in range(10):
            batch = Batch(
                token_ids=np.concatenate([piece[0] for piece in pieces]).astype(np.int32),
                positions=np.concatenate([np.arange(at, at + len(t)) for t, at, *_ in pieces]).astype(np.int32),
                row_starts=np.cumsum([0, *(len(piece[0]) for piece in pieces)]).astype(np.int32),
                slots=np.arange(3, dtype=np.int32),
                block_tables=np.stack(tables),
                sampled_rows=np.arange(3, dtype=np.int32),
            )
            model.backend.run(0, model.ops, batch)
            waiting.append(batch)
            if len(waiting) > int(ahead):
                drawn.append([token.token_id for token in model.backend.sample(waiting.pop(0))])
            pieces = [(np.array([-1]), 20 + step, table, slot) for slot, table in enumerate(tables)]
        drawn += [[token.token_id for token in model.backend.sample(batch)] for batch in waiting]
        results.append(drawn)
    assert results[0] == results[1]


@pytest.mark.gpu
@needs_gpu
def test_probe_is_repeatable() -> None:
    digests = {probe_digest(CudaBackend(max_rows=4, max_tokens=64, graphs=flag), "bfloat16") for flag in (False, True)}
    assert len(digests) == 1


@pytest.mark.gpu
@needs_gpu
def test_warm_up_captures_before_the_first_sequence() -> None:
    model = Model()
    assert model.backend.kv_blocks_that_fit(BLOCK) > 800
    model.backend.warm_up(600)
    assert model.backend._graphs is not None
    captured = len(model.backend._graphs._graphs)
    tokens = np.arange(30)
    model.backend.bind_slot(0, params(seed=1), 0, [1], [])
    table = model.table(40)
    want = Model(graphs=False)
    want.backend.bind_slot(0, params(seed=1), 0, [1], [])
    other = want.table(40)
    for first, stop in ((0, 29), (29, 30)):
        got = model.step([(tokens[first:stop], first, table, 0)])
        assert np.array_equal(got, want.step([(tokens[first:stop], first, other, 0)]))
    assert len(model.backend._graphs._graphs) == captured
