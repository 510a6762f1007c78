"""A fixed tiny model whose outputs name the arithmetic: a compiler, library or processor that changes a bit changes the digest."""

import hashlib
from functools import cache

import numpy as np

from relay.kernels import packing
from relay.kernels.backend import Batch
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
from relay.kernels.weights import PackedMatrix
from relay.protocol.sampling import SamplingParams

_GEOMETRY = Geometry(
    num_layers=1, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab=70, max_positions=320
)
_PROMPT = 300  # tokens: two splits of the attention
_OPS: tuple[Op, ...] = (
    Embed("embed"),
    RmsNorm(Buffer.X, Buffer.H, "norm", 1e-5),
    Linear(Buffer.H, Buffer.QKV, "qkv", bias="qkv.bias"),
    HeadNorm("q_norm", "k_norm", 1e-6),
    RopeWriteKv(0),
    Attend(0, 0.25),
    Linear(Buffer.A, Buffer.X, "o", accumulate=True),
    RmsNorm(Buffer.X, Buffer.H, "norm", 1e-5),
    Linear(Buffer.H, Buffer.G, "gate_up"),
    SiluMul(),
    Linear(Buffer.U, Buffer.X, "down", accumulate=True),
    SelectRows(),
    RmsNorm(Buffer.S, Buffer.S, "norm", 1e-5),
    Linear(Buffer.S, Buffer.L, "head"),
)


class _ProbeWeights:
    """Values in [-0.5, 0.5) from integer arithmetic alone; each encoding is used once."""

    def matrix(self, name: str) -> PackedMatrix:
        n, k = {"embed": (70, 64), "qkv": (128, 64), "o": (64, 64), "gate_up": (192, 64), "down": (64, 96), "head": (70, 64)}[
            name
        ]
        values = _values(name, n * k).reshape(n, k)
        match name:
            case "embed" | "o":
                return packing.pack_matrix(packing.from_gguf("Q8_0", _blocks(name, n * k // 32, 34, 1), n, k))
            case "qkv":
                return packing.pack_matrix(packing.from_gguf("Q4_1", _blocks(name, n * k // 32, 20, 2), n, k))
            case "gate_up":
                return packing.pack_matrix(packing.from_bf16((values.view(np.uint32) >> 16).astype(np.uint16)))
            case "down":
                return packing.pack_matrix(packing.from_f16(values.astype(np.float16)))
        return packing.pack_matrix(packing.from_f32(values))

    def vector(self, name: str) -> np.ndarray:
        half = _GEOMETRY.head_dim // 2
        sizes = {"norm": 64, "qkv.bias": 128, "q_norm": 16, "k_norm": 16}
        return _values(name, sizes.get(name, _GEOMETRY.max_positions * half)) * np.float32(2)


def _values(name: str, count: int) -> np.ndarray:
    """fp32 [count]: multiples of 2^-24, exact on every machine."""
    seed = np.uint32(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little"))
    words = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(2654435761) + seed
    words = (words ^ (words >> np.uint32(15))) * np.uint32(2246822519)
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)


def _blocks(name: str, count: int, block_bytes: int, halves: int) -> np.ndarray:
    blocks = (_values(name, count * block_bytes).view(np.uint32) >> 3).astype(np.uint8).reshape(count, block_bytes)
    scales = (_values(name + ".scales", count * halves) * np.float32(0.01)).astype(np.float16)
    blocks[:, : 2 * halves] = scales.reshape(count, halves).view(np.uint8)
    return blocks


@cache
def probe_digest(isa: str, kv_dtype: str) -> str:
    """Hex digest over activations, cache and logits of a prompt of 300 tokens and one token decoded after it."""
    backend = CpuBackend(1, isa, max_tokens=_PROMPT, max_sampled=1)
    try:
        backend.load(Program(_OPS, _GEOMETRY), _ProbeWeights())
        blocks = -(-(_PROMPT + 1) // 16)
        backend.allocate_kv(blocks, 16, kv_dtype)
        table = np.arange(blocks, dtype=np.int32)[None, ::-1].copy()
        prompt = [7 * i % _GEOMETRY.vocab for i in range(_PROMPT)]
        backend.bind_slot(0, SamplingParams(max_tokens=2, temperature=0.0), 0, prompt, [])
        digest = hashlib.blake2b(digest_size=16)
        for first, tokens in ((0, prompt), (_PROMPT, [-1])):
            batch = Batch(
                token_ids=np.array(tokens, np.int32),
                positions=np.arange(first, first + len(tokens), dtype=np.int32),
                row_starts=np.array([0, len(tokens)], np.int32),
                slots=np.zeros(1, np.int32),
                block_tables=table,
                sampled_rows=np.zeros(1, np.int32),
                capture_logits=True,
            )
            backend.run(0, len(_OPS), batch)
            backend.sample(batch)
            digest.update(backend.logits().tobytes())
        kv = bytearray((_PROMPT + 1) * backend.kv_bytes_per_token_layer())
        backend.read_kv(0, table[0], 0, _PROMPT + 1, memoryview(kv))
        digest.update(kv)
        return digest.hexdigest()
    finally:
        backend.close()
