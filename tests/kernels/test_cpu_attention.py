"""Attention: whole == any chunking == decode, on any block permutation, with NaN in every block nobody wrote (P3, P6, P9)."""

import numpy as np
import pytest
from cpu_model import FMA_ISAS, Part, attention_backend, batch_of, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import Buffer, Geometry

EDGES = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 512, 530)


def geometry(group: int, head_dim: int) -> Geometry:
    kv_heads = 2 if group < 8 else 1
    return Geometry(1, 64, 16, group * kv_heads, kv_heads, head_dim, 16, 600)


def random_qkv(shape: Geometry, tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, shape.qkv_width)).astype(np.float32)


def poison(backend: CpuBackend, num_blocks: int, block_size: int) -> None:
    """NaN in every byte of the cache (0xFF is a NaN in both dtypes)."""
    data = memoryview(b"\xff" * (backend.kv_bytes_per_token_layer() * block_size))
    for block in range(num_blocks):
        backend.write_kv(0, np.array([block]), 0, block_size, data)


def attend_chunks(backend: CpuBackend, qkv: np.ndarray, table: np.ndarray, cuts: list[int]) -> np.ndarray:
    """A of every token, computed in the chunks that ``cuts`` (ascending, last one the length) make."""
    out = []
    for first, last in zip([0, *cuts[:-1]], cuts, strict=True):
        backend.buffer(Buffer.QKV)[: last - first] = qkv[first:last]
        backend.run(0, 2, batch_of([Part(list(table), first, last)]))
        out.append(backend.buffer(Buffer.A)[: last - first].copy())
    return np.concatenate(out)


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from((1, 3, 4, 8)),
    head_dim=st.sampled_from((16, 64, 128)),
    length=st.sampled_from(EDGES),
    block_size=st.sampled_from((16, 32, 64, 80)),
    dtype=st.sampled_from(("float32", "bfloat16")),
    isa=st.sampled_from(FMA_ISAS),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_chunks_equal_the_whole(
    group: int, head_dim: int, length: int, block_size: int, dtype: str, isa: str, threads: int, data: st.DataObject
) -> None:
    shape = geometry(group, head_dim)
    blocks = -(-length // block_size)
    qkv = random_qkv(shape, length, length)
    results = []
    for which in ("reference", "chosen"):
        plain = which == "reference"
        backend = attention_backend(
            shape, FMA_ISAS[0] if plain else isa, 1 if plain else threads, blocks + 3, block_size, dtype
        )
        poison(backend, blocks + 3, block_size)
        if which == "reference":
            table, cuts = np.arange(blocks), [length]
        else:
            table = np.array(data.draw(st.permutations(range(blocks + 3))))[:blocks]
            cuts = sorted({*data.draw(st.lists(st.integers(1, length), max_size=4)), length})
        out = attend_chunks(backend, qkv, table, cuts)
        kv = bytearray(length * backend.kv_bytes_per_token_layer())
        backend.read_kv(0, table, 0, length, memoryview(kv))
        results.append((out, bytes(kv)))
        backend.close()
    assert np.isfinite(results[0][0]).all()
    assert same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_equals_prefill(dtype: str) -> None:
    shape, length, block_size = geometry(3, 64), 530, 32
    qkv = random_qkv(shape, length, 1)
    table = np.random.default_rng(0).permutation(20)[:17]
    whole = attention_backend(shape, FMA_ISAS[0], 1, 20, block_size, dtype)
    expected = attend_chunks(whole, qkv, table, [length])
    for isa in FMA_ISAS:
        backend = attention_backend(shape, isa, 2, 20, block_size, dtype)
        poison(backend, 20, block_size)
        out = attend_chunks(
            backend, qkv, table, [1, 14, 15, 16, 17, 62, 63, 64, 250, *range(251, 260), 510, *range(511, 531)]
        )
        assert same_bits(out, expected), isa
        backend.close()
    whole.close()


def test_sequences_of_a_batch_do_not_touch_each_other() -> None:
    """Rows of prefill and decode together, in any order, equal the same rows alone; every thread count (P1, P6)."""
    shape, block_size = geometry(4, 64), 16
    lengths = [300, 1, 64, 257, 33, 513]
    sequences = [random_qkv(shape, length, length) for length in lengths]
    tables = np.array_split(np.random.default_rng(1).permutation(6 * 33), 6)
    alone = attention_backend(shape, FMA_ISAS[0], 1, 6 * 33, block_size, "float32")
    expected = [attend_chunks(alone, qkv, table, [len(qkv)]) for qkv, table in zip(sequences, tables, strict=True)]
    alone.close()
    for isa in FMA_ISAS:
        for threads in (1, 2, 3):
            backend = attention_backend(shape, isa, threads, 6 * 33, block_size, "float32")
            poison(backend, 6 * 33, block_size)
            firsts = [length - 1 if i % 2 else length // 2 for i, length in enumerate(lengths)]
            for qkv, table, first in zip(sequences, tables, firsts, strict=True):
                if first:
                    attend_chunks(backend, qkv[:first], table, [first])
            for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
                parts = [Part(list(tables[i]), firsts[i], lengths[i]) for i in order]
                stacked = np.concatenate([sequences[i][firsts[i] :] for i in order])
                backend.buffer(Buffer.QKV)[: len(stacked)] = stacked
                backend.run(0, 2, batch_of(parts))
                at = 0
                for i in order:
                    count = lengths[i] - firsts[i]
                    assert same_bits(backend.buffer(Buffer.A)[at : at + count].copy(), expected[i][firsts[i] :]), (
                        isa,
                        threads,
                        i,
                    )
                    at += count
            backend.close()


def test_close_to_exact_softmax() -> None:
    shape, length = geometry(3, 64), 300
    qkv = random_qkv(shape, length, 5)
    qkv[:, : 6 * 64] *= 4  # peaked rows too
    backend = attention_backend(shape, FMA_ISAS[0], 1, 5, 64, "float32")
    out = attend_chunks(backend, qkv, np.arange(5), [length])
    rotated = backend.buffer(Buffer.QKV)[:length].astype(np.float64)
    q, k, v = np.split(rotated.reshape(length, -1, 64), [6, 8], axis=1)
    for head in range(6):
        scores = q[:, head] @ k[:, head // 3].T / 8
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected = weights @ v[:, head // 3] / weights.sum(1, keepdims=True)
        assert np.abs(out[:, head * 64 : head * 64 + 64] - expected).max() < 2e-5
    backend.close()


def test_values_of_free_blocks_never_leak_even_where_v_is_infinite() -> None:
    """One visible token: the output is its v exactly, whatever the other 63 keys of the tile hold."""
    shape = geometry(1, 16)
    qkv = random_qkv(shape, 1, 3)
    for isa in FMA_ISAS:
        backend = attention_backend(shape, isa, 1, 1, 16, "float32")
        for filler in (np.nan, np.inf, -np.inf):
            data = np.full(16 * backend.kv_bytes_per_token_layer() // 4, filler, np.float32)
            backend.write_kv(0, np.array([0]), 0, 16, memoryview(data.tobytes()))
            assert same_bits(attend_chunks(backend, qkv, np.array([0]), [1]), qkv[:, -shape.kv_width :] + 0)
        backend.close()
