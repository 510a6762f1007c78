"""A program run with plain numpy over one sequence at a time: what the op records mean, in the fewest lines.

No canon here (numpy's matmul adds in its own order): logits agree with any right implementation to rounding error only.
"""

import numpy as np

from relay.kernels.packing import unpack_matrix
from relay.kernels.program import (
    Attend,
    Buffer,
    Embed,
    HeadNorm,
    Linear,
    Program,
    RmsNorm,
    RopeWriteKv,
    SelectRows,
    SiluMul,
)
from relay.kernels.weights import WeightSource


def all_logits(program: Program, weights: WeightSource, token_ids: list[int]) -> np.ndarray:
    """fp32 [tokens, vocab]: the logits after every token (SelectRows selects all rows)."""
    return _Run(program, weights, token_ids).logits()


class _Run:
    def __init__(self, program: Program, weights: WeightSource, token_ids: list[int]) -> None:
        self.program, self.weights, self.ids = program, weights, np.array(token_ids)
        self.sizes = program.geometry
        self.buffers: dict[Buffer, np.ndarray] = {}
        self.kv: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def logits(self) -> np.ndarray:
        for op in self.program.ops:
            self.execute(op)
        return self.buffers[Buffer.L]

    def execute(self, op) -> None:
        b = self.buffers
        match op:
            case Embed(weight, dst):
                b[dst] = self.matrix(weight)[self.ids]
            case RmsNorm(src, dst, weight, eps):
                b[dst] = norm(b[src], eps) * self.weights.vector(weight)
            case Linear(src, dst, weight, bias, accumulate):
                y = b[src] @ self.matrix(weight).T
                if bias is not None:
                    y = y + self.weights.vector(bias)
                b[dst] = b[dst] + y if accumulate else y
            case HeadNorm(q_weight, k_weight, eps):
                q, k, v = self.heads()
                q = norm(q, eps) * self.weights.vector(q_weight)
                self.store(q, norm(k, eps) * self.weights.vector(k_weight), v)
            case RopeWriteKv(layer):
                q, k, v = self.heads()
                self.store(self.rotate(q), self.rotate(k), v)
                self.kv[layer] = self.heads()[1:]
            case Attend(layer, scale):
                b[Buffer.A] = self.attend(layer, scale)
            case SiluMul():
                gate, up = np.split(b[Buffer.G], 2, axis=1)
                b[Buffer.U] = gate / (1 + np.exp(-gate)) * up
            case SelectRows(src, dst):
                b[dst] = b[src]

    def matrix(self, name: str) -> np.ndarray:
        return unpack_matrix(self.weights.matrix(name))

    def heads(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        s = self.sizes
        parts = self.buffers[Buffer.QKV].reshape(len(self.ids), -1, s.head_dim)
        q, k, v = np.split(parts, [s.num_heads, s.num_heads + s.num_kv_heads], axis=1)
        return q, k, v

    def store(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.buffers[Buffer.QKV] = np.concatenate([q, k, v], axis=1).reshape(len(self.ids), -1)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        count = len(self.ids)
        cos = self.weights.vector("rope.cos")[:count, None, :]
        sin = self.weights.vector("rope.sin")[:count, None, :]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(self, layer: int, scale: float) -> np.ndarray:
        k, v = self.kv[layer]
        q = self.heads()[0]
        group = self.sizes.num_heads // self.sizes.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(scale)
        scores += np.triu(np.full(scores.shape[1:], -np.inf, np.float32), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(self.ids), -1)


def norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
