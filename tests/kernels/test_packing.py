"""Packing then unpacking equals gguf's dequantisation and plain widening, bit for bit."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.kernels import packing
from relay.kernels.weights import Encoding

GGUF_TYPES = {name: gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q4_1")}
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
FP16_FIELDS = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2}


def random_blocks(kind: str, n: int, k: int, seed: int) -> np.ndarray:
    """Random quants with finite scales (of either sign, subnormal ones too)."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, k // 32, BLOCK_BYTES[kind]), dtype=np.uint8)
    fields = FP16_FIELDS[kind]
    halves = (rng.standard_normal((n, k // 32, fields)) * 10.0 ** rng.integers(-7, 2, (n, k // 32, fields))).astype(
        np.float16
    )
    blocks[:, :, : 2 * fields] = halves.view(np.uint8)
    return blocks


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 200), groups=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_quantised_equals_gguf(kind: str, n: int, groups: int, seed: int) -> None:
    k = groups * 32
    blocks = random_blocks(kind, n, k, seed)
    expected = gguf.dequantize(blocks.reshape(n, -1), GGUF_TYPES[kind])
    if kind == "Q4_0":
        expected = expected + np.float32(0)  # -0 + 0 = +0: the one documented difference
    source = packing.from_gguf(kind, blocks, n, k)
    packed = packing.pack_matrix(source)
    assert packed.data.ctypes.data % 64 == 0
    assert packed.data.size == packing.packed_bytes(n, k, packed.encoding)
    assert same_bits(packing.unpack_matrix(packed), expected)
    assert same_bits(packing.widen(source), expected)


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 80), seed=st.integers(0, 2**32 - 1))
def test_float_encodings_round_trip(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    f32 = rng.standard_normal((n, k)).astype(np.float32)
    assert same_bits(packing.unpack_matrix(packing.pack_matrix(packing.from_f32(f32))), f32)
    bf16 = (f32.view(np.uint32) >> 16).astype(np.uint16)
    widened = (bf16.astype(np.uint32) << 16).view(np.float32)
    assert same_bits(packing.unpack_matrix(packing.pack_matrix(packing.from_bf16(bf16))), widened)
    f16 = f32.astype(np.float16)
    assert same_bits(packing.unpack_matrix(packing.pack_matrix(packing.from_f16(f16))), f16.astype(np.float32))


def test_stacking_keeps_a_common_encoding_and_widens_mixed_ones() -> None:
    q, k, v = (packing.from_gguf("Q4_1", random_blocks("Q4_1", n, 64, n), n, 64) for n in (96, 32, 33))
    stacked = packing.pack_matrix([q, k, v])
    assert (stacked.n, stacked.k, stacked.encoding) == (161, 64, Encoding.Q4_1)
    expected = np.concatenate([packing.widen(part) for part in (q, k, v)])
    assert same_bits(packing.unpack_matrix(stacked), expected)
    other = packing.from_gguf("Q8_0", random_blocks("Q8_0", 40, 64, 1), 40, 64)
    mixed = packing.pack_matrix([q, other])
    assert mixed.encoding is Encoding.F32
    assert same_bits(packing.unpack_matrix(mixed), np.concatenate([packing.widen(q), packing.widen(other)]))


def test_panels_are_padded_with_zeros_and_k_ascends() -> None:
    f32 = np.arange(1, 66 * 3 + 1, dtype=np.float32).reshape(66, 3)
    panels = packing.pack_matrix(packing.from_f32(f32)).data.view(np.float32).reshape(2, 3, 64)
    assert panels[0, 1, 5] == f32[5, 1]
    assert panels[1, 2, 1] == f32[65, 2]
    assert not panels[1, :, 2:].any()


def test_refusals_name_the_reason() -> None:
    with pytest.raises(ValueError, match="no multiple of 32"):
        packing.from_gguf("Q8_0", np.zeros(34, np.uint8), 1, 33)
    with pytest.raises(ValueError, match="bytes"):
        packing.from_gguf("Q8_0", np.zeros(33, np.uint8), 1, 32)
    huge = random_blocks("Q4_0", 1, 32, 0)
    huge[0, 0, :2] = np.array([60000], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="too large"):
        packing.from_gguf("Q4_0", huge, 1, 32)
    with pytest.raises(ValueError, match="different k"):
        packing.pack_matrix(
            [packing.from_f32(np.zeros((1, 2), np.float32)), packing.from_f32(np.zeros((1, 3), np.float32))]
        )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_values_that_are_not_finite_are_seen(kind: str) -> None:
    values = np.linspace(-3, 3, 256, dtype=np.float32).reshape(4, 64)
    for bad in (None, np.nan, np.inf, -np.inf):
        damaged = values.copy()
        if bad is not None:
            damaged[2, 5] = bad
        if kind == "F32":
            source = packing.from_f32(damaged)
        elif kind == "F16":
            source = packing.from_f16(damaged.astype(np.float16))
        elif kind == "BF16":
            source = packing.from_bf16((damaged.view(np.uint32) >> 16).astype(np.uint16))
        else:
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(4, 2, -1).copy()
            if bad is not None:
                blocks[2, 0, 2 if kind == "Q4_1" else 0 :][:2] = np.array([bad], "<f2").view(np.uint8)
            source = packing.from_gguf(kind, blocks, 4, 64)
        assert packing.all_finite(source) == (bad is None)
