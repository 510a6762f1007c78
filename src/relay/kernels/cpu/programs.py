"""Turns a program and its weights into the C op records, checking every shape once so that the kernels need not."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from relay.errors import CorruptModelError
from relay.kernels import canon
from relay.kernels.cpu import records
from relay.kernels.cpu.records import BUFFER_INDEX, OpKind
from relay.kernels.packing import packed_bytes
from relay.kernels.program import (
    Attend,
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
from relay.kernels.weights import PackedMatrix, WeightSource

_T = TypeVar("_T")


@dataclass(slots=True)
class BoundProgram:
    """Op records that point into weights; ``kept`` keeps the arrays alive."""

    program: Program
    ops: "ctypes.Array[records.Op]"
    rope_cos: np.ndarray
    rope_sin: np.ndarray
    widest_k: int
    kept: list[np.ndarray]


def bind_program(program: Program, weights: WeightSource) -> BoundProgram:
    """Look up and check every weight of ``program``. Raises CorruptModelError naming the weight."""
    binder = _Binder(program.geometry, weights)
    ops = (records.Op * len(program.ops))(*(binder.record(op) for op in program.ops))
    half = program.geometry.head_dim // 2
    tables = [binder.vector(name, program.geometry.max_positions * half) for name in ("rope.cos", "rope.sin")]
    return BoundProgram(program, ops, tables[0], tables[1], binder.widest_k, binder.kept)


class _Binder:
    def __init__(self, geometry: Geometry, weights: WeightSource) -> None:
        self.geometry = geometry
        self.weights = weights
        self.kept: list[np.ndarray] = []
        self.widest_k = 1

    def record(self, op: Op) -> records.Op:
        width = self.geometry.width
        match op:
            case Embed():
                return records.Op(
                    kind=OpKind.EMBED,
                    dst=BUFFER_INDEX[op.dst],
                    **self.matrix(op.weight, self.geometry.vocab, width(op.dst)),
                )
            case RmsNorm():
                if width(op.src) != width(op.dst):
                    raise CorruptModelError(f"norm {op.weight}: {op.src} and {op.dst} differ in width")
                return records.Op(
                    kind=OpKind.RMS_NORM,
                    src=BUFFER_INDEX[op.src],
                    dst=BUFFER_INDEX[op.dst],
                    n=width(op.src),
                    vector=self.pointer(op.weight, width(op.src)),
                    eps=op.eps,
                )
            case Linear():
                outputs = width(op.dst) if op.outputs is None else op.outputs
                return records.Op(
                    kind=OpKind.LINEAR,
                    src=BUFFER_INDEX[op.src],
                    dst=BUFFER_INDEX[op.dst],
                    accumulate=int(op.accumulate),
                    bias=None if op.bias is None else self.pointer(op.bias, outputs, pad=True),
                    **self.matrix(op.weight, outputs, width(op.src)),
                )
            case HeadNorm():
                return records.Op(
                    kind=OpKind.HEAD_NORM,
                    vector=self.pointer(op.q_weight, self.geometry.head_dim),
                    vector2=self.pointer(op.k_weight, self.geometry.head_dim),
                    eps=op.eps,
                )
            case RopeWriteKv():
                return records.Op(kind=OpKind.ROPE_WRITE_KV, layer=self.layer(op.layer))
            case Attend():
                return records.Op(
                    kind=OpKind.ATTEND, layer=self.layer(op.layer), log2_scale=np.float32(op.scale * canon.LOG2E_64)
                )
            case SiluMul():
                return records.Op(kind=OpKind.SILU_MUL)
            case SelectRows():
                if width(op.src) != width(op.dst):
                    raise CorruptModelError(f"{op.src} and {op.dst} differ in width")
                return records.Op(kind=OpKind.SELECT_ROWS, src=BUFFER_INDEX[op.src], dst=BUFFER_INDEX[op.dst])

    def layer(self, layer: int) -> int:
        if not 0 <= layer < self.geometry.num_layers:
            raise CorruptModelError(f"layer {layer} of {self.geometry.num_layers}")
        return layer

    def matrix(self, name: str, n: int, k: int) -> dict[str, int]:
        matrix: PackedMatrix = self._find(self.weights.matrix, name)
        if (matrix.n, matrix.k) != (n, k):
            raise CorruptModelError(f"{name} is [{matrix.n}, {matrix.k}], the model needs [{n}, {k}]")
        data = matrix.data
        if data.dtype != np.uint8 or data.size != packed_bytes(n, k, matrix.encoding) or not data.flags.c_contiguous:
            raise CorruptModelError(
                f"{name}: {data.size} packed bytes instead of {packed_bytes(n, k, matrix.encoding)}"
            )
        self.kept.append(data)
        self.widest_k = max(self.widest_k, k)
        return {"encoding": int(matrix.encoding), "n": n, "k": k, "weight": data.ctypes.data}

    def vector(self, name: str, size: int, pad: bool = False) -> np.ndarray:
        """fp32, contiguous; with ``pad`` zeros follow up to a multiple of 16, for whole-vector loads."""
        vector: np.ndarray = self._find(self.weights.vector, name)
        if vector.size != size or vector.dtype != np.float32:
            raise CorruptModelError(f"{name} is {vector.dtype} {vector.shape}, the model needs float32 [{size}]")
        flat = np.ascontiguousarray(vector).reshape(-1)
        if pad and size % 16:
            flat = np.concatenate([flat, np.zeros(-size % 16, np.float32)])
        self.kept.append(flat)
        return flat

    def pointer(self, name: str, size: int, pad: bool = False) -> int:
        return self.vector(name, size, pad).ctypes.data

    @staticmethod
    def _find(lookup: Callable[[str], _T], name: str) -> _T:
        try:
            return lookup(name)
        except KeyError:
            raise CorruptModelError(f"the model has no weight {name}") from None
