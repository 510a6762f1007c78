"""Linear: the canon's chain bit for bit, whatever the rows, neighbours, threads, encoding and instruction set (P1, P2, P6, P9)."""

import numpy as np
import pytest
from cpu_model import FMA_ISAS, DictWeights, Part, batch_of, random_source, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.kernels import packing
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import Buffer, Geometry, Linear, Program
from relay.kernels.weights import Encoding, PackedMatrix

ROWS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 129, 257)


class LinearRunner:
    """L = S @ w.T on one backend; rows are the sampled rows of one-token sequences."""

    def __init__(
        self, matrix: PackedMatrix, isa: str, threads: int, bias: np.ndarray | None = None, accumulate: bool = False
    ):
        geometry = Geometry(1, matrix.k, 16, 1, 1, 16, matrix.n, 16)
        self.backend = CpuBackend(threads, isa, max_tokens=512, max_sampled=512)
        op = Linear(Buffer.S, Buffer.L, "w", bias=None if bias is None else "b", accumulate=accumulate)
        vectors = {"rope.cos": np.ones((16, 8), np.float32), "rope.sin": np.zeros((16, 8), np.float32)}
        if bias is not None:
            vectors["b"] = bias
        self.backend.load(Program((op,), geometry), DictWeights({"w": matrix}, vectors))
        self.backend.allocate_kv(1, 16, "float32")
        self.rows = 0

    def __call__(self, x: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        rows = len(x)
        self.backend.buffer(Buffer.S)[...] = np.nan
        self.backend.buffer(Buffer.S)[:rows] = x
        if start is not None:
            self.backend.buffer(Buffer.L)[:rows] = start
        self.backend.run(0, 1, batch_of([Part([0], 0, 1, slot=row) for row in range(rows)]))
        return self.backend.buffer(Buffer.L)[:rows].copy()


def chain(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """acc = fma(x[k], w[n, k], acc), k ascending; fma through 64-bit mantissas (the product is exact, the sum near enough
    that a second rounding differs with probability 2^-40)."""
    acc = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        product = x[:, k].astype(np.longdouble)[:, None] * w[:, k].astype(np.longdouble)[None, :]
        acc = (product + acc.astype(np.longdouble)).astype(np.float32)
    return acc


@pytest.mark.parametrize("encoding", list(Encoding))
@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(1, 300),
    groups=st.integers(1, 7),
    rows=st.sampled_from(ROWS[:9]),
    threads=st.integers(1, 3),
    isa=st.sampled_from(FMA_ISAS),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_chain(
    encoding: Encoding, n: int, groups: int, rows: int, threads: int, isa: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = packing.pack_matrix(random_source(n, groups * 32, encoding, rng))
    bias = rng.standard_normal(n).astype(np.float32)
    x = rng.standard_normal((rows, groups * 32)).astype(np.float32)
    start = rng.standard_normal((rows, n)).astype(np.float32)
    expected = chain(x, packing.unpack_matrix(matrix))
    plain = LinearRunner(matrix, isa, threads)
    assert same_bits(plain(x), expected)
    plain.backend.close()
    full = LinearRunner(matrix, isa, threads, bias, accumulate=True)
    assert same_bits(full(x, start), (expected + bias) + start)
    full.backend.close()


@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_row_is_the_same_in_every_batch_on_every_path(encoding: Encoding) -> None:
    rng = np.random.default_rng(1)
    n, k = 64 * 9 + 32, 288
    matrix = packing.pack_matrix(random_source(n, k, encoding, rng))
    x = rng.standard_normal((257, k)).astype(np.float32)
    wide = packing.pack_matrix(packing.from_f32(packing.unpack_matrix(matrix)))
    reference = LinearRunner(wide, FMA_ISAS[0], 1)
    expected = reference(x)
    for isa in FMA_ISAS:
        for threads in (1, 2, 3):
            runner = LinearRunner(matrix, isa, threads)
            for rows in ROWS:
                chosen = rng.permutation(257)[:rows]
                assert same_bits(runner(x[chosen]), expected[chosen]), (isa, threads, rows)
            runner.backend.close()
    for row in (0, 5, 256):
        assert same_bits(reference(x[row : row + 1]), expected[row : row + 1])
    reference.backend.close()


def test_odd_k_without_groups() -> None:
    rng = np.random.default_rng(2)
    for encoding in (Encoding.F32, Encoding.BF16, Encoding.F16):
        matrix = packing.pack_matrix(random_source(70, 77, encoding, rng))
        x = rng.standard_normal((33, 77)).astype(np.float32)
        expected = chain(x, packing.unpack_matrix(matrix))
        for isa in FMA_ISAS:
            runner = LinearRunner(matrix, isa, 2)
            assert same_bits(runner(x), expected)
            assert same_bits(runner(x[:3]), expected[:3])
            runner.backend.close()


def test_repeating_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    matrix = packing.pack_matrix(random_source(640, 128, Encoding.Q4_1, rng))
    x = rng.standard_normal((40, 128)).astype(np.float32)
    runner = LinearRunner(matrix, FMA_ISAS[0], 3)
    first = runner(x)
    assert all(same_bits(runner(x), first) for _ in range(100))
    runner.backend.close()


def test_subnormals_are_kept() -> None:
    x = np.full((1, 32), 1e-20, np.float32)
    w = np.full((1, 32), 1e-21, np.float32)
    expected = chain(x, w)
    assert 0 < expected[0, 0] < np.finfo(np.float32).tiny
    for isa in FMA_ISAS:
        runner = LinearRunner(packing.pack_matrix(packing.from_f32(w)), isa, 1)
        assert same_bits(runner(x), expected)
        runner.backend.close()
