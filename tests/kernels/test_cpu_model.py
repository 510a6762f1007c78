"""A whole small model: K/V and logits are a function of the token ids alone (P1, P3, P6, P8, P9)."""

import numpy as np
import pytest
from cpu_model import (
    FMA_ISAS,
    MODEL_GEOMETRY,
    DictWeights,
    Part,
    batch_of,
    model_program,
    model_weights,
    same_bits,
)

from relay.errors import CorruptModelError, DoesNotFitError, UsageError
from relay.kernels import canon, packing
from relay.kernels.cpu import library
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.weights import Encoding
from relay.protocol.sampling import SamplingParams

PROGRAM = model_program()
LENGTH = 300
IDS = [int(token) for token in np.random.default_rng(7).integers(0, MODEL_GEOMETRY.vocab, LENGTH)]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def make_backend(weights: DictWeights, isa: str = FMA_ISAS[0], threads: int = 1, dtype: str = "float32") -> CpuBackend:
    backend = CpuBackend(threads, isa, max_tokens=1024, max_sampled=16)
    backend.load(PROGRAM, weights)
    backend.allocate_kv(60, 16, dtype)
    return backend


def run_chunks(
    backend: CpuBackend, table: list[int], cuts: list[int], ids: list[int] = IDS
) -> tuple[list[np.ndarray], bytes]:
    """Logits after every chunk, and the canonical KV bytes of all layers."""
    rows = []
    backend.bind_slot(0, GREEDY, 0, ids, [])
    for first, last in zip([0, *cuts[:-1]], cuts, strict=True):
        batch = batch_of([Part(table, first, last, ids[first:last])])
        backend.run(0, len(PROGRAM.ops), batch)
        backend.sample(batch)
        rows.append(backend.logits()[0])
    return rows, read_all(backend, table, cuts[-1])


