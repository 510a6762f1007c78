"""Results of cells kept in a folder, so that a long run that was interrupted goes on where it was."""

import os
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import msgspec

from relay.chaos.oracle import Calm
from relay.chaos.settings import CellResult, ChaosSettings
from relay.chaos.shapes import Shape
from relay.record.commit import commit


class Cell(msgspec.Struct, frozen=True):
    """One file: a result, the calm cost beside it, and of what run it is."""

    fingerprint: str
    result: CellResult
    calm: Calm


class Kept:
    """``folder`` None keeps nothing. A result counts only for the same settings of the same commit, and only if it passed."""

    def __init__(self, folder: Path | None, settings: ChaosSettings) -> None:
        self._folder = folder
        values = asdict(settings) | {"shapes": None, "seeds": None, "keep": None, "trace": None, "commit": commit()}
        self._fingerprint = blake2b(repr(sorted(values.items())).encode(), digest_size=16).hexdigest()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def find(self, shape: Shape, seed: int) -> Cell | None:
        """The cell of an earlier run, if there is one."""
        if self._folder is None:
            return None
        try:
            cell = msgspec.json.decode(self._path(shape, seed).read_bytes(), type=Cell)
        except (FileNotFoundError, msgspec.MsgspecError, RecursionError):
            return None
        return cell if cell.fingerprint == self._fingerprint and cell.result.passed else None

    def keep(self, shape: Shape, seed: int, result: CellResult, calm: Calm) -> None:
        if self._folder is None:
            return
        path = self._path(shape, seed)
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(Cell(self._fingerprint, result, calm)))
        os.replace(draft, path)

    def _path(self, shape: Shape, seed: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{shape.name}-seed-{seed}.json"
