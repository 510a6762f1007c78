"""The weights of one rank, cut out of packed ones: same encoding, same bits, fewer outputs or a shorter depth."""

from collections.abc import Mapping, Sequence

import numpy as np

from relay.errors import UsageError
from relay.kernels.model_files import FileMatrix, in_files
from relay.kernels.packing import GROUP, PANEL, aligned_empty, packed_bytes
from relay.kernels.ranks.split import Cut, Range
from relay.kernels.weights import Encoding, PackedMatrix, WeightSource

_BLOCKED = (Encoding.Q8_0, Encoding.Q4_1)


class RankWeights:
    """A ``WeightSource`` that cuts what ``cuts`` names and passes everything else on."""

    def __init__(self, inner: WeightSource, cuts: Mapping[str, Cut]) -> None:
        self._inner = inner
        self._cuts = cuts

    def matrix(self, name: str) -> PackedMatrix:
        cut = self._cuts.get(name)
        return (
            self._inner.matrix(name) if cut is None else cut_matrix(self._inner.matrix(cut.name), cut.rows, cut.depth)
        )

    def in_files(self, name: str) -> FileMatrix | None:
        cut = self._cuts.get(name)
        if cut is None:
            return in_files(self._inner, name)
        whole = in_files(self._inner, cut.name)
        return None if whole is None else whole.cut(cut.rows, cut.depth)

    def vector(self, name: str) -> np.ndarray:
        cut = self._cuts.get(name)
        if cut is None:
            return self._inner.vector(name)
        whole = self._inner.vector(cut.name)
        return np.concatenate([whole[first:last] for first, last in cut.rows])


def cut_matrix(matrix: PackedMatrix, rows: Sequence[Range], depth: Range | None = None) -> PackedMatrix:
    """``rows`` of ``matrix`` one below the other, columns ``depth``. Whole neighbouring panels are a view, everything else a copy.

    Raises UsageError where ``depth`` would cut a group of a block encoding, ValueError for ranges outside.
    """
    k = matrix.k if depth is None else depth[1] - depth[0]
    if any(not 0 <= first < last <= matrix.n for first, last in rows) or k < 1:
        raise ValueError(f"rows {list(rows)}, columns {depth} of [{matrix.n}, {matrix.k}]")
    n = sum(last - first for first, last in rows)
    if depth is None and all(first % PANEL == 0 and (last % PANEL == 0 or last == matrix.n) for first, last in rows):
        panels = matrix.data.reshape(-(-matrix.n // PANEL), -1)
        whole = all(last % PANEL == 0 for _, last in rows[:-1])
        if whole:
            parts = [panels[first // PANEL : -(-last // PANEL)] for first, last in rows]
            return PackedMatrix(n, k, matrix.encoding, (parts[0] if len(parts) == 1 else _joined(parts)).reshape(-1))
    data = aligned_empty(packed_bytes(n, k, matrix.encoding))
    data[:] = 0
    chosen = np.concatenate([np.arange(first, last) for first, last in rows])
    start, stop = depth or (0, matrix.k)
    if matrix.encoding in _BLOCKED:
        if start % GROUP or stop % GROUP:
            raise UsageError(
                f"--tensor-parallel-size: columns {start} to {stop} of a {matrix.encoding.name} matrix cut its groups of {GROUP}; "
                "use another number of ranks, or pack the model with --storage float32"
            )
        start, stop = start // GROUP, stop // GROUP
    for source, target in zip(
        _lanes(matrix.data, matrix), _lanes(data, PackedMatrix(n, k, matrix.encoding, data)), strict=True
    ):
        _move(source, target, chosen, start, stop)
    return PackedMatrix(n, k, matrix.encoding, data)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """The panels of ``parts`` one after the other, aligned."""
    data = aligned_empty(sum(part.size for part in parts))
    np.concatenate([part.reshape(-1) for part in parts], out=data)
    return data


def _lanes(data: np.ndarray, matrix: PackedMatrix) -> list[np.ndarray]:
    """Views [panels, depth or groups, …, 64] whose last axis is the output within its panel."""
    panels, k = -(-matrix.n // PANEL), matrix.k
    match matrix.encoding:
        case Encoding.F32:
            return [data.view(np.uint32).reshape(panels, k, PANEL)]
        case Encoding.BF16 | Encoding.F16:
            return [data.view(np.uint16).reshape(panels, k, PANEL)]
    groups = data.reshape(panels, k // GROUP, -1)
    if matrix.encoding is Encoding.Q8_0:
        codes = groups[:, :, 128:].reshape(panels, k // GROUP, GROUP, PANEL)
        return [groups[:, :, :128].view(np.uint16), codes]
    words = groups[:, :, 256:].view(np.uint32).reshape(panels, k // GROUP, 4, PANEL)
    return [groups[:, :, :128].view(np.uint16), groups[:, :, 128:256].view(np.uint16), words]


def _move(source: np.ndarray, target: np.ndarray, chosen: np.ndarray, start: int, stop: int) -> None:
    """Outputs ``chosen`` of ``source``, depth start to stop, to outputs 0, 1, … of ``target``; panel by panel of the target."""
    for panel in range(target.shape[0]):
        wanted = chosen[panel * PANEL : (panel + 1) * PANEL]
        taken = source[wanted // PANEL, start:stop, ..., wanted % PANEL]  # [outputs, depth, …]
        target[panel][..., : len(wanted)] = np.moveaxis(taken, 0, -1)
