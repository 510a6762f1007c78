"""Packed weights: what a pack file holds and what every backend loads.

A matrix stays in its source precision and is widened to fp32 in registers. Widening is exact (checked bit for bit
against the gguf package), so the encoding changes speed and memory, never a bit of the output.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np


class Encoding(IntEnum):
    """How a packed matrix stores w[n, k]; all scales lie along k in groups of 32."""

    F32 = 0
    BF16 = 1  # w = bits << 16
    F16 = 2
    Q8_0 = 3  # w = int8 * fp16 scale                     (GGUF Q8_0)
    Q4_1 = 4  # w = uint4 * fp16 scale + fp16 minimum     (GGUF Q4_1; Q4_0 as minimum = -8 * scale)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One linear or embedding weight [n, k] in panels of 64 outputs; ``data`` is uint8, 64-byte aligned, usually a mapped file.

    ``n`` is the logical number of outputs; panels are padded with zeros to a multiple of 64.
    Panel layout by encoding is documented in ``kernels/packing.py``.
    """

    n: int
    k: int
    encoding: Encoding
    data: np.ndarray  # uint8 [bytes]


class WeightSource(Protocol):
    """Where a backend gets weights by name: an open pack file, or a dict in tests."""

    def matrix(self, name: str) -> PackedMatrix:
        """The packed matrix ``name``; KeyError if the pack has none."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """The fp32 vector or table ``name`` (norm weights, biases, ``rope.cos`` and ``rope.sin`` [max_positions, head_dim/2])."""
        ...
