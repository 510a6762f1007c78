"""Row ops: exp2 to the bit, norms, rotation and activation near float64, embedding equal to the unpacked table."""

import ctypes

import numpy as np
import pytest
from cpu_model import FMA_ISAS, DictWeights, Part, batch_of, random_source, rope_tables, same_bits

from relay.kernels import canon, packing
from relay.kernels.cpu import library
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import (
    Buffer,
    Embed,
    Geometry,
    HeadNorm,
    Op,
    Program,
    RmsNorm,
    RopeWriteKv,
    SelectRows,
    SiluMul,
)
from relay.kernels.weights import Encoding

GEOMETRY = Geometry(1, 100, 90, 3, 1, 16, 130, 64)
TABLE = [0, 1, 2, 3]


def make_backend(op: Op, isa: str, threads: int = 1, **weights: np.ndarray) -> CpuBackend:
    backend = CpuBackend(threads, isa, max_tokens=64, max_sampled=64)
    backend.load(Program((op,), GEOMETRY), DictWeights(vectors={**rope_tables(GEOMETRY), **weights}))
    backend.allocate_kv(4, 16, "float32")
    return backend


def fma32(a: np.ndarray, b: np.ndarray, c: float) -> np.ndarray:
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + np.longdouble(c)).astype(np.float32)


def exp2_by_definition(x: np.ndarray) -> np.ndarray:
    bounded = np.minimum(x, np.float32(canon.EXP2_MAX))
    n = np.rint(bounded)
    f = bounded - n
    p = np.full_like(f, canon.EXP2_COEFFICIENTS[-1])
    for coefficient in canon.EXP2_COEFFICIENTS[-2::-1]:
        p = fma32(p, f, coefficient)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(p, np.maximum(n, -127).astype(np.int32))
    return np.where(x < canon.EXP2_MIN, np.float32(0), scaled).astype(np.float32)


@pytest.mark.parametrize("isa", FMA_ISAS)
def test_exp2_is_the_canons(isa: str) -> None:
    edges = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        -126.0,
        np.nextafter(np.float32(-126), np.float32(-200)),
        -1e30,
        127.0,
        200.0,
        1e30,
    ]
    x = np.concatenate([np.array(edges), np.random.default_rng(0).uniform(-130, 130, 5000)]).astype(np.float32)
    y = np.array(library.exp2(isa, (ctypes.c_float * len(x))(*x.tolist())), np.float32)
    assert same_bits(y, exp2_by_definition(x))
    inside = (x > -126) & (x < 127)
    assert np.abs(y[inside] / np.exp2(x[inside].astype(np.float64)) - 1).max() < 1.5e-7
    assert y[0] == 1.0


def test_norms_rotation_and_activation() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 100)).astype(np.float32)
    weight = rng.standard_normal(100).astype(np.float32)
    heads = rng.standard_normal((40, GEOMETRY.qkv_width)).astype(np.float32)
    gates = (rng.standard_normal((40, 180)) * 30).astype(np.float32)
    q_norm, k_norm = rng.standard_normal((2, 16)).astype(np.float32)
    batch = batch_of([Part(TABLE, 0, 40, [0] * 40)])
    found: dict[str, list[np.ndarray]] = {"norm": [], "head": [], "rope": [], "silu": []}
    for isa in FMA_ISAS:
        for threads in (1, 2):
            backend = make_backend(RmsNorm(Buffer.X, Buffer.H, "w", 1e-5), isa, threads, w=weight)
            backend.buffer(Buffer.X)[:40] = x
            backend.run(0, 1, batch)
            found["norm"].append(backend.buffer(Buffer.H)[:40].copy())
            backend.close()
            backend = make_backend(HeadNorm("q", "k", 1e-6), isa, threads, q=q_norm, k=k_norm)
            backend.buffer(Buffer.QKV)[:40] = heads
            backend.run(0, 1, batch)
            found["head"].append(backend.buffer(Buffer.QKV)[:40].copy())
            backend.close()
            backend = make_backend(RopeWriteKv(0), isa, threads)
            backend.buffer(Buffer.QKV)[:40] = heads
            backend.run(0, 1, batch)
            found["rope"].append(backend.buffer(Buffer.QKV)[:40].copy())
            backend.close()
            backend = make_backend(SiluMul(), isa, threads)
            backend.buffer(Buffer.G)[:40] = gates
            backend.run(0, 1, batch)
            found["silu"].append(backend.buffer(Buffer.U)[:40].copy())
            backend.close()
    for name, results in found.items():
        assert all(same_bits(result, results[0]) for result in results), name
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    assert np.abs(found["norm"][0] - expected).max() < 2e-6
    parts = heads.astype(np.float64).reshape(40, 5, 16)
    normed = parts / np.sqrt((parts**2).mean(2, keepdims=True) + 1e-6)
    assert np.abs(found["head"][0].reshape(40, 5, 16)[:, :3] - (normed * q_norm)[:, :3]).max() < 3e-6
    assert np.abs(found["head"][0].reshape(40, 5, 16)[:, 3] - (normed * k_norm)[:, 3]).max() < 3e-6
    assert same_bits(found["head"][0].reshape(40, 5, 16)[:, 4].copy(), heads.reshape(40, 5, 16)[:, 4].copy())
    tables = rope_tables(GEOMETRY)
    cos, sin = (tables[name][:40, None].astype(np.float64) for name in ("rope.cos", "rope.sin"))
    a, b = parts[:, :4, :8], parts[:, :4, 8:]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
    assert np.abs(found["rope"][0].reshape(40, 5, 16)[:, :4] - turned).max() < 1e-6
    gate, up = gates[:, :90].astype(np.float64), gates[:, 90:].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    assert np.allclose(found["silu"][0], expected, rtol=8e-6, atol=1e-30)  # -g * log2 e rounds once: up to 127 * 2^-24


def test_silu_of_extreme_gates_is_finite() -> None:
    backend = make_backend(SiluMul(), FMA_ISAS[0])
    gates = backend.buffer(Buffer.G)[:1]
    gates[0, :90] = np.linspace(-1e4, 1e4, 90)
    gates[0, 90:] = 1.0
    backend.run(0, 1, batch_of([Part(TABLE, 0, 1, [0])]))
    assert np.isfinite(backend.buffer(Buffer.U)[0]).all()
    backend.close()


@pytest.mark.parametrize("encoding", list(Encoding))
def test_embedding_is_the_unpacked_row(encoding: Encoding) -> None:
    geometry = Geometry(1, 96, 16, 1, 1, 16, 130, 64)
    matrix = packing.pack_matrix(random_source(130, 96, encoding, np.random.default_rng(2)))
    expected = packing.unpack_matrix(matrix)
    ids = [0, 129, 64, 63, 77, 15, 16]
    for isa in FMA_ISAS:
        backend = CpuBackend(2, isa, max_tokens=16, max_sampled=4)
        backend.load(Program((Embed("w"), SelectRows()), geometry), DictWeights({"w": matrix}, rope_tables(geometry)))
        backend.allocate_kv(4, 16, "float32")
        batch = batch_of([Part(TABLE, 0, 5, ids[:5]), Part(TABLE, 0, 2, ids[5:])])
        backend.run(0, 2, batch)
        assert same_bits(backend.buffer(Buffer.X)[:7].copy(), expected[ids])
        assert same_bits(backend.buffer(Buffer.S)[:2].copy(), expected[[77, 16]])
        backend.close()


def test_bfloat16_cache_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 1.0039063, -1.00390625, 3e-41, 3.4e38, 0.1] * 2, np.float32)
    bits = values.view(np.uint32)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    for isa in FMA_ISAS:
        backend = CpuBackend(1, isa, max_tokens=4, max_sampled=4)
        geometry = Geometry(1, 16, 16, 1, 1, 16, 16, 16)
        tables = {"rope.cos": np.ones((16, 8), np.float32), "rope.sin": np.zeros((16, 8), np.float32)}
        backend.load(Program((RopeWriteKv(0),), geometry), DictWeights(vectors=tables))
        backend.allocate_kv(1, 16, "bfloat16")
        backend.buffer(Buffer.QKV)[:1] = np.concatenate([values, values, values])
        backend.run(0, 1, batch_of([Part([0], 0, 1, [0])]))
        out = bytearray(backend.kv_bytes_per_token_layer())
        backend.read_kv(0, np.array([0]), 0, 1, memoryview(out))
        assert np.array_equal(np.frombuffer(out, np.uint16), np.concatenate([expected, expected]))
        backend.close()
