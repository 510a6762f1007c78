"""The pack file: one model's weights, tables and texts, laid out for the kernels and mapped read-only by every worker.

::

    0                preamble, PREAMBLE_BYTES: magic, version, header place and size, file size, three digests (see ``Preamble``)
    PREAMBLE_BYTES   data: matrices (``kernels/packing.py``) at multiples of 4096, vectors and texts at multiples of 64
    header_offset    header: JSON of ``Header``, up to the end of the file
                     or, in a *direct pack* (version 2), followed by the digest and JSON of ``Places`` (``references.py``): its
                     matrices are in safetensors files, and where those lie is no part of its content

The content digest (BLAKE2b-256 of everything from the preamble to the header's end) is the *model digest*. It is written, not
computed, when a pack is opened: opening checks sizes, the preamble's and the header's digest and costs milliseconds; ``verify``
reads it all (``checked.py`` says when that is done).
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import msgspec
import numpy as np

from relay.errors import CorruptModelError, UsageError
from relay.kernels.model_files import FileMatrix
from relay.kernels.packing import packed_bytes
from relay.kernels.weights import Encoding, PackedMatrix
from relay.models.checkpoint import TokenizerFiles
from relay.models.config import ModelConfig
from relay.models.references import Places, Reference, read_whole

MAGIC = b"RELAYPAK"
VERSION = 1
DIRECT_VERSION = 2
PREAMBLE_BYTES = 4096
MATRIX_ALIGNMENT = 4096
ALIGNMENT = 64
TOKENIZER = "tokenizer.json"
TEXTS = "texts.json"
_FIELDS = struct.Struct("<8sIIQQQ32s32s")
_CHUNK_BYTES = 1 << 22

Storage = Literal["native", "float32", "direct"]


class Preamble(NamedTuple):
    """The fixed fields at offset 0, little endian in this order; a BLAKE2b-256 of them follows."""

    magic: bytes
    version: int
    reserved: int
    header_offset: int
    header_bytes: int
    file_bytes: int
    header_digest: bytes
    content_digest: bytes

    def encode(self) -> bytes:
        fields = _FIELDS.pack(*self)
        return (fields + digest_of(fields)).ljust(PREAMBLE_BYTES, b"\0")


class Entry(msgspec.Struct, frozen=True):
    """One named section. ``shape``: [n, k] of a matrix, the array's shape of an fp32 vector or table, [] of a text."""

    name: str
    kind: Literal["matrix", "vector", "text"]
    offset: int
    num_bytes: int
    shape: tuple[int, ...] = ()
    encoding: str = ""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the file holds. ``storage``: whether matrices keep their source's precision, were widened to fp32, or are not here."""

    config: ModelConfig
    storage: Storage
    entries: tuple[Entry, ...]
    references: tuple[Reference, ...] = ()


class Texts(msgspec.Struct, frozen=True):
    """Everything about text but tokenizer.json itself."""

    chat_template: str | None
    special_tokens: dict[str, str]
    generation: dict[str, object]


class StoredRows(NamedTuple):
    """Some of the weights of matrices, in the pack or in another file."""

    encoding: str
    values: int
    num_bytes: int


