"""Matrices that are still rows in model files: where they lie, cuts of them, and reading files that must stay as they are.

Reads are ``pread``: a file that is cut off meanwhile is an error and no signal.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from relay.errors import CorruptModelError
from relay.kernels.weights import Encoding, WeightSource

VALUE_BYTES = {Encoding.F32: 4, Encoding.BF16: 2, Encoding.F16: 2}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file, and what ``stat`` said when it was read whole. Whatever writes to it changes one of the times."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def now(cls, path: Path) -> "ModelFile":
        """Raises OSError."""
        return cls._of(str(path), os.stat(path))

    @classmethod
    def _of(cls, path: str, found: os.stat_result) -> "ModelFile":
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def check(self, descriptor: int | None = None) -> None:
        """Raises CorruptModelError if the file (or what is open as ``descriptor``) is not the one that was read whole."""
        try:
            found = os.stat(self.path if descriptor is None else descriptor)
        except OSError as error:
            raise CorruptModelError(f"{self.path}: cannot be read ({error.strerror})") from error
        if self._of(self.path, found) != self:
            size = "" if found.st_size == self.size else f" (it had {self.size} bytes and has {found.st_size})"
            raise CorruptModelError(
                f"{self.path}: changed since its weights were read whole{size}; a new start of relay serve reads it again"
            )


@dataclass(frozen=True, slots=True)
class FilePart:
    """``rows`` rows of a matrix, row after row, from byte ``offset`` of ``file``."""

    file: ModelFile
    offset: int
    rows: int
    encoding: Encoding  # F32, BF16 or F16


@dataclass(frozen=True, slots=True)
class FileMatrix:
    """Matrix [n, k]: ``parts`` one below the other. Rows have ``stored_k`` values; ``columns`` of them (None: all) are meant."""

    stored_k: int
    parts: tuple[FilePart, ...]
    columns: tuple[int, int] | None = None

    @property
    def n(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def k(self) -> int:
        return self.stored_k if self.columns is None else self.columns[1] - self.columns[0]

    def part_bytes(self, part: FilePart) -> int:
        return part.rows * self.stored_k * VALUE_BYTES[part.encoding]

    def cut(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None) -> "FileMatrix":
        """``rows`` one range below the other, of ``columns``. Raises ValueError for ranges outside."""
        first, last = columns or (0, self.stored_k)
        outside = not 0 <= first < last <= self.stored_k or any(not 0 <= a < b <= self.n for a, b in rows)
        if self.columns is not None or outside:
            raise ValueError(f"rows {list(rows)}, columns {columns} of [{self.n}, {self.k}]")
        return FileMatrix(self.stored_k, tuple(part for a, b in rows for part in self._rows(a, b)), columns)

    def _rows(self, first: int, last: int) -> list[FilePart]:
        found, start = [], 0
        for part in self.parts:
            a, b = max(first, start), min(last, start + part.rows)
            if a < b:
                skipped = (a - start) * self.stored_k * VALUE_BYTES[part.encoding]
                found.append(FilePart(part.file, part.offset + skipped, b - a, part.encoding))
            start += part.rows
        return found


@runtime_checkable
class FileWeights(WeightSource, Protocol):
    """A source some of whose matrices are in model files; ``matrix`` has the others."""

    def in_files(self, name: str) -> FileMatrix | None:
        """Where ``name`` lies; None if it is no such matrix."""
        ...


def in_files(weights: WeightSource, name: str) -> FileMatrix | None:
    """``FileWeights.in_files`` of any source."""
    return weights.in_files(name) if isinstance(weights, FileWeights) else None


class OpenFiles:
    """Model files open for reading, each checked when it is opened and again by ``check``."""

    def __init__(self) -> None:
        self._descriptors: dict[ModelFile, int] = {}

    def descriptor(self, file: ModelFile) -> int:
        """Raises CorruptModelError for a file that changed or cannot be opened."""
        if file not in self._descriptors:
            try:
                descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CorruptModelError(f"{file.path}: cannot be read ({error.strerror})") from error
            self._descriptors[file] = descriptor
            file.check(descriptor)
        return self._descriptors[file]

    def read(self, file: ModelFile, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` of an opened file, while other threads run. Raises CorruptModelError."""
        while target:
            try:
                count = os.preadv(self._descriptors[file], [target], offset)
            except OSError as error:
                raise CorruptModelError(f"{file.path}: cannot be read ({error.strerror})") from error
            if not count:
                raise CorruptModelError(f"{file.path}: truncated at byte {offset} while it was read")
            offset += count
            target = target[count:]

    def check(self) -> None:
        """Raises CorruptModelError if any of them changed since it was opened."""
        for file, descriptor in self._descriptors.items():
            file.check(descriptor)

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
