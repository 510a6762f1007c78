"""Cache access from outside: canonical bytes, CRC32C, block copies, concurrent readers."""

import threading

import numpy as np
import pytest
from cpu_model import MODEL_GEOMETRY, model_program, model_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.kernels.cpu import library
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.cpu.crc32c import crc32c
from relay.kernels.weights import Encoding

WEIGHTS = model_weights(Encoding.F32)


def slow_crc32c(data: bytes, start: int = 0) -> int:
    state = start ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def make_backend(dtype: str, block_size: int, num_blocks: int = 12, isa: str | None = None) -> CpuBackend:
    backend = CpuBackend(1, isa)
    backend.load(model_program(), WEIGHTS)
    backend.allocate_kv(num_blocks, block_size, dtype)
    return backend


@settings(max_examples=20, deadline=None)
@given(data=st.binary(max_size=300), isa=st.sampled_from(library.available()), split=st.integers(0, 300))
def test_crc32c_of_every_build(data: bytes, isa: str, split: int) -> None:
    expected = slow_crc32c(data)
    assert crc32c(data) == expected
    assert crc32c(memoryview(data)[split:], crc32c(bytearray(data[:split]))) == expected
    array = np.frombuffer(data, np.uint8)
    assert library.load(isa).relay_crc32c(0, array.ctypes.data if data else None, len(data)) == expected


@pytest.mark.parametrize("size", [3071, 3072, 3073, 6144, 10_007])
@pytest.mark.parametrize("isa", library.available())
def test_crc32c_over_lanes(size: int, isa: str) -> None:
    """Long enough for the lanes that run side by side, and what is left behind them."""
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    start = 0xDEADBEEF
    kernel = library.load(isa).relay_crc32c
    assert kernel(start, data.ctypes.data, size) == slow_crc32c(data.tobytes(), start)


def test_crc32c_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(("float32", "bfloat16")),
    block_size=st.sampled_from((16, 48)),
    first=st.integers(0, 40),
    count=st.integers(1, 40),
    heads=st.integers(0, MODEL_GEOMETRY.num_kv_heads - 1).flatmap(
        lambda low: st.tuples(st.just(low), st.integers(1, MODEL_GEOMETRY.num_kv_heads - low))
    ),
    isa=st.sampled_from(library.available()),
)
def test_some_of_the_heads(
    dtype: str, block_size: int, first: int, count: int, heads: tuple[int, int], isa: str
) -> None:
    """They are read and written as they lie among all; the others stay."""
    backend = make_backend(dtype, block_size, isa=isa)
    rng = np.random.default_rng(count)
    table = rng.permutation(12)[: -(-(first + count) // block_size)]
    shape = (2, count, MODEL_GEOMETRY.num_kv_heads, MODEL_GEOMETRY.head_dim * (4 if dtype == "float32" else 2))
    whole = rng.integers(0, 256, shape, np.uint8)
    backend.write_kv(1, table, first, count, memoryview(whole.tobytes()))
    part = rng.integers(0, 256, (*shape[:2], heads[1], shape[3]), np.uint8)
    assert backend.write_kv_crc(1, table, first, count, memoryview(part.tobytes()), heads) == crc32c(part.tobytes())
    whole[:, :, heads[0] : sum(heads)] = part
    found = bytearray(whole.nbytes)
    backend.read_kv(1, table, first, count, memoryview(found))
    assert found == whole.tobytes()
    found = bytearray(part.nbytes)
    assert backend.read_kv_crc(1, table, first, count, memoryview(found), heads) == crc32c(part.tobytes())
    assert found == part.tobytes()
    for wrong in ((0, MODEL_GEOMETRY.num_kv_heads + 1), (MODEL_GEOMETRY.num_kv_heads, 1), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="heads"):
            backend.read_kv(1, table, 0, 1, memoryview(bytearray(max(0, wrong[1]) * 2 * shape[3])), wrong)


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(("float32", "bfloat16")),
    block_size=st.sampled_from((16, 48, 64)),
    first=st.integers(0, 100),
    count=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_what_was_written_is_read_back_with_its_crc(
    dtype: str, block_size: int, first: int, count: int, seed: int
) -> None:
    backend = make_backend(dtype, block_size)
    rng = np.random.default_rng(seed)
    table = rng.permutation(12)[: -(-(first + count) // block_size)]
    size = count * backend.kv_bytes_per_token_layer()
    layers = [rng.bytes(size) for _ in range(MODEL_GEOMETRY.num_layers)]
    for layer, data in enumerate(layers):
        assert backend.write_kv_crc(layer, table, first, count, memoryview(data)) == crc32c(data)
    for layer, data in enumerate(layers):
        out = bytearray(size)
        assert backend.read_kv_crc(layer, table, first, count, memoryview(out)) == crc32c(data)
        assert bytes(out) == data
    if count:  # one token is its K and its V, wherever the range began
        token_kv = backend.kv_bytes_per_token_layer() // 2
        one = bytearray(2 * token_kv)
        backend.read_kv(1, table, first + count - 1, 1, memoryview(one))
        assert bytes(one) == layers[1][(count - 1) * token_kv : count * token_kv] + layers[1][-token_kv:]
    backend.close()


def test_copy_block_copies_every_layer() -> None:
    backend = make_backend("bfloat16", 16)
    size = 16 * backend.kv_bytes_per_token_layer()
    data = [np.random.default_rng(layer).bytes(size) for layer in range(2)]
    for layer in range(2):
        backend.write_kv(layer, np.array([3]), 0, 16, memoryview(data[layer]))
    backend.copy_block(3, 7)
    for layer in range(2):
        out = bytearray(size)
        backend.read_kv(layer, np.array([7]), 0, 16, memoryview(out))
        assert bytes(out) == data[layer]
    with pytest.raises(ValueError, match="block"):
        backend.copy_block(0, 12)
    backend.close()


def test_wrong_sizes_and_blocks_are_refused() -> None:
    backend = make_backend("float32", 16)
    token = backend.kv_bytes_per_token_layer()
    with pytest.raises(ValueError, match="bytes"):
        backend.write_kv(0, np.array([0]), 0, 2, memoryview(bytes(token)))
    with pytest.raises(ValueError, match="block table"):
        backend.write_kv(0, np.array([0]), 16, 1, memoryview(bytes(token)))
    with pytest.raises(ValueError, match="block"):
        backend.write_kv(0, np.array([12]), 0, 1, memoryview(bytes(token)))
    with pytest.raises(ValueError, match="layer"):
        backend.write_kv(2, np.array([0]), 0, 1, memoryview(bytes(token)))
    with pytest.raises(ValueError, match="read-only"):
        backend.read_kv(0, np.array([0]), 0, 1, memoryview(bytes(token)))
    backend.close()


def test_transfer_threads_may_write_at_the_same_time() -> None:
    backend = make_backend("float32", 16)
    size = 16 * backend.kv_bytes_per_token_layer()
    data = {block: np.random.default_rng(block).bytes(size) for block in range(12)}

    def write(blocks: list[int]) -> None:
        for block in blocks:
            backend.write_kv(0, np.array([block]), 0, 16, memoryview(data[block]))

    threads = [threading.Thread(target=write, args=(list(range(start, 12, 3)),)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in range(12):
        out = bytearray(size)
        backend.read_kv(0, np.array([block]), 0, 16, memoryview(out))
        assert bytes(out) == data[block]
    backend.close()
