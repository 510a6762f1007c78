"""Decode rows whose tables name the same blocks are computed together; no bit tells (P1, P6)."""

import numpy as np
import pytest
from cpu_model import FMA_ISAS, Part, attention_backend, batch_of, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_attention import attend_chunks, geometry, poison, random_qkv

from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import Buffer

NUM_BLOCKS = 160


def decode_together(backend: CpuBackend, parts: list[Part], qkv: list[np.ndarray]) -> list[np.ndarray]:
    """A of the last token of every part, all in one step."""
    backend.buffer(Buffer.QKV)[: len(parts)] = np.stack([rows[-1] for rows in qkv])
    backend.run(0, 2, batch_of(parts))
    return list(backend.buffer(Buffer.A)[: len(parts)].copy())


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from((1, 3, 4, 8)),
    head_dim=st.sampled_from((16, 64)),
    block_size=st.sampled_from((16, 48, 64)),
    dtype=st.sampled_from(("float32", "bfloat16")),
    isa=st.sampled_from(FMA_ISAS),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_shared_blocks_give_the_bits_of_copies(
    group: int, head_dim: int, block_size: int, dtype: str, isa: str, threads: int, data: st.DataObject
) -> None:
    """A tree of prefixes: each sequence keeps whole blocks of an earlier one and goes on by itself. Every one is also decoded
    alone, from blocks of its own."""
    shape = geometry(group, head_dim)
    backend = attention_backend(shape, isa, threads, NUM_BLOCKS, block_size, dtype)
    poison(backend, NUM_BLOCKS, block_size)
    free = list(data.draw(st.permutations(range(NUM_BLOCKS))))
    qkv: list[np.ndarray] = []
    parts: list[Part] = []
    expected: list[np.ndarray] = []
    for index in range(data.draw(st.integers(2, 7))):
        parent = data.draw(st.integers(0, index - 1)) if index else 0
        kept = data.draw(st.integers(0, (len(qkv[parent]) - 1) // block_size)) if index else 0
        own = data.draw(st.integers(1, 400 if index == 0 else 90))
        length = min(kept * block_size + own, shape.max_positions)
        rows = random_qkv(shape, length, index)
        table = []
        if index:
            rows[: kept * block_size] = qkv[parent][: kept * block_size]
            table = list(parts[parent].block_table[:kept])
        table += [free.pop() for _ in range(-(-length // block_size) - kept)]
        if kept * block_size < length - 1:
            backend.buffer(Buffer.QKV)[: length - 1 - kept * block_size] = rows[kept * block_size : -1]
            backend.run(0, 2, batch_of([Part(table, kept * block_size, length - 1)]))
        qkv.append(rows)
        parts.append(Part(table, length - 1, length))
        alone = attention_backend(shape, FMA_ISAS[0], 1, len(table), block_size, dtype)
        expected.append(attend_chunks(alone, rows, np.arange(len(table)), [length])[-1])
        alone.close()
    order = data.draw(st.permutations(range(len(parts))))
    together = decode_together(backend, [parts[i] for i in order], [qkv[i] for i in order])
    for index, out in zip(order, together, strict=True):
        assert same_bits(out, expected[index]), index
    backend.close()


@pytest.mark.parametrize("isa", FMA_ISAS)
def test_many_sequences_on_one_prefix(isa: str) -> None:
    """More rows than one task holds, beside rows that share nothing and a prefill chunk."""
    shape, block_size, prefix = geometry(8, 16), 16, 288
    backend = attention_backend(shape, isa, 2, 120, block_size, "float32")
    poison(backend, 120, block_size)
    common, shared = random_qkv(shape, prefix, 0), list(range(prefix // block_size))
    attend_chunks(backend, common, np.array(shared), [prefix])
    qkv, parts = [], []
    for index in range(40):
        rows = random_qkv(shape, 1, 1 + index)
        qkv.append(np.concatenate([common, rows]))
        parts.append(Part([*shared, 20 + index], prefix, prefix + 1))
    for index in range(3):  # the common tokens, in blocks of their own
        table = [60 + 19 * index + i for i in range(19)]
        attend_chunks(backend, common, np.array(table), [prefix])
        qkv.append(np.concatenate([common, random_qkv(shape, 1, 1 + index)]))
        parts.append(Part(table, prefix, prefix + 1))
    together = decode_together(backend, parts, qkv)
    for index in range(3):
        assert same_bits(together[40 + index], together[index])
    for part, rows, out in zip(parts[:40:7], qkv[:40:7], together[:40:7], strict=True):
        assert same_bits(decode_together(backend, [part], [rows])[0], out)
    backend.close()


@pytest.mark.parametrize("isa", FMA_ISAS)
@pytest.mark.parametrize("group", [1, 3])
def test_rows_at_different_positions_of_the_same_blocks(isa: str, group: int) -> None:
    """Nothing forbids tables that differ in length only; each row sees its own positions and no more."""
    shape, length = geometry(group, 64), 300
    qkv = random_qkv(shape, length, 2)
    backend = attention_backend(shape, isa, 2, 5, 64, "float32")
    expected = attend_chunks(backend, qkv, np.arange(5), [length])
    ends = [300, 17, 64, 65, 299, 256, 257, 1, 258]
    parts = [Part(list(range(5)), end - 1, end) for end in ends]
    together = decode_together(backend, parts, [qkv[:end] for end in ends])
    for end, out in zip(ends, together, strict=True):
        assert same_bits(out, expected[end - 1]), end
    backend.close()


@pytest.mark.parametrize("isa", FMA_ISAS)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("bad", [0, 31, 63, 64, 129])
def test_an_infinite_v_reaches_no_earlier_row(isa: str, group: int, bad: int) -> None:
    """A weight of 0 times infinity is NaN; a prefill tile must not multiply what decode would not read."""
    shape, length = geometry(group, 32), 131
    qkv = random_qkv(shape, length, 4)
    finite = qkv.copy()
    qkv[bad, -shape.kv_width :] = np.where(np.arange(shape.kv_width) % 2, np.inf, np.nan)
    outputs = []
    for rows, cuts in ((qkv, [length]), (qkv, [5, 40, 70, length]), (finite, [length])):
        backend = attention_backend(shape, isa, 2, 3, 64, "float32")
        poison(backend, 3, 64)
        outputs.append(attend_chunks(backend, rows, np.arange(3), cuts))
        backend.close()
    whole, chunked, untouched = outputs
    assert np.isfinite(untouched).all()
    assert same_bits(whole[:bad], untouched[:bad])
    assert same_bits(chunked[:bad], untouched[:bad])
    assert not np.isfinite(whole[bad:]).any()
    assert not np.isfinite(chunked[bad:]).any()
