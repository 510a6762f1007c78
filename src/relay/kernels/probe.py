"""A fixed run of every op on fixed numbers, whose digest goes into the numerics id.

A compiler, library or processor that changes one bit of one op changes the digest, and thereby the id, whatever the version
numbers say. The numbers come from the sampler's Philox, so they are the same everywhere.
"""

import hashlib
import struct
from typing import ClassVar

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
from relay.kernels.sampler_math import philox_words
from relay.kernels.weights import Encoding, PackedMatrix
from relay.protocol.sampling import SamplingParams

GEOMETRY = Geometry(
    num_layers=2, hidden=96, intermediate=160, num_heads=4, num_kv_heads=2, head_dim=32, vocab=200, max_positions=320
)
FILLED = 290  # positions whose KV is written, not computed: over one split of 256, ending inside a tile
CHUNK = 3
BLOCK_SIZE = 16
EPS = 1e-5


def probe_digest(backend: Backend, kv_dtype: str) -> str:
    """16 hex digits of everything a fresh ``backend`` computes: KV bytes, logits, a sampled and a greedy token. Closes it."""
    weights = ProbeWeights()
    digest = hashlib.blake2b(digest_size=8, person=b"relay-probe")
    backend.load(probe_program(), weights)
    blocks = -(-(FILLED + CHUNK + 1) // BLOCK_SIZE)
    backend.allocate_kv(blocks, BLOCK_SIZE, kv_dtype)
    table = np.arange(blocks, dtype=np.int32)[::-1].copy()
    for layer in range(GEOMETRY.num_layers):
        backend.write_kv(layer, table, 0, FILLED, memoryview(_filled_kv(layer, kv_dtype)))
    prompt = [int(word) % GEOMETRY.vocab for word in _words("tokens", FILLED + CHUNK)]
    params = SamplingParams(
        max_tokens=8, temperature=0.8, top_k=50, top_p=0.9, min_p=1e-3, logprobs=3, seed=0x0123456789ABCDEF
    )
    tokens = np.array(prompt[FILLED:], np.int32)
    start = FILLED
    for step in range(2):  # a chunk, then a single token
        backend.bind_slot(0, params, 0, prompt, [])
        batch = Batch(
            token_ids=tokens,
            positions=np.arange(start, start + len(tokens), dtype=np.int32),
            row_starts=np.array([0, len(tokens)], np.int32),
            slots=np.zeros(1, np.int32),
            block_tables=table[None],
            sampled_rows=np.zeros(1, np.int32),
            capture_logits=True,
        )
        backend.run(0, len(probe_program().ops), batch)
        (sampled,) = backend.sample(batch)
        digest.update(np.ascontiguousarray(backend.logits(), dtype="<f4").tobytes())
        assert sampled.logprob is not None
        numbers = [sampled.logprob, *(value for pair in sampled.top for value in pair)]
        digest.update(struct.pack(f"<i{len(numbers)}d", sampled.token_id, *numbers))
        start += len(tokens)
        tokens = np.array([7 + step], np.int32)
    raw = bytearray((start - FILLED) * backend.kv_bytes_per_token_layer())
    for layer in range(GEOMETRY.num_layers):
        backend.read_kv(layer, table, FILLED, start - FILLED, memoryview(raw))
        digest.update(raw)
    backend.close()
    return digest.hexdigest()


def probe_program() -> Program:
    """Two layers that use every op; each linear has another encoding."""
    ops: list[Op] = [Embed("embed")]
    for layer in range(GEOMETRY.num_layers):
        ops += [
            RmsNorm(Buffer.X, Buffer.H, f"{layer}.norm", EPS),
            Linear(Buffer.H, Buffer.QKV, f"{layer}.qkv", bias=f"{layer}.bias"),
            HeadNorm(f"{layer}.q_norm", f"{layer}.k_norm", EPS),
            RopeWriteKv(layer),
            Attend(layer, GEOMETRY.head_dim**-0.5),
            Linear(Buffer.A, Buffer.X, f"{layer}.out", accumulate=True),
            RmsNorm(Buffer.X, Buffer.H, f"{layer}.norm", EPS),
            Linear(Buffer.H, Buffer.G, f"{layer}.gate_up"),
            SiluMul(),
            Linear(Buffer.U, Buffer.X, f"{layer}.down", accumulate=True),
        ]
    ops += [SelectRows(), RmsNorm(Buffer.S, Buffer.S, "norm", EPS), Linear(Buffer.S, Buffer.L, "embed")]
    return Program(tuple(ops), GEOMETRY)


class ProbeWeights:
    """The probe's ``WeightSource``: every name gives fixed pseudo-random numbers, matrices in all encodings."""

    _ENCODINGS: ClassVar = {
        "embed": Encoding.Q8_0,
        "0.qkv": Encoding.F32,
        "0.out": Encoding.Q4_1,
        "0.gate_up": Encoding.BF16,
        "0.down": Encoding.F16,
        "1.qkv": Encoding.Q4_1,
        "1.out": Encoding.F32,
        "1.gate_up": Encoding.Q8_0,
        "1.down": Encoding.Q4_1,
    }

    def matrix(self, name: str) -> PackedMatrix:
        g = GEOMETRY
        part = name.split(".")[-1]
        n, k = {
            "embed": (g.vocab, g.hidden),
            "qkv": (g.qkv_width, g.hidden),
            "out": (g.hidden, g.num_heads * g.head_dim),
            "gate_up": (2 * g.intermediate, g.hidden),
            "down": (g.hidden, g.intermediate),
        }[part]
        return packing.pack_matrix(_source(name, self._ENCODINGS[name], n, k))

    def vector(self, name: str) -> np.ndarray:
        g = GEOMETRY
        if name.startswith("rope."):
            return _uniform(name, g.max_positions * g.head_dim // 2).reshape(g.max_positions, -1)
        size = {"bias": g.qkv_width, "q_norm": g.head_dim, "k_norm": g.head_dim, "norm": g.hidden}[name.split(".")[-1]]
        return _uniform(name, size) + np.float32(0 if name.endswith("bias") else 1)


def _source(name: str, encoding: Encoding, n: int, k: int) -> packing.MatrixSource:
    values = _uniform(name, n * k).reshape(n, k) * np.float32(0.25)
    groups = n * k // packing.GROUP
    match encoding:
        case Encoding.F32:
            return packing.from_f32(values)
        case Encoding.F16:
            return packing.from_f16(values.astype(np.float16))
        case Encoding.BF16:
            return packing.from_bf16((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
        case Encoding.Q8_0:
            blocks = _bytes(name, groups, 34)
            blocks[:, :2] = (
                (_uniform(name + ".d", groups) * np.float32(0.002)).astype("<f2").view(np.uint8).reshape(-1, 2)
            )
            return packing.from_gguf("Q8_0", blocks, n, k)
        case Encoding.Q4_1:
            blocks = _bytes(name, groups, 20)
            scales = _uniform(name + ".d", groups) * np.float32(0.03)
            halves = np.stack([scales, scales * np.float32(-7.5)], axis=1).astype("<f2")
            blocks[:, :4] = halves.view(np.uint8)
            return packing.from_gguf("Q4_1", blocks, n, k)


def _filled_kv(layer: int, kv_dtype: str) -> bytes:
    """Stored K then V bytes of the first ``FILLED`` positions; 16-bit types by truncation, so no rounding is involved."""
    values = _uniform(f"kv.{layer}", 2 * FILLED * GEOMETRY.kv_width)
    if kv_dtype == "float16":
        return (np.trunc(values * np.float32(1024)) / np.float32(1024)).astype("<f2").tobytes()
    if kv_dtype == "bfloat16":
        return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    return values.astype("<f4").tobytes()


def _words(name: str, count: int) -> np.ndarray:
    """``count`` 32-bit words (uint64) that depend on ``name`` only."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return philox_words(np.arange(count, dtype=np.int64), 0, 0, seed)


def _uniform(name: str, count: int) -> np.ndarray:
    """fp32 in [-1, 1), multiples of 2^-23, exact."""
    return ((_words(name, count) >> np.uint64(8)).astype(np.float64) * 2.0**-23 - 1.0).astype(np.float32)


def _bytes(name: str, rows: int, width: int) -> np.ndarray:
    return (_words(name, rows * width) & np.uint64(0xFF)).astype(np.uint8).reshape(rows, width)