def digest_of(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


class Pack:
    """An open pack file. Implements ``WeightSource``; arrays are read-only views of the mapping, valid as long as they live."""

    def __init__(self, path: Path, rebuild: str = "relay model pull SOURCE") -> None:
        """``rebuild`` is the command named in errors. Raises CorruptModelError; FileNotFoundError if there is no file."""
        self.path = path
        self._rebuild = rebuild
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < PREAMBLE_BYTES:
                self._refuse(f"truncated to {size} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._preamble = self._read_preamble(size)
        self.header = self._read_header()
        self._entries = {entry.name: entry for entry in self.header.entries}
        self._references = {reference.name: reference for reference in self.header.references}
        self._places = self._read_places()

    @property
    def config(self) -> ModelConfig:
        return self.header.config

    @property
    def digest(self) -> str:
        """The model digest, 64 hexadecimal digits."""
        return self._preamble.content_digest.hex()

    @property
    def file_bytes(self) -> int:
        return self._preamble.file_bytes

    def matrix(self, name: str) -> PackedMatrix:
        """Raises UsageError for one that is not in the pack."""
        if name in self._references:
            raise UsageError(
                f"{self.path}: only --backend cuda takes weights out of safetensors; serve the model, not this pack of it"
            )
        entry = self._entry(name, "matrix")
        return PackedMatrix(entry.shape[0], entry.shape[1], Encoding[entry.encoding], self._view(entry))

    def in_files(self, name: str) -> FileMatrix | None:
        """Where matrix ``name`` of a direct pack lies; None if it is in the pack, or nowhere."""
        reference = self._references.get(name)
        return None if reference is None else self._places.matrix(reference)

    def matrices(self) -> Iterator[StoredRows]:
        for entry in self.header.entries:
            if entry.kind == "matrix":
                yield StoredRows(entry.encoding, entry.shape[0] * entry.shape[1], entry.num_bytes)
        for reference in self.header.references:
            matrix = self._places.matrix(reference)
            for part in matrix.parts:
                yield StoredRows(part.encoding.name, part.rows * matrix.k, matrix.part_bytes(part))

    def check_files(self) -> None:
        """Raises CorruptModelError if a file with weights of a direct pack is not the one that was read whole."""
        for file in self._places.files:
            file.check()

    def vector(self, name: str) -> np.ndarray:
        entry = self._entry(name, "vector")
        return self._view(entry).view(np.float32).reshape(entry.shape)

    def tokenizer_files(self) -> TokenizerFiles:
        """The texts of the pack; decoding megabytes of tokenizer.json is left to the caller."""
        texts = msgspec.json.decode(self._view(self._entry(TEXTS, "text")).tobytes(), type=Texts)
        json = self._view(self._entry(TOKENIZER, "text")).tobytes().decode()
        return TokenizerFiles(json, texts.chat_template, texts.special_tokens, texts.generation)

    def verify(self) -> None:
        """Read every byte, also of weights in other files, and compare with the digests. Raises CorruptModelError."""
        content = hashlib.blake2b(digest_size=32)
        with memoryview(self._map) as view:
            end = self._preamble.header_offset + self._preamble.header_bytes
            for start in range(PREAMBLE_BYTES, end, _CHUNK_BYTES):
                content.update(view[start : min(end, start + _CHUNK_BYTES)])
        if content.digest() != self._preamble.content_digest:
            self._refuse("damaged: its content does not match its digest")
        references = self.header.references
        reads = read_whole([self._places.matrix(reference) for reference in references], lambda count: None)
        for reference, results in zip(references, reads, strict=True):
            for part, result in zip(reference.parts, results, strict=True):
                if part.digest != result.digest:
                    self._refuse(f"the file with {reference.name} is damaged: its content does not match its digest")

    def _entry(self, name: str, kind: str) -> Entry:
        entry = self._entries[name]
        if entry.kind != kind:
            raise KeyError(f"{name} is a {entry.kind}, not a {kind}")
        return entry

    def _view(self, entry: Entry) -> np.ndarray:
        return self._bytes[entry.offset : entry.offset + entry.num_bytes]

    def _read_preamble(self, size: int) -> Preamble:
        fields = self._map[: _FIELDS.size]
        preamble = Preamble(*_FIELDS.unpack(fields))
        if preamble.magic != MAGIC:
            self._refuse("not a pack file")
        if preamble.version not in (VERSION, DIRECT_VERSION):
            known = f"versions {VERSION} and {DIRECT_VERSION}"
            self._refuse(f"of pack version {preamble.version}, this Relay reads {known}")
        if self._map[_FIELDS.size : _FIELDS.size + 32] != digest_of(fields):
            self._refuse("damaged: its preamble does not match its digest")
        if preamble.file_bytes != size:
            self._refuse(f"truncated: {size} bytes instead of {preamble.file_bytes}")
        return preamble

    def _read_header(self) -> Header:
        offset, length = self._preamble.header_offset, self._preamble.header_bytes
        raw = self._map[offset : offset + length]
        if digest_of(raw) != self._preamble.header_digest:
            self._refuse("damaged: its header does not match its digest")
        header = msgspec.json.decode(raw, type=Header)
        for entry in header.entries:
            expected = entry.num_bytes
            if entry.kind == "matrix":
                expected = packed_bytes(entry.shape[0], entry.shape[1], Encoding[entry.encoding])
            if entry.num_bytes != expected or entry.offset < PREAMBLE_BYTES or entry.offset + entry.num_bytes > offset:
                self._refuse(f"damaged: section {entry.name} has an impossible place or size")
        return header

    def _read_places(self) -> Places:
        if self._preamble.version == VERSION:
            return Places((), {})
        start = self._preamble.header_offset + self._preamble.header_bytes
        raw = self._map[start + 32 :]
        if self._map[start : start + 32] != digest_of(raw):
            self._refuse("damaged: the places of its weights do not match their digest")
        places = msgspec.json.decode(raw, type=Places)
        for reference in self.header.references:
            matrix = places.matrix(reference)
            if any(part.offset + matrix.part_bytes(part) > part.file.size for part in matrix.parts):
                self._refuse(f"damaged: {reference.name} has an impossible place")
        return places

    def _refuse(self, why: str) -> NoReturn:
        raise CorruptModelError(f"{self.path}: {why}; rebuild it with: {self._rebuild}")
