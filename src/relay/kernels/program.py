"""The language between models and backends: a model is a list of op records over named buffers.

An architecture is built once as a ``Program``; ``reference`` interprets it op by op, ``cpu`` runs ranges of it in one C
call, ``cuda`` captures it in a graph. Every op works on rows (one row a token of the step) and the result of a row depends
on that row (and, for ``Attend``, on the KV cache) only: see docs/decisions/0003-canon.md for the order of every addition.

Buffers hold fp32 (or the activation dtype of the backend) as [rows, width]; ``Geometry.width`` gives the widths.
"""

from dataclasses import dataclass
from enum import StrEnum


class Buffer(StrEnum):
    X = "x"  # residual stream                    [rows, hidden]
    H = "h"  # normed input of a linear           [rows, hidden]
    QKV = "qkv"  # q | k | v of all heads         [rows, (heads + 2 * kv_heads) * head_dim]
    A = "a"  # attention output                   [rows, heads * head_dim]
    G = "g"  # gate | up                          [rows, 2 * intermediate]
    U = "u"  # silu(gate) * up                    [rows, intermediate]
    S = "s"  # final norm of the sampled rows     [sampled, hidden]
    L = "l"  # logits of the sampled rows         [sampled, vocab], always fp32


@dataclass(frozen=True, slots=True)
class Embed:
    """dst[r] = table[token of r]."""

    weight: str
    dst: Buffer = Buffer.X


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """dst[r] = src[r] / sqrt(mean(src[r]^2) + eps) * weight."""

    src: Buffer
    dst: Buffer
    weight: str
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """dst[r, n] (=, or += where ``accumulate``) round(sum over k ascending of src[r, k] * weight[n, k]) + bias[n].

    The product is rounded to the activation dtype before bias or residual are applied, in that order. ``outputs``: how many
    of dst's first columns it computes; None: all (a rank of several computes a part of the logits).
    """

    src: Buffer
    dst: Buffer
    weight: str
    bias: str | None = None
    accumulate: bool = False
    outputs: int | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every q head and every k head by itself, in place in QKV (Qwen3's QK-norm)."""

    q_weight: str
    k_weight: str
    eps: float


@dataclass(frozen=True, slots=True)
class RopeWriteKv:
    """Rotate q and k in QKV by the table row of the token's position (halves rotated, as transformers does), then write
    k and v of the row to the cache of ``layer``, rounded to the KV dtype. After this op the layer's ``LayerSink`` fires."""

    layer: int


@dataclass(frozen=True, slots=True)
class Attend:
    """A[r] = causal attention of row r's q heads over positions 0..position(r) of its sequence, read from the cache."""

    layer: int
    scale: float


@dataclass(frozen=True, slots=True)
class SiluMul:
    """U[r] = silu(G[r, :intermediate]) * G[r, intermediate:]."""


@dataclass(frozen=True, slots=True)
class SelectRows:
    """S[i] = src[row to sample i]: from here on only the sampled rows are computed."""

    src: Buffer = Buffer.X
    dst: Buffer = Buffer.S


Op = Embed | RmsNorm | Linear | HeadNorm | RopeWriteKv | Attend | SiluMul | SelectRows


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes a backend needs to lay out buffers and the KV cache."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int  # rows of the RoPE table

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def width(self, buffer: Buffer) -> int:
        """Columns of ``buffer``."""
        return {
            Buffer.X: self.hidden,
            Buffer.H: self.hidden,
            Buffer.QKV: self.qkv_width,
            Buffer.A: self.num_heads * self.head_dim,
            Buffer.G: 2 * self.intermediate,
            Buffer.U: self.intermediate,
            Buffer.S: self.hidden,
            Buffer.L: self.vocab,
        }[buffer]


@dataclass(frozen=True, slots=True)
class Program:
    """The op records of one model in execution order.

    ``sink_points[i]`` is the index just after layer i's ``RopeWriteKv``: running [0, sink_points[0]),
    [sink_points[0], sink_points[1]), … lets the caller announce each layer's KV before its attention runs.
    """

    ops: tuple[Op, ...]
    geometry: Geometry

    @property
    def sink_points(self) -> tuple[int, ...]:
        return tuple(i + 1 for i, op in enumerate(self.ops) if isinstance(op, RopeWriteKv))
