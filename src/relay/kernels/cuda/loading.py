"""Weights of a program onto the device, with every name and shape checked."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from relay.errors import CorruptModelError
from relay.kernels.cuda.file_upload import FileUpload
from relay.kernels.cuda.linear_int8 import pack_codes, quantize
from relay.kernels.cuda.ops import Device
from relay.kernels.cuda.weights import WeightUpload
from relay.kernels.model_files import FileMatrix, in_files
from relay.kernels.program import Embed, HeadNorm, Linear, Program, RmsNorm
from relay.kernels.weights import WeightSource

Loaded = TypeVar("Loaded")


def load_weights(
    program: Program,
    weights: WeightSource,
    device: Device,
    upload: WeightUpload,
    shared: dict[str, torch.Tensor] | None = None,
    *,
    quantized: bool = False,
) -> None:
    """Fill ``device.matrices`` (or take the ``shared`` ones) and ``device.vectors``; ``quantized``: int8, with ``device.scales``.

    Raises CorruptModelError for a missing weight or a wrong shape.
    """
    matrices, vectors = shapes_of(program)
    if shared is not None:
        if {name: tuple(tensor.shape) for name, tensor in shared.items()} != matrices:
            raise CorruptModelError("the weights that another process shares are not this model's")
        device.matrices.update(shared)
    else:
        device.matrices.update(load_matrices(program, weights, upload, device.scales if quantized else None))
    for name, wanted in vectors.items():
        vector = _get(weights.vector, name)
        if vector.shape != wanted or vector.dtype != np.float32:
            raise CorruptModelError(f"{name} is {vector.dtype} {vector.shape}, the program needs float32 {wanted}")
        device.vectors[name] = torch.from_numpy(np.array(vector)).to(device.name)


def load_matrices(
    program: Program, weights: WeightSource, upload: WeightUpload, scales: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Every matrix of ``program``, 16-bit [n, k]. With ``scales``, which is filled, those of linears are int8 but for one that is
    also the embedding. Raises CorruptModelError."""
    found: dict[str, torch.Tensor] = {}
    left: dict[str, FileMatrix] = {}
    whole = {op.weight for op in program.ops if isinstance(op, Embed)}

    def keep(name: str, matrix: torch.Tensor) -> None:
        if scales is not None and name not in whole:
            codes, scales[name] = quantize(matrix)
            matrix = pack_codes(codes)
        found[name] = matrix

    for name, shape in shapes_of(program)[0].items():
        source = _get(lambda name: in_files(weights, name) or weights.matrix(name), name)
        if (source.n, source.k) != shape:
            raise CorruptModelError(f"weight {name} is [{source.n}, {source.k}], the program needs {list(shape)}")
        if isinstance(source, FileMatrix):
            left[name] = source
        else:
            keep(name, upload.matrix(source))
    if left:
        FileUpload(upload.device, upload.progress, upload.dtype).load(left, keep)
    return found


def shapes_of(program: Program) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, ...]]]:
    """Shapes of the matrices [n, k] and of the vectors that ``program`` reads, by name."""
    geometry = program.geometry
    matrices: dict[str, tuple[int, int]] = {}
    vectors: dict[str, tuple[int, ...]] = {}
    vectors["rope.cos"] = vectors["rope.sin"] = (geometry.max_positions, geometry.head_dim // 2)
    for op in program.ops:
        match op:
            case Embed(weight, dst):
                matrices[weight] = (geometry.vocab, geometry.width(dst))
            case Linear(src, dst, weight, bias):
                outputs = geometry.width(dst) if op.outputs is None else op.outputs
                matrices[weight] = (outputs, geometry.width(src))
                if bias is not None:
                    vectors[bias] = (outputs,)
            case RmsNorm(src, _, weight):
                vectors[weight] = (geometry.width(src),)
            case HeadNorm(q_weight, k_weight):
                vectors[q_weight] = vectors[k_weight] = (geometry.head_dim,)
    return matrices, vectors


def weight_bytes(program: Program) -> int:
    """Bytes of all matrices of ``program`` in bf16."""
    return 2 * sum(n * k for n, k in shapes_of(program)[0].values())


def _get(load: Callable[[str], Loaded], name: str) -> Loaded:
    try:
        return load(name)
    except KeyError:
        raise CorruptModelError(f"the model has no weight {name}") from None
