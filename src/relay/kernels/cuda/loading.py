"""Weights of a program onto the device, with every name and shape checked."""

from collections.abc import Callable, Set
from typing import TypeVar

import numpy as np
import torch

from relay.errors import CorruptModelError
from relay.kernels.cuda.file_upload import FileUpload
from relay.kernels.cuda.linear_int8 import pack_codes, quantize
from relay.kernels.cuda.ops import Device
from relay.kernels.cuda.weights import HeldWeights, WeightUpload
from relay.kernels.model_files import FileMatrix, in_files
from relay.kernels.program import Embed, HeadNorm, Linear, Program, RmsNorm
from relay.kernels.weights import WeightSource

Loaded = TypeVar("Loaded")


def load_weights(
    program: Program,
    weights: WeightSource,
    device: Device,
    upload: WeightUpload,
    shared: HeldWeights | None = None,
    *,
    coded: Set[str] = frozenset(),
) -> None:
    """Fill ``device.matrices`` and ``device.scales`` (or take the ``shared`` ones) and ``device.vectors``; ``coded`` in int8.

    Raises CorruptModelError for a missing weight or a wrong shape.
    """
    if shared is not None:
        check_shared(program, shared, coded, upload.dtype)
    held = load_matrices(program, weights, upload, coded) if shared is None else shared
    device.matrices.update(held.matrices)
    device.scales.update(held.scales)
    for name, wanted in shapes_of(program)[1].items():
        vector = _get(weights.vector, name)
        if vector.shape != wanted or vector.dtype != np.float32:
            raise CorruptModelError(f"{name} is {vector.dtype} {vector.shape}, the program needs float32 {wanted}")
        device.vectors[name] = torch.from_numpy(np.array(vector)).to(device.name)


def coded_names(program: Program, kept: Set[str] = frozenset()) -> frozenset[str]:
    """The matrices that int8 weights mean: those of linears but for one that is also the embedding, or is ``kept`` as it is."""
    embeddings = {op.weight for op in program.ops if isinstance(op, Embed)}
    return frozenset(op.weight for op in program.ops if isinstance(op, Linear)) - embeddings - kept


def load_matrices(
    program: Program, weights: WeightSource, upload: WeightUpload, coded: Set[str] = frozenset()
) -> HeldWeights:
    """Every matrix of ``program``, those of ``coded`` quantised. Raises CorruptModelError."""
    held = HeldWeights()
    left: dict[str, FileMatrix] = {}

    def keep(name: str, matrix: torch.Tensor) -> None:
        if name in coded:
            codes, held.scales[name] = quantize(matrix)
            matrix = pack_codes(codes)
        held.matrices[name] = matrix

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
    return held


def check_shared(program: Program, shared: HeldWeights, coded: Set[str], dtype: torch.dtype) -> None:
    """Raises CorruptModelError unless ``shared`` is what ``load_matrices`` would have made, as far as shapes and types tell."""
    shapes = shapes_of(program)[0]
    scales = {name: (tuple(one.shape), one.dtype) for name, one in shared.scales.items()}
    whole = {name: (tuple(one.shape), one.dtype) for name, one in shared.matrices.items() if name not in scales}
    # The layout of codes is their kernel's business: they are integers, a byte a weight or more.
    codes = [(name, shared.matrices[name]) for name in coded & shared.matrices.keys()]
    if (
        shared.matrices.keys() != shapes.keys()
        or scales != {name: (shapes[name][:1], torch.float32) for name in coded}
        or whole != {name: (shape, dtype) for name, shape in shapes.items() if name not in coded}
        or any(one.is_floating_point() for _, one in codes)
        or any(one.numel() * one.element_size() < shapes[name][0] * shapes[name][1] for name, one in codes)
    ):
        raise CorruptModelError("the weights that another process shares are not this model's")


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


def weight_bytes(program: Program, coded: Set[str] = frozenset()) -> int:
    """Bytes of all matrices of ``program``: 16 bits a weight, or 8 and the scales of ``coded``. Padding is not counted."""
    return sum(n * k + 4 * n if name in coded else 2 * n * k for name, (n, k) in shapes_of(program)[0].items())


def _get(load: Callable[[str], Loaded], name: str) -> Loaded:
    try:
        return load(name)
    except KeyError:
        raise CorruptModelError(f"the model has no weight {name}") from None
