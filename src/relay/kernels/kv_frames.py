"""KV of one transfer frame as devices copy it: which positions, where the bytes lie, and the digest taken while they move.

The digest of a payload is the sum over its little-endian 32-bit words w_i of (w_i + 1) · weight(i), modulo 2^64, folded to 32 bits.
weight(i) is odd and looks random. Every word counts by its place, a zero one too; any one word that changed changes the sum;
and integer sums have no order, so thousands of programs of a device may take it together. numpy's is the definition.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MIX = 0xD6E8FEB86659FD93


Heads = tuple[int, int]
"""(first, how many) of the KV heads."""


class SharingFailed(Exception):
    """Memory of a device could not be shared between processes; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class KvRange:
    """``count`` positions from ``first`` of one sequence, in ``layers`` layers from ``layer`` on; ``heads`` None: all."""

    layer: int
    layers: int
    first: int
    count: int
    block_table: np.ndarray  # int32
    heads: Heads | None = None


class Span(NamedTuple):
    """``size`` bytes at ``offset`` of memory on a device; ``region`` is what the backend calls it."""

    region: Any
    offset: int
    size: int


Place = memoryview | Span
"""Where a payload lies: in host memory or on a device."""


def weights(first: int, count: int) -> np.ndarray:
    """uint64 [count] of words ``first``…"""
    x = (np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    x ^= x >> np.uint64(32)
    x *= np.uint64(MIX)
    x ^= x >> np.uint64(32)
    return x | np.uint64(1)


def payload_sum(data: "bytes | bytearray | memoryview") -> int:
    """The sum modulo 2^64. The size must be a multiple of 4, as every KV payload's is."""
    words = np.frombuffer(data, "<u4").astype(np.uint64)
    total = 0
    for start in range(0, len(words), 1 << 16):
        part = words[start : start + (1 << 16)]
        total += int(((part + np.uint64(1)) * weights(start, len(part))).sum(dtype=np.uint64))
    return total & 0xFFFFFFFFFFFFFFFF


def folded(total: int) -> int:
    """The 32 bits that a frame's header carries."""
    return (total ^ (total >> 32)) & 0xFFFFFFFF


def payload_digest(data: "bytes | bytearray | memoryview") -> int:
    """The digest of a whole payload."""
    return folded(payload_sum(data))
