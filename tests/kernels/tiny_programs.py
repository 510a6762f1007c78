"""Small random programs, built by hand, and steps to run them: shared by the tests of every backend."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relay.kernels import packing
from relay.kernels.backend import Backend, Batch
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
from relay.protocol.sampling import SamplingParams

EPS = 1e-5
GEOMETRY = Geometry(
    num_layers=2, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=32, vocab=150, max_positions=400
)
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def build_program(geometry: Geometry = GEOMETRY, *, qk_norm: bool = True, bias: bool = True) -> Program:
    ops: list[Op] = [Embed("embed")]
    for i in range(geometry.num_layers):
        ops += [RmsNorm(Buffer.X, Buffer.H, f"{i}.norm1", EPS)]
        ops += [Linear(Buffer.H, Buffer.QKV, f"{i}.qkv", bias=f"{i}.qkv_bias" if bias else None)]
        if qk_norm:
            ops += [HeadNorm(f"{i}.q_norm", f"{i}.k_norm", EPS)]
        ops += [RopeWriteKv(i), Attend(i, geometry.head_dim**-0.5)]
        ops += [Linear(Buffer.A, Buffer.X, f"{i}.out", bias=f"{i}.out_bias" if bias else None, accumulate=True)]
        ops += [RmsNorm(Buffer.X, Buffer.H, f"{i}.norm2", EPS)]
        ops += [Linear(Buffer.H, Buffer.G, f"{i}.gate_up"), SiluMul()]
        ops += [Linear(Buffer.U, Buffer.X, f"{i}.down", accumulate=True)]
    ops += [SelectRows(), RmsNorm(Buffer.S, Buffer.S, "norm", EPS), Linear(Buffer.S, Buffer.L, "embed")]
    return Program(tuple(ops), geometry)


def source(values: np.ndarray, encoding: Encoding) -> packing.MatrixSource:
    """fp32 ``values`` [n, k] rounded to ``encoding`` the simplest way."""
    n, k = values.shape
    match encoding:
        case Encoding.F32:
            return packing.from_f32(values)
        case Encoding.F16:
            return packing.from_f16(values.astype(np.float16))
        case Encoding.BF16:
            return packing.from_bf16((values.view(np.uint32) >> 16).astype(np.uint16))
    grouped = values.reshape(-1, 32)
    low, high = grouped.min(axis=1), grouped.max(axis=1)
    if encoding is Encoding.Q8_0:
        scale = (np.maximum(high, -low) / 127).astype("<f2")
        q = np.rint(grouped / scale.astype(np.float32)[:, None]).clip(-127, 127).astype(np.int8)
        blocks = np.concatenate([scale.view(np.uint8).reshape(-1, 2), q.view(np.uint8)], axis=1)
        return packing.from_gguf("Q8_0", blocks, n, k)
    scale, minimum = ((high - low) / 15).astype("<f2"), low.astype("<f2")
    shifted = (grouped - minimum.astype(np.float32)[:, None]) / scale.astype(np.float32)[:, None]
    q4 = np.rint(shifted).clip(0, 15).astype(np.uint8)
    halves = np.stack([scale, minimum], axis=1).view(np.uint8)
    return packing.from_gguf("Q4_1", np.concatenate([halves, q4[:, :16] | (q4[:, 16:] << 4)], axis=1), n, k)


class Weights:
    """Random weights for ``program``, all matrices in one encoding; a ``WeightSource``."""

    def __init__(self, program: Program, encoding: Encoding = Encoding.F32, seed: int = 0) -> None:
        g = program.geometry
        generator = np.random.default_rng(seed)
        self.matrices: dict[str, PackedMatrix] = {}
        self.vectors: dict[str, np.ndarray] = {}

        def vector(name: str, size: int, around: float) -> None:
            self.vectors[name] = (around + 0.2 * generator.normal(size=size)).astype(np.float32)

        for op in program.ops:
            match op:
                case Embed(name):
                    values = generator.normal(size=(g.vocab, g.hidden)).astype(np.float32)
                    self.matrices[name] = packing.pack_matrix(source(values, encoding))
                case Linear(src, dst, name, bias):
                    n, k = g.width(dst), g.width(src)
                    if name not in self.matrices:
                        values = (generator.normal(size=(n, k)) / np.sqrt(k)).astype(np.float32)
                        self.matrices[name] = packing.pack_matrix(source(values, encoding))
                    if bias:
                        vector(bias, n, 0.0)
                case RmsNorm(src, _, name):
                    vector(name, g.width(src), 1.0)
                case HeadNorm(q_name, k_name):
                    vector(q_name, g.head_dim, 1.0)
                    vector(k_name, g.head_dim, 1.0)
        frequency = 10000.0 ** (-np.arange(g.head_dim // 2) * 2 / g.head_dim)
        angle = np.arange(g.max_positions)[:, None] * frequency
        self.vectors["rope.cos"] = np.cos(angle).astype(np.float32)
        self.vectors["rope.sin"] = np.sin(angle).astype(np.float32)

    def matrix(self, name: str) -> PackedMatrix:
        return self.matrices[name]

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name]


@dataclass
class Row:
    """One sequence's part of a step: its ``tokens`` start at position ``start``."""

    slot: int
    tokens: list[int]
    start: int
    table: list[int]
    sample: bool = True


