"""The reference backend against a direct fp64 implementation, and against itself over every way to reach a row."""

import numpy as np
import pytest
from tiny_programs import (
    GEOMETRY,
    GREEDY,
    Row,
    Weights,
    build_program,
    fill_kv,
    kv_bytes,
    make_batch,
    plain_logits,
    run_step,
)

from relay.errors import CorruptModelError
from relay.kernels.numerics import numerics_id
from relay.kernels.program import Buffer, Geometry, Program, RopeWriteKv
from relay.kernels.reference.attention import attend
from relay.kernels.reference.backend import ReferenceBackend
from relay.kernels.reference.products import ChainProducts, MatmulProducts, Products
from relay.kernels.sampler import InvalidLogits
from relay.kernels.weights import Encoding
from relay.protocol.sampling import SamplingParams

BLOCKS = 40
PRODUCTS = {"chain": ChainProducts, "matmul": MatmulProducts}


def loaded(program: Program, weights: Weights, products: Products, dtype: str = "float32") -> ReferenceBackend:
    backend = ReferenceBackend(products)
    backend.load(program, weights)
    backend.allocate_kv(BLOCKS, 16, dtype)
    if dtype == "float32":
        fill_kv(backend, program, range(BLOCKS), 16, float("nan"))
    for slot in range(4):
        backend.bind_slot(slot, GREEDY, 0, [1], [])
    return backend


def prompt(length: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(0, GEOMETRY.vocab, length).tolist()


@pytest.mark.parametrize("products", sorted(PRODUCTS))
@pytest.mark.parametrize("encoding", list(Encoding))
def test_logits_are_those_of_a_plain_implementation(products: str, encoding: Encoding) -> None:
    program = build_program()
    weights = Weights(program, encoding)
    backend = loaded(program, weights, PRODUCTS[products]())
    tokens = prompt(70)
    logits = run_step(backend, program, [Row(0, tokens, 0, [7, 3, 9, 1, 20])])
    expected = plain_logits(program, weights, tokens)[-1]
    assert np.abs(logits[0] - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "qk_norm", "bias"),
    [(3, 1, 64, False, False), (4, 4, 16, True, False), (8, 1, 32, False, True)],
)
def test_other_shapes(heads: int, kv_heads: int, dim: int, qk_norm: bool, bias: bool) -> None:
    geometry = Geometry(1, 96, 64, heads, kv_heads, dim, 70, 300)
    program = build_program(geometry, qk_norm=qk_norm, bias=bias)
    weights = Weights(program)
    tokens = np.random.default_rng(0).integers(0, 70, 280).tolist()  # over one split
    logits = run_step(loaded(program, weights, MatmulProducts()), program, [Row(0, tokens, 0, list(range(18)))])
    expected = plain_logits(program, weights, tokens)[-1]
    assert np.abs(logits[0] - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chains_give_equal_bits_whole_chunked_and_decoded(dtype: str) -> None:
    """P3 and P4 on the definition itself: rows, chunks, neighbours and block order change nothing."""
    program = build_program(bias=False)
    weights = Weights(program)
    backend = loaded(program, weights, ChainProducts(), dtype)
    tokens, other = prompt(81), prompt(30, seed=8)
    table, second = [11, 4, 30, 2, 17, 9], [5, 6]
    whole = run_step(backend, program, [Row(0, tokens, 0, table)])
    stored = kv_bytes(backend, program, table, 0, 81)

    chunked = loaded(program, weights, ChainProducts(), dtype)
    scattered = [3, 22, 0, 19, 8, 1]
    for start, stop in ((0, 1), (1, 17), (17, 63), (63, 80)):
        rows = [Row(0, tokens[start:stop], start, scattered, sample=False)]
        if start == 17:
            rows.insert(0, Row(1, other, 0, second))
        run_step(chunked, program, rows)
    decoded = run_step(chunked, program, [Row(1, [3], 30, second), Row(0, tokens[80:], 80, scattered)])
    assert np.array_equal(decoded[1], whole[0])
    assert kv_bytes(chunked, program, scattered, 0, 81) == stored

    moved = loaded(program, weights, ChainProducts(), dtype)  # as if the KV had come from another worker
    raw = kv_bytes(chunked, program, scattered, 0, 80)
    for layer, data in enumerate(raw):
        half = len(data) // 2
        k, v = data[:half], data[half:]
        cut = 33 * len(k) // 80
        moved.write_kv(layer, np.array(table, np.int32), 0, 33, memoryview(k[:cut] + v[:cut]))
        moved.write_kv(layer, np.array(table, np.int32), 33, 47, memoryview(k[cut:] + v[cut:]))
    assert np.array_equal(run_step(moved, program, [Row(0, tokens[80:], 80, table)]), whole)


def test_an_infinite_v_reaches_no_earlier_row() -> None:
    """Row r of a chain must not be multiplied by a v after r, not even by a weight of 0."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((70, heads, 16)).astype(np.float32) for heads in (2, 1, 1))
    positions = np.arange(70, dtype=np.int32)
    finite = attend(q, k, v, positions, 0.25, ChainProducts())
    v[66] = np.inf
    out = attend(q, k, v, positions, 0.25, ChainProducts())
    assert out[:66].tobytes() == finite[:66].tobytes()
    assert not np.isfinite(out[66:]).any()


def test_bfloat16_kv_changes_the_logits_a_little() -> None:
    program = build_program()
    weights = Weights(program)
    tokens = prompt(40)
    rows = [Row(0, tokens, 0, [0, 1, 2])]
    wide, narrow = (
        run_step(loaded(program, weights, MatmulProducts(), dtype), program, rows) for dtype in ("float32", "bfloat16")
    )
    difference = np.abs(wide - narrow).max() / np.abs(wide).max()
    assert 1e-5 < difference < 3e-2


def test_blocks_are_copied_in_every_layer() -> None:
    program = build_program()
    backend = loaded(program, Weights(program), MatmulProducts())
    run_step(backend, program, [Row(0, prompt(16), 0, [4])])
    backend.copy_block(4, 9)
    assert kv_bytes(backend, program, [9], 0, 16) == kv_bytes(backend, program, [4], 0, 16)


def test_kv_of_another_length_is_refused() -> None:
    program = build_program()
    backend = loaded(program, Weights(program), MatmulProducts())
    assert backend.kv_bytes_per_token_layer() == 2 * 2 * 32 * 4
    table = np.array([0], np.int32)
    with pytest.raises(ValueError, match="not 100"):
        backend.read_kv(0, table, 0, 2, memoryview(bytearray(100)))
    with pytest.raises(ValueError, match="not 100"):
        backend.write_kv(0, table, 0, 2, memoryview(bytes(100)))
    with pytest.raises(ValueError, match="block size"):
        backend.allocate_kv(2, 24, "float32")
    with pytest.raises(ValueError, match="neither"):
        backend.allocate_kv(2, 16, "float16")


def test_the_last_sampled_token_is_taken_by_minus_one() -> None:
    program = build_program()
    weights = Weights(program)
    tokens = prompt(20)
    backend = loaded(program, weights, ChainProducts())
    params = SamplingParams(max_tokens=9, temperature=30.0, seed=3)
    backend.bind_slot(2, params, 0, tokens, [])
    generated = []
    batch = make_batch([Row(2, tokens, 0, [0, 1])])
    for position in range(20, 24):
        backend.run(0, len(program.ops), batch)
        generated += [sampled.token_id for sampled in backend.sample(batch)]
        batch = make_batch([Row(2, [-1], position, [0, 1])])
    assert len(set(generated)) > 1

    resumed = loaded(program, weights, ChainProducts())  # elsewhere, after two tokens, from token ids alone
    resumed.bind_slot(2, params, 0, tokens, generated[:2])
    batch = make_batch([Row(2, tokens + generated[:2], 0, [8, 6])])
    resumed.run(0, len(program.ops), batch)
    assert resumed.sample(batch)[0].token_id == generated[2]


def test_a_bad_row_is_named_and_moves_no_slot() -> None:
    program = build_program()
    backend = loaded(program, Weights(program), MatmulProducts())
    batch = make_batch([Row(0, [1, 2], 0, [0]), Row(1, [3], 0, [1], sample=False), Row(2, [4, 5], 0, [2])])
    backend.run(0, len(program.ops), batch)
    backend._buffers[Buffer.L][1, 5] = np.nan
    with pytest.raises(InvalidLogits, match="logits row 1: the logit of token 5 is nan"):
        backend.sample(batch)
    backend._buffers[Buffer.L][1, 5] = 0
    assert backend._slots[0].num_outputs == 0
    assert len(backend.sample(batch)) == 2


def test_logits_are_kept_only_when_asked() -> None:
    program = build_program()
    backend = loaded(program, Weights(program), MatmulProducts())
    batch = make_batch([Row(0, [1], 0, [0])], capture=False)
    backend.run(0, len(program.ops), batch)
    backend.sample(batch)
    with pytest.raises(RuntimeError, match="capture"):
        backend.logits()


def test_missing_and_misshapen_weights_are_named() -> None:
    program = build_program()
    weights = Weights(program)
    del weights.vectors["1.q_norm"]
    with pytest.raises(CorruptModelError, match=r"no weight 1\.q_norm"):
        ReferenceBackend().load(program, weights)
    weights = Weights(program)
    weights.matrices["0.down"] = weights.matrices["0.qkv"]
    with pytest.raises(CorruptModelError, match=r"0\.down is \[256, 64\], the program needs \[64, 96\]"):
        ReferenceBackend().load(program, weights)


def test_the_id_depends_on_products_and_kv_dtype_and_not_on_the_run() -> None:
    program = build_program()
    weights = Weights(program)
    names = [
        numerics_id(loaded(program, weights, products(), dtype).numerics())
        for products in PRODUCTS.values()
        for dtype in ("float32", "bfloat16")
    ]
    assert len(set(names)) == 4
    assert names[0] == numerics_id(loaded(program, weights, ChainProducts()).numerics())


def test_one_changed_op_changes_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ReferenceBackend(ChainProducts()).numerics()
    original = ReferenceBackend._rope_write

    def rounded(self: ReferenceBackend, layer: int, batch: object) -> None:
        self._buffers[Buffer.QKV] *= np.float32(1 + 2.0**-23)
        original(self, layer, batch)

    monkeypatch.setattr(ReferenceBackend, "_rope_write", rounded)
    after = ReferenceBackend(ChainProducts()).numerics()
    assert before["probe"] != after["probe"]
    assert {name for name in before if before[name] != after[name]} == {"probe"}
    assert any(isinstance(op, RopeWriteKv) for op in build_program().ops)