def read_all(backend: CpuBackend, table: list[int], length: int) -> bytes:
    parts = []
    for layer in range(MODEL_GEOMETRY.num_layers):
        out = bytearray(length * backend.kv_bytes_per_token_layer())
        backend.read_kv(layer, np.array(table), 0, length, memoryview(out))
        parts.append(bytes(out))
    return b"".join(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_decode_threads_and_instruction_sets_agree(dtype: str) -> None:
    weights = model_weights(Encoding.Q4_1)
    table = list(range(20))
    backend = make_backend(weights, dtype=dtype)
    expected_logits, expected_kv = run_chunks(backend, table, [LENGTH], IDS)
    reference = {cut: run_chunks(backend, table, [cut])[0][-1] for cut in (64, 65, 256, 257, 280, 299)}
    backend.close()
    for isa in FMA_ISAS:
        for threads in (1, 2):
            backend = make_backend(weights, isa, threads, dtype)
            shuffled = [int(block) for block in np.random.default_rng(threads).permutation(60)[:20]]
            cuts = [64, 65, 256, 257, 280, 299, LENGTH]
            rows, kv = run_chunks(backend, shuffled, cuts)
            assert kv == expected_kv
            assert same_bits(rows[-1], expected_logits[0])
            for cut, row in zip(cuts[:-1], rows[:-1], strict=True):
                assert same_bits(row, reference[cut]), (isa, threads, cut)
            backend.close()


def test_ranges_of_ops_equal_one_run() -> None:
    weights = model_weights(Encoding.BF16)
    backend = make_backend(weights)
    expected, kv = run_chunks(backend, list(range(20)), [LENGTH])
    batch = batch_of([Part(list(range(20, 40)), 0, LENGTH, IDS)])
    stops = [*PROGRAM.sink_points, len(PROGRAM.ops)]
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        backend.run(start, stop, batch)
    backend.sample(batch)
    assert same_bits(backend.logits(), np.stack(expected))
    assert read_all(backend, list(range(20, 40)), LENGTH) == kv
    backend.close()


def test_last_sampled_token_is_fed_by_slot() -> None:
    """token_ids of -1 take the slot's last token; the stream equals one whose ids are given."""
    weights = model_weights(Encoding.Q8_0)
    backend = make_backend(weights)
    prompt = IDS[:40]
    streams = []
    for explicit in (False, True):
        backend.bind_slot(3, GREEDY, 0, prompt, [])
        table, out, feed, first = list(range(10)), [], prompt, 0
        for _ in range(8):
            batch = batch_of([Part(table, first, first + len(feed), feed, slot=3)])
            backend.run(0, len(PROGRAM.ops), batch)
            out.append(backend.sample(batch)[0].token_id)
            first += len(feed)
            feed = [out[-1]] if explicit else [-1]
        streams.append(out)
    assert streams[0] == streams[1]
    backend.bind_slot(3, GREEDY, 0, prompt, streams[0][:3])
    batch = batch_of([Part(list(range(10)), 42, 43, [-1], slot=3)])
    backend.run(0, len(PROGRAM.ops), batch)
    assert backend.sample(batch)[0].token_id == streams[0][3]
    backend.close()


def test_neighbours_do_not_matter_and_repeats_agree() -> None:
    weights = model_weights(Encoding.F16)
    backend = make_backend(weights, threads=2)
    expected, _ = run_chunks(backend, list(range(20)), [100], IDS[:100])
    for slot in range(5):
        backend.bind_slot(slot, GREEDY, 0, IDS[:100], [])
    parts = [
        Part(list(range(i * 10, i * 10 + 10)), 0, length, IDS[:length], slot=i)
        for i, length in enumerate((7, 100, 33, 100, 1))
    ]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        for _ in range(5):
            batch = batch_of([parts[i] for i in order])
            backend.run(0, len(PROGRAM.ops), batch)
            backend.sample(batch)
            logits = backend.logits()
            assert same_bits(logits[order.index(1)], expected[0])
            assert same_bits(logits[order.index(3)], expected[0])
    backend.close()


def test_quantised_weights_equal_their_fp32_expansion() -> None:
    for encoding in (Encoding.Q8_0, Encoding.Q4_1, Encoding.BF16, Encoding.F16):
        weights = model_weights(encoding)
        wide = DictWeights(
            {
                name: packing.pack_matrix(packing.from_f32(packing.unpack_matrix(m)))
                for name, m in weights.matrices.items()
            },
            weights.vectors,
        )
        results = []
        for chosen in (weights, wide):
            backend = make_backend(chosen)
            results.append(run_chunks(backend, list(range(20)), [50, 51], IDS[:51]))
            backend.close()
        assert results[0][1] == results[1][1]
        assert same_bits(np.stack(results[0][0]), np.stack(results[1][0]))


def test_numerics_names_class_and_dtype_not_instruction_set() -> None:
    weights = model_weights(Encoding.F32)
    found = {}
    for isa in library.available():
        for dtype in ("float32", "bfloat16"):
            backend = make_backend(weights, isa, dtype=dtype)
            found[isa, dtype] = backend.numerics()
            backend.close()
    assert all(found[isa, "float32"] == found[FMA_ISAS[0], "float32"] for isa in FMA_ISAS)
    first = found[FMA_ISAS[0], "float32"]
    assert first["canon"] == str(canon.CANON_VERSION)
    assert first["instructions"] == "cpu fma"
    assert first["probe"] != found[FMA_ISAS[0], "bfloat16"]["probe"]
    if "nofma" in library.available():
        assert found["nofma", "float32"]["instructions"] == "cpu nofma"
        assert found["nofma", "float32"]["probe"] != first["probe"]


def test_bad_batches_are_refused_before_anything_is_written() -> None:
    backend = make_backend(model_weights(Encoding.F32))
    good = list(range(20))
    for part, words in (
        (Part(good, 0, 2, [1, MODEL_GEOMETRY.vocab]), "vocabulary"),
        (Part(good, 0, 1, [-1]), "vocabulary"),
        (Part([0], 15, 17, [1, 1]), "block table"),
        (Part([60], 0, 1, [1]), "block table"),
        (Part(list(range(60)), 699, 701, [1, 1]), "positions"),
        (Part(good, 0, 1, [1], slot=99), "slots"),
    ):
        with pytest.raises(ValueError, match=words):
            backend.run(0, len(PROGRAM.ops), batch_of([part]))
    with pytest.raises(ValueError, match="at most"):
        backend.run(0, 1, batch_of([Part(list(range(70)), 0, 1025, [1] * 1025)]))
    backend.close()
    backend.close()
    with pytest.raises(ValueError, match="no program"):
        backend.run(0, 1, batch_of([Part(good, 0, 1, [1])]))


def test_bad_models_and_sizes_are_refused() -> None:
    weights = model_weights(Encoding.F32)
    backend = CpuBackend(1)
    missing = DictWeights({k: v for k, v in weights.matrices.items() if k != "head"}, weights.vectors)
    with pytest.raises(CorruptModelError, match="no weight head"):
        backend.load(PROGRAM, missing)
    swapped = DictWeights({**weights.matrices, "head": weights.matrices["0.qkv"]}, weights.vectors)
    with pytest.raises(CorruptModelError, match=r"head is \[320, 96\], the model needs \[157, 96\]"):
        backend.load(PROGRAM, swapped)
    backend.load(PROGRAM, weights)
    with pytest.raises(DoesNotFitError, match="GiB"):
        backend.allocate_kv(10**9, 64, "float32")
    with pytest.raises(UsageError, match="multiple of 16"):
        backend.allocate_kv(4, 24, "float32")
    with pytest.raises(UsageError, match="float8"):
        backend.allocate_kv(4, 16, "float8")
    backend.close()
    with pytest.raises(UsageError, match="has no sse9 kernels"):
        CpuBackend(1, "sse9")