def make_batch(rows: Sequence[Row], capture: bool = True) -> Batch:
    tables = np.full((len(rows), max(len(row.table) for row in rows)), -7, np.int32)  # entries past a row's need
    for index, row in enumerate(rows):
        tables[index, : len(row.table)] = row.table
    return Batch(
        token_ids=np.array([token for row in rows for token in row.tokens], np.int32),
        positions=np.array([row.start + i for row in rows for i in range(len(row.tokens))], np.int32),
        row_starts=np.cumsum([0, *(len(row.tokens) for row in rows)], dtype=np.int32),
        slots=np.array([row.slot for row in rows], np.int32),
        block_tables=tables,
        sampled_rows=np.array([index for index, row in enumerate(rows) if row.sample], np.int32),
        capture_logits=capture,
    )


def run_step(backend: Backend, program: Program, rows: Sequence[Row]) -> np.ndarray:
    """All ops on ``rows`` in the ranges a runner uses, then ``sample``; returns the logits [sampled, vocab]."""
    batch = make_batch(rows)
    bounds = [0, *program.sink_points, len(program.ops)]
    for start, stop in itertools.pairwise(bounds):
        backend.run(start, stop, batch)
    if len(batch.sampled_rows) == 0:
        return np.empty((0, program.geometry.vocab), np.float32)
    backend.sample(batch)
    return backend.logits().copy()


def kv_bytes(backend: Backend, program: Program, table: Sequence[int], first: int, count: int) -> list[bytes]:
    """The canonical bytes of every layer."""
    out = []
    for layer in range(program.geometry.num_layers):
        raw = bytearray(count * backend.kv_bytes_per_token_layer())
        backend.read_kv(layer, np.array(table, np.int32), first, count, memoryview(raw))
        out.append(bytes(raw))
    return out


def fill_kv(backend: Backend, program: Program, blocks: Sequence[int], block_size: int, value: float) -> None:
    """Every value of ``blocks`` becomes fp32 ``value``: NaN shows whoever reads what was never written."""
    size = len(blocks) * block_size * backend.kv_bytes_per_token_layer() // 4
    raw = memoryview(np.full(size, value, np.float32).tobytes())
    for layer in range(program.geometry.num_layers):
        backend.write_kv(layer, np.array(blocks, np.int32), 0, len(blocks) * block_size, raw)


def plain_logits(program: Program, weights: Weights, tokens: Sequence[int]) -> np.ndarray:
    """Logits of every position by a direct fp64 implementation that shares no code with the backends. [tokens, vocab]"""
    g = program.geometry
    w = {name: packing.unpack_matrix(matrix).astype(np.float64) for name, matrix in weights.matrices.items()}
    w |= {name: value.astype(np.float64) for name, value in weights.vectors.items()}
    t = len(tokens)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight

    def rope(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        c, s = w["rope.cos"][:t, None], w["rope.sin"][:t, None]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    x = w["embed"][list(tokens)]
    for i in range(g.num_layers):
        qkv = norm(x, w[f"{i}.norm1"]) @ w[f"{i}.qkv"].T + w.get(f"{i}.qkv_bias", 0.0)
        q, k, v = (
            part.reshape(t, -1, g.head_dim)
            for part in np.split(qkv, [g.num_heads * g.head_dim, g.num_heads * g.head_dim + g.kv_width], axis=1)
        )
        if f"{i}.q_norm" in w:
            q, k = norm(q, w[f"{i}.q_norm"]), norm(k, w[f"{i}.k_norm"])
        q, k = rope(q), rope(k)
        out = np.empty_like(q)
        for head in range(g.num_heads):
            group = head // (g.num_heads // g.num_kv_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(g.head_dim)
            scores[np.triu_indices(t, 1)] = -np.inf
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, group]
        x = x + out.reshape(t, -1) @ w[f"{i}.out"].T + w.get(f"{i}.out_bias", 0.0)
        gate, up = np.split(norm(x, w[f"{i}.norm2"]) @ w[f"{i}.gate_up"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{i}.down"].T
    return norm(x, w["norm"]) @ w["embed"].T
