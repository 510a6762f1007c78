"""Small random weights, programs and batches for the tests of the CPU kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from relay.kernels import packing
from relay.kernels.backend import Batch
from relay.kernels.cpu import library
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import (
    Attend,
    Buffer,
    Embed,
    Geometry,
    HeadNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeWriteKv,
    SelectRows,
    SiluMul,
)
from relay.kernels.weights import Encoding, PackedMatrix

FMA_ISAS = [isa for isa in library.available() if isa != "nofma"]


@dataclass
class DictWeights:
    matrices: dict[str, PackedMatrix] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] = field(default_factory=dict)

    def matrix(self, name: str) -> PackedMatrix:
        return self.matrices[name]

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name]


def random_source(n: int, k: int, encoding: Encoding, rng: np.random.Generator) -> packing.MatrixSource:
    values = (rng.standard_normal((n, k)) * 0.3).astype(np.float32)
    match encoding:
        case Encoding.F32:
            return packing.from_f32(values)
        case Encoding.BF16:
            return packing.from_bf16((values.view(np.uint32) >> 16).astype(np.uint16))
        case Encoding.F16:
            return packing.from_f16(values.astype(np.float16))
    halves, block_bytes = (1, 34) if encoding is Encoding.Q8_0 else (2, 20)
    blocks = rng.integers(0, 256, (n, k // 32, block_bytes), dtype=np.uint8)
    blocks[:, :, : 2 * halves] = (rng.standard_normal((n, k // 32, halves)) * 0.01).astype(np.float16).view(np.uint8)
    return packing.from_gguf(encoding.name, blocks, n, k)


def rope_tables(geometry: Geometry) -> dict[str, np.ndarray]:
    half = geometry.head_dim // 2
    angles = np.arange(geometry.max_positions)[:, None] * 10000.0 ** -(np.arange(half) / half)
    return {"rope.cos": np.cos(angles).astype(np.float32), "rope.sin": np.sin(angles).astype(np.float32)}


def attention_backend(
    geometry: Geometry, isa: str, threads: int, num_blocks: int, block_size: int, dtype: str
) -> CpuBackend:
    """One layer: rotary embedding, cache write and attention on whatever QKV holds."""
    backend = CpuBackend(threads, isa, max_tokens=1024, max_sampled=64)
    program = Program((RopeWriteKv(0), Attend(0, geometry.head_dim**-0.5)), geometry)
    backend.load(program, DictWeights(vectors=rope_tables(geometry)))
    backend.allocate_kv(num_blocks, block_size, dtype)
    return backend


@dataclass
class Part:
    """Tokens [first, last) of one sequence in a step."""

    block_table: Sequence[int]
    first: int
    last: int
    token_ids: Sequence[int] | None = None
    slot: int = 0


def batch_of(parts: Sequence[Part], capture: bool = True) -> Batch:
    width = max(len(part.block_table) for part in parts)
    tables = np.full((len(parts), width), -1, np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part.block_table)] = part.block_table
    counts = [part.last - part.first for part in parts]
    ids = [
        part.token_ids if part.token_ids is not None else [0] * count for part, count in zip(parts, counts, strict=True)
    ]
    return Batch(
        token_ids=np.concatenate([np.asarray(row, np.int32) for row in ids]),
        positions=np.concatenate([np.arange(part.first, part.last, dtype=np.int32) for part in parts]),
        row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        slots=np.array([part.slot for part in parts], np.int32),
        block_tables=tables,
        sampled_rows=np.arange(len(parts), dtype=np.int32),
        capture_logits=capture,
    )


MODEL_GEOMETRY = Geometry(
    num_layers=2, hidden=96, intermediate=160, num_heads=6, num_kv_heads=2, head_dim=32, vocab=157, max_positions=700
)


def model_program(geometry: Geometry = MODEL_GEOMETRY) -> Program:
    ops: list[Op] = [Embed("embed")]
    for layer in range(geometry.num_layers):
        ops += [
            RmsNorm(Buffer.X, Buffer.H, "norm", 1e-5),
            Linear(Buffer.H, Buffer.QKV, f"{layer}.qkv", bias="qkv.bias"),
            HeadNorm("q_norm", "k_norm", 1e-6),
            RopeWriteKv(layer),
            Attend(layer, geometry.head_dim**-0.5),
            Linear(Buffer.A, Buffer.X, f"{layer}.o", accumulate=True),
            RmsNorm(Buffer.X, Buffer.H, "norm", 1e-5),
            Linear(Buffer.H, Buffer.G, f"{layer}.gate_up"),
            SiluMul(),
            Linear(Buffer.U, Buffer.X, f"{layer}.down", accumulate=True),
        ]
    return Program(
        (*ops, SelectRows(), RmsNorm(Buffer.S, Buffer.S, "norm", 1e-5), Linear(Buffer.S, Buffer.L, "head")), geometry
    )


def model_weights(encoding: Encoding, geometry: Geometry = MODEL_GEOMETRY, seed: int = 0) -> DictWeights:
    rng = np.random.default_rng(seed)
    attention = geometry.num_heads * geometry.head_dim
    shapes = {
        "qkv": (geometry.qkv_width, geometry.hidden),
        "o": (geometry.hidden, attention),
        "gate_up": (2 * geometry.intermediate, geometry.hidden),
        "down": (geometry.hidden, geometry.intermediate),
    }
    weights = DictWeights(vectors=rope_tables(geometry))
    for layer in range(geometry.num_layers):
        for name, (n, k) in shapes.items():
            weights.matrices[f"{layer}.{name}"] = packing.pack_matrix(random_source(n, k, encoding, rng))
    for name in ("embed", "head"):
        weights.matrices[name] = packing.pack_matrix(random_source(geometry.vocab, geometry.hidden, encoding, rng))
    sizes = {
        "norm": geometry.hidden,
        "qkv.bias": geometry.qkv_width,
        "q_norm": geometry.head_dim,
        "k_norm": geometry.head_dim,
    }
    for name, size in sizes.items():
        weights.vectors[name] = (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)
    return weights


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )
