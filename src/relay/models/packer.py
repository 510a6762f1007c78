"""Writes a pack file from a checkpoint: weights one after another, so that memory holds one matrix at a time."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np

from relay.errors import CorruptModelError
from relay.kernels.packing import all_finite, from_f32, pack_matrix, widen
from relay.kernels.weights import Encoding, PackedMatrix
from relay.models.checkpoint import Checkpoint
from relay.models.layout import Item, MatrixItem, VectorItem, weight_items
from relay.models.pack import (
    ALIGNMENT,
    DIRECT_VERSION,
    MAGIC,
    MATRIX_ALIGNMENT,
    PREAMBLE_BYTES,
    TEXTS,
    TOKENIZER,
    VERSION,
    Entry,
    Header,
    Preamble,
    Storage,
    Texts,
    digest_of,
)
from relay.models.progress import NoProgress, Progress
from relay.models.references import Places, Reference
from relay.models.rope import rope_tables


def write_pack(
    source: Checkpoint,
    path: Path,
    *,
    storage: Storage = "native",
    progress: Progress | None = None,
    label: str = "packing",
) -> None:
    """Pack ``source`` into ``path``: written beside it and renamed, so that a reader sees the whole file or none.

    ``storage`` "float32" widens every matrix, which changes speed and memory but no bit of any logit. Raises
    CorruptModelError from the source.
    """
    progress = progress or NoProgress()
    items = weight_items(source.config)
    with written(path) as file:
        writer = PackWriter(file, storage)
        progress.start(label, sum(_elements(item) for item in items))
        for item in items:
            writer.weights(source, item)
            progress.advance(_elements(item))
        progress.finish()
        writer.finish(source)


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes ``path`` when all is in it, and nothing where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


class PackWriter:
    """Appends sections and hashes them on the way; the preamble is written last, over the place kept for it."""

    def __init__(self, file: BinaryIO, storage: Storage) -> None:
        self._file = file
        self._storage: Storage = storage
        self._entries: list[Entry] = []
        self._content = hashlib.blake2b(digest_size=32)
        self._offset = PREAMBLE_BYTES
        file.write(b"\0" * PREAMBLE_BYTES)

    def weights(self, source: Checkpoint, item: Item) -> None:
        if isinstance(item, MatrixItem):
            self._matrix(item.name, self._packed(source, item))
        else:
            self._vector(item.name, _joined(source, item))

    def finish(self, source: Checkpoint, references: tuple[Reference, ...] = (), places: Places | None = None) -> None:
        """Tables, texts, header and preamble; a direct pack's references and their places."""
        cos, sin = rope_tables(source.config)
        self._vector("rope.cos", cos)
        self._vector("rope.sin", sin)
        files = source.tokenizer
        self._section(files.json.encode(), TOKENIZER, "text")
        texts = Texts(files.chat_template, files.special_tokens, files.generation)
        self._section(msgspec.json.encode(texts, order="sorted"), TEXTS, "text")
        header_offset = self._offset
        header = msgspec.json.encode(Header(source.config, self._storage, tuple(self._entries), references))
        self._append(header)
        content, version = self._content.digest(), VERSION
        if places is not None:
            version = DIRECT_VERSION
            raw = msgspec.json.encode(places)
            self._append(digest_of(raw) + raw)
        preamble = Preamble(MAGIC, version, 0, header_offset, len(header), self._offset, digest_of(header), content)
        self._file.seek(0)
        self._file.write(preamble.encode())

    def _packed(self, source: Checkpoint, item: MatrixItem) -> PackedMatrix:
        parts = []
        for part, rows in zip(item.parts, item.rows, strict=True):
            matrix = source.matrix(part)
            if (matrix.n, matrix.k) != (rows, item.k):
                raise wrong_shape(source, part, [matrix.n, matrix.k], [rows, item.k])
            if not all_finite(matrix):
                raise not_finite(source, part)
            parts.append(matrix)
        if self._storage == "float32":
            parts = [from_f32(widen(part)) for part in parts]
        return pack_matrix(parts)

    def _matrix(self, name: str, matrix: PackedMatrix) -> None:
        encoding = Encoding(matrix.encoding).name
        self._section(matrix.data.data, name, "matrix", (matrix.n, matrix.k), encoding, MATRIX_ALIGNMENT)

    def _vector(self, name: str, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, "<f4").data.cast("B")
        self._section(data, name, "vector", tuple(values.shape), "F32")

    def _section(
        self,
        data: bytes | memoryview,
        name: str,
        kind: Literal["matrix", "vector", "text"],
        shape: tuple[int, ...] = (),
        encoding: str = "",
        alignment: int = ALIGNMENT,
    ) -> None:
        self._append(b"\0" * (-self._offset % alignment))
        self._entries.append(Entry(name, kind, self._offset, len(data), shape, encoding))
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._content.update(data)
        self._offset += len(data)


def _elements(item: Item) -> int:
    return item.n * item.k if isinstance(item, MatrixItem) else item.size


def wrong_shape(source: Checkpoint, part: str, found: list[int], wanted: list[int]) -> CorruptModelError:
    return CorruptModelError(f"{source.where}: weight {part} has shape {found}, the config asks for {wanted}")


def not_finite(source: Checkpoint, part: str) -> CorruptModelError:
    return CorruptModelError(f"{source.where}: damaged: weight {part} holds values that are not finite")


def _joined(source: Checkpoint, item: VectorItem) -> np.ndarray:
    parts = []
    for part, size in zip(item.parts, item.sizes, strict=True):
        values = source.vector(part)
        if values.shape != (size,):
            raise wrong_shape(source, part, list(values.shape), [size])
        if not np.isfinite(values).all():
            raise not_finite(source, part)
        parts.append(values)
    return np.concatenate(parts)
