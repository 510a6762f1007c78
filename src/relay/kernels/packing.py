"""The panel layout of packed weights, and numpy code that packs and unpacks it.

A matrix w[n, k] is cut into *panels* of 64 outputs (n padded with zeros), stored one after another; inside a panel k ascends, so
a kernel streams memory in order while 64 outputs run their chains side by side. Little endian. With P = ceil(n / 64), G = k / 32:

===========  ==============================================================================================  =============
encoding     ``data``                                                                                        bytes
===========  ==============================================================================================  =============
F32          float32 [P][k][64]                                                                              P * k * 256
BF16, F16    uint16  [P][k][64], the bit patterns                                                            P * k * 128
Q8_0         [P][G] of { float16 scale[64]; int8 q[32][64] }                                                 P * G * 2176
Q4_1         [P][G] of { float16 scale[64]; float16 minimum[64]; uint32 words[4][64] }                       P * G * 1280
===========  ==============================================================================================  =============

Nibble i (bits 4i..4i+3) of ``words[j][c]`` is q of k = 32 * group + 8 * j + i: a 16-lane kernel loads 16 words and has eight
successive steps of 16 chains, one shift each. Widening is exact; see docs/decisions/0003-canon.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relay.kernels.weights import Encoding, PackedMatrix

PANEL = 64
GROUP = 32

_GGUF_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
_Q8_GROUP_BYTES = 2176
_Q4_GROUP_BYTES = 1280


def packed_bytes(n: int, k: int, encoding: Encoding) -> int:
    """Length of ``PackedMatrix.data`` for a matrix [n, k]."""
    panels = -(-n // PANEL)
    match encoding:
        case Encoding.F32:
            return panels * k * PANEL * 4
        case Encoding.BF16 | Encoding.F16:
            return panels * k * PANEL * 2
        case Encoding.Q8_0:
            return panels * (k // GROUP) * _Q8_GROUP_BYTES
        case Encoding.Q4_1:
            return panels * (k // GROUP) * _Q4_GROUP_BYTES


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """One weight [n, k] as a model file holds it, in the numpy types ``pack_matrix`` wants.

    ``values``: F32 float32 [n, k] · BF16, F16 uint16 [n, k] · Q8_0 int8 [n, G, 32] · Q4_1 uint32 [n, G, 4] (eight nibbles each).
    ``scales`` and ``minimums``: float16 bit patterns, uint16 [n, G]. Built by the ``from_`` functions below.
    """

    n: int
    k: int
    encoding: Encoding
    values: np.ndarray
    scales: np.ndarray | None = None
    minimums: np.ndarray | None = None


def from_f32(array: np.ndarray) -> MatrixSource:
    """From float32 [n, k]."""
    values = _matrix(array, np.float32)
    return MatrixSource(values.shape[0], values.shape[1], Encoding.F32, values)


def from_bf16(bits: np.ndarray) -> MatrixSource:
    """From the bit patterns of bfloat16 values, uint16 [n, k]."""
    values = _matrix(bits, np.uint16)
    return MatrixSource(values.shape[0], values.shape[1], Encoding.BF16, values)


def from_f16(array: np.ndarray) -> MatrixSource:
    """From float16 [n, k]."""
    values = _matrix(array, np.float16).view(np.uint16)
    return MatrixSource(values.shape[0], values.shape[1], Encoding.F16, values)


def from_gguf(kind: str, blocks: np.ndarray, n: int, k: int) -> MatrixSource:
    """From raw GGUF blocks (uint8, n * k / 32 of them) of ``kind`` "Q8_0", "Q4_0" or "Q4_1".

    Q4_0 becomes Q4_1 with minimum -8 * scale, which is exact; only a zero's sign differs where a scale is negative (+0 here),
    which no sum can see. Raises ValueError: k no multiple of 32, a wrong length, or a Q4_0 scale whose minimum overflows
    float16 (the caller then dequantises and uses ``from_f32``).
    """
    if kind not in _GGUF_BLOCK_BYTES:
        raise ValueError(f"no packed encoding for GGUF type {kind}")
    if k % GROUP:
        raise ValueError(f"k = {k} is no multiple of {GROUP}")
    groups = k // GROUP
    flat = np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)
    if flat.size != n * groups * _GGUF_BLOCK_BYTES[kind]:
        raise ValueError(f"{kind} [{n}, {k}] needs {n * groups * _GGUF_BLOCK_BYTES[kind]} bytes, not {flat.size}")
    raw: np.ndarray = flat.reshape(n, groups, -1)
    scales = np.ascontiguousarray(raw[:, :, :2]).view("<u2")[:, :, 0]
    if kind == "Q8_0":
        return MatrixSource(n, k, Encoding.Q8_0, raw[:, :, 2:].view(np.int8), scales)
    if kind == "Q4_1":
        minimums = np.ascontiguousarray(raw[:, :, 2:4]).view("<u2")[:, :, 0]
        return MatrixSource(n, k, Encoding.Q4_1, _nibble_words(raw[:, :, 4:]), scales, minimums)
    minimum32 = scales.view(np.float16).astype(np.float32) * np.float32(-8)
    if np.any(np.abs(minimum32) > 65504):
        raise ValueError("a Q4_0 scale is too large for a float16 minimum")
    return MatrixSource(
        n, k, Encoding.Q4_1, _nibble_words(raw[:, :, 2:]), scales, minimum32.astype(np.float16).view(np.uint16)
    )


def all_finite(source: MatrixSource) -> bool:
    """Whether every value is a finite number; of blocks, whether every scale and minimum is."""
    match source.encoding:
        case Encoding.F32:
            return bool(np.isfinite(source.values).all())
        case Encoding.BF16:
            return not np.any((source.values & 0x7F80) == 0x7F80)
        case Encoding.F16:
            return not np.any((source.values & 0x7C00) == 0x7C00)
        case Encoding.Q8_0 | Encoding.Q4_1:
            halves = [half for half in (source.scales, source.minimums) if half is not None]
            return not any(np.any((half & 0x7C00) == 0x7C00) for half in halves)


def pack_matrix(sources: MatrixSource | Sequence[MatrixSource]) -> PackedMatrix:
    """Pack one source, or several stacked along n in this order (q | k | v, gate | up).

    Sources of different encodings are all widened to fp32, the smallest encoding that holds any two different ones exactly.
    """
    parts = [sources] if isinstance(sources, MatrixSource) else list(sources)
    k = parts[0].k
    if any(part.k != k for part in parts):
        raise ValueError(f"sources of different k: {[part.k for part in parts]}")
    if len({part.encoding for part in parts}) > 1:
        parts = [from_f32(widen(part)) for part in parts]
    encoding = parts[0].encoding
    n = sum(part.n for part in parts)
    data = aligned_empty(packed_bytes(n, k, encoding))
    _fill(encoding, data, parts, n, k)
    return PackedMatrix(n, k, encoding, data)


def unpack_matrix(matrix: PackedMatrix) -> np.ndarray:
    """float32 [n, k] of ``matrix``; bit for bit what ``gguf.dequantize`` or plain widening of the source gives."""
    n, k, data = matrix.n, matrix.k, matrix.data
    panels = -(-n // PANEL)
    match matrix.encoding:
        case Encoding.F32:
            wide = data.view(np.float32).reshape(panels, k, PANEL)
        case Encoding.BF16:
            wide = _widen_bf16(data.view(np.uint16)).reshape(panels, k, PANEL)
        case Encoding.F16:
            wide = data.view(np.float16).astype(np.float32).reshape(panels, k, PANEL)
        case Encoding.Q8_0:
            groups = data.reshape(panels, k // GROUP, _Q8_GROUP_BYTES)
            scales = _half(groups[:, :, :128])[:, :, None, :]
            q = groups[:, :, 128:].view(np.int8).reshape(panels, k // GROUP, GROUP, PANEL)
            wide = (q.astype(np.float32) * scales).reshape(panels, k, PANEL)
        case Encoding.Q4_1:
            groups = data.reshape(panels, k // GROUP, _Q4_GROUP_BYTES)
            scales = _half(groups[:, :, :128])[:, :, None, :]
            minimums = _half(groups[:, :, 128:256])[:, :, None, :]
            words = np.ascontiguousarray(groups[:, :, 256:]).view(np.uint32).reshape(panels, k // GROUP, 4, 1, PANEL)
            q = (words >> (np.arange(8, dtype=np.uint32) * 4)[:, None]) & 15
            wide = q.reshape(panels, k // GROUP, GROUP, PANEL).astype(np.float32) * scales + minimums
            wide = wide.reshape(panels, k, PANEL)
    return np.ascontiguousarray(wide.transpose(0, 2, 1).reshape(panels * PANEL, k)[:n])


def widen(source: MatrixSource) -> np.ndarray:
    """float32 [n, k] of a source, exact."""
    match source.encoding:
        case Encoding.F32:
            return source.values
        case Encoding.BF16:
            return _widen_bf16(source.values)
        case Encoding.F16:
            return source.values.view(np.float16).astype(np.float32)
    assert source.scales is not None
    scales = source.scales.view(np.float16).astype(np.float32)[:, :, None]
    if source.encoding is Encoding.Q8_0:
        return (source.values.astype(np.float32) * scales).reshape(source.n, source.k)
    assert source.minimums is not None
    minimums = source.minimums.view(np.float16).astype(np.float32)[:, :, None]
    q = (source.values[:, :, :, None] >> (np.arange(8, dtype=np.uint32) * 4)) & 15
    q = q.reshape(source.n, source.k // GROUP, GROUP).astype(np.float32)
    return (q * scales + minimums).reshape(source.n, source.k)


def aligned_empty(num_bytes: int, alignment: int = 64) -> np.ndarray:
    """uint8 [num_bytes], not initialised, whose first byte lies on an ``alignment`` boundary."""
    raw = np.empty(num_bytes + alignment, dtype=np.uint8)
    offset = -raw.ctypes.data % alignment
    return raw[offset : offset + num_bytes]


def _fill(encoding: Encoding, data: np.ndarray, parts: list[MatrixSource], n: int, k: int) -> None:
    panels, groups = -(-n // PANEL), k // GROUP
    values = _stack([part.values for part in parts], panels)
    match encoding:
        case Encoding.F32 | Encoding.BF16 | Encoding.F16:
            target = data.view(values.dtype).reshape(panels, k, PANEL)
            target[...] = values.reshape(panels, PANEL, k).transpose(0, 2, 1)
        case Encoding.Q8_0:
            target = data.reshape(panels, groups, _Q8_GROUP_BYTES)
            _fill_halves(target[:, :, :128], [part.scales for part in parts], panels)
            q = values.reshape(panels, PANEL, groups, GROUP).transpose(0, 2, 3, 1)
            target[:, :, 128:].view(np.int8).reshape(panels, groups, GROUP, PANEL)[...] = q
        case Encoding.Q4_1:
            target = data.reshape(panels, groups, _Q4_GROUP_BYTES)
            _fill_halves(target[:, :, :128], [part.scales for part in parts], panels)
            _fill_halves(target[:, :, 128:256], [part.minimums for part in parts], panels)
            words = values.reshape(panels, PANEL, groups, 4)
            for j in range(4):
                target[:, :, 256 + 256 * j : 512 + 256 * j].view(np.uint32)[...] = words[:, :, :, j].transpose(0, 2, 1)


def _fill_halves(target: np.ndarray, halves: list[np.ndarray | None], panels: int) -> None:
    stacked = _stack([half for half in halves if half is not None], panels)
    target.view(np.uint16)[...] = stacked.reshape(panels, PANEL, -1).transpose(0, 2, 1)


def _stack(arrays: list[np.ndarray], panels: int) -> np.ndarray:
    """The arrays one after another along n, then zeros up to whole panels."""
    rows = panels * PANEL
    count = sum(len(array) for array in arrays)
    if count < rows:
        arrays = [*arrays, np.zeros((rows - count, *arrays[0].shape[1:]), dtype=arrays[0].dtype)]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _matrix(array: np.ndarray, dtype: type) -> np.ndarray:
    if array.ndim != 2 or array.dtype != dtype:
        raise ValueError(f"need {np.dtype(dtype).name} [n, k], not {array.dtype} {array.shape}")
    return np.ascontiguousarray(array)


def _nibble_words(quants: np.ndarray) -> np.ndarray:
    """GGUF's 16 bytes (low nibbles: first half of the group, high nibbles: second) → uint32 [n, G, 4], k ascending."""
    octets = np.ascontiguousarray(quants).view("<u8")  # [n, G, 2]
    words = np.empty((*octets.shape[:2], 4), dtype=np.uint32)
    for half in range(2):
        x = (octets >> np.uint64(4 * half)) & np.uint64(0x0F0F0F0F0F0F0F0F)
        x = (x | (x >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
        x = (x | (x >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
        words[:, :, 2 * half : 2 * half + 2] = (x | (x >> np.uint64(16))) & np.uint64(0xFFFFFFFF)
    return words


def _widen_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _half(octets: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(octets).view(np.float16).astype(np.float32)
