"""The reference's fp32 functions: a true fma, and the canon's compound functions near their real values."""

import ctypes
import ctypes.util
import math

import numpy as np

from relay.kernels import canon
from relay.kernels.reference import arithmetic as ar


def libm_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return np.array([fmaf(float(x), float(y), float(z)) for x, y, z in zip(a, b, c, strict=True)], np.float32)


def test_fma_rounds_once() -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=20000).astype(np.float32) for _ in range(2))
    c = (generator.normal(size=20000) * 10.0 ** generator.integers(-9, 9, 20000)).astype(np.float32)
    # cancellation, and sums that sit next to a midpoint of two fp32 numbers, where rounding twice goes wrong
    a[:4000] = 1 + generator.integers(0, 1 << 12, 4000).astype(np.float32) * np.float32(2.0**-12)
    b[:4000] = 1 + generator.integers(0, 1 << 12, 4000).astype(np.float32) * np.float32(2.0**-12)
    c[:2000] = generator.choice(np.float32([2.0**-60, -(2.0**-60), 2.0**-80, -(2.0**-80)]), 2000)
    c[2000:4000] = -a[2000:4000] * b[2000:4000]
    a[4000:5000] *= np.float32(2.0**-70)
    b[4000:5000] *= np.float32(2.0**-70)
    c[4000:5000] = np.float32(2.0**-140)  # subnormal results
    expected = libm_fma(a, b, c)
    assert np.array_equal(ar.fma(a, b, c), expected)
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert not np.array_equal(twice, expected)  # the cases do tell one rounding from two


def test_exp2_is_accurate_and_exact_at_its_edges() -> None:
    x = np.random.default_rng(1).uniform(-126, 126, 20000).astype(np.float32)
    assert np.max(np.abs(ar.exp2(x) / np.exp2(x.astype(np.float64)) - 1)) < 1.2e-7
    edges = np.array([0, 1, -1, -126, -126.00001, -1e30, -np.inf, 127, 1e30], np.float32)
    assert ar.exp2(edges).tolist() == [1, 2, 0.5, 2.0**-126, 0, 0, 0, 2.0**127, 2.0**127]


def test_silu_is_accurate_and_finite() -> None:
    g = np.linspace(-90, 90, 2001).astype(np.float32)
    expected = g / (1 + np.exp(-g.astype(np.float64)))
    assert np.allclose(ar.silu_mul(g, np.ones_like(g)), expected, rtol=1e-5, atol=1e-35)
    assert np.isfinite(ar.silu_mul(np.float32([-1e30, -3e38, 3e38]), np.float32([1, 1, 1]))).all()


def test_rms_norm_sums_by_lanes() -> None:
    x = np.random.default_rng(2).normal(size=(3, 70)).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 70).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(ar.rms_norm(x, weight, 1e-5), expected, rtol=3e-7)
    # the order of the tree: (0+8)+(4+12) and so on, shown by values that only cancel in that order
    lanes = np.zeros(16, np.float32)
    lanes[[0, 8, 4, 12]] = 1e8, -1e8, 3.0, 4.0
    assert ar.fold_lanes(lanes) == 7.0
    lanes[[0, 1]] = 1e8, 3.0
    lanes[[8, 4, 12]] = 0.0, -1e8, 0.0
    assert ar.fold_lanes(lanes) == 3.0


def test_rotation_keeps_lengths_and_turns_halves() -> None:
    x = np.random.default_rng(3).normal(size=(2, 3, 8)).astype(np.float32)
    angle = np.float32([[0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]])
    turned = ar.rotate(x, np.cos(angle), np.sin(angle))
    z = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle.astype(np.float64))[:, None]
    assert np.allclose(turned, np.concatenate([z.real, z.imag], axis=-1), atol=1e-6)


def test_bfloat16_rounds_to_nearest_even() -> None:
    ulp = 2.0**-7
    x = np.float32([1, 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp * 0.51, -1 - ulp * 0.49, np.inf, 3.4e38, np.nan])
    widened = ar.widen_bfloat16(ar.round_bfloat16(x))
    assert widened[:7].tolist() == [1, 1, 1 + 2 * ulp, 1 + ulp, -1, math.inf, math.inf]
    assert np.isnan(widened[7])
    assert np.isnan(ar.widen_bfloat16(ar.round_bfloat16(np.array([0x7F800001], np.uint32).view(np.float32))))[0]


def test_constants_are_fp32() -> None:
    for value in (*canon.EXP2_COEFFICIENTS, canon.LOG2E):
        assert float(np.float32(value)) == value
