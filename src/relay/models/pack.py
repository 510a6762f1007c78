"""The pack file: one model's weights, tables and texts, laid out for the kernels and mapped read-only by every worker.

::

    0                preamble, PREAMBLE_BYTES: magic, version, header place and size, file size, three digests (see ``Preamble``)
    PREAMBLE_BYTES   data: matrices (``kernels/packing.py``) at multiples of 4096, vectors and texts at multiples of 64
    header_offset    header: JSON of ``Header``, up to the end of the file

The content digest (BLAKE2b-256 of everything after the preamble) is the *model digest*. It is written, not computed, when a
pack is opened: opening checks sizes, the preamble's and the header's digest and costs milliseconds; ``verify`` reads it all
(``checked.py`` says when that is done).
"""

import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import msgspec
import numpy as np

from relay.errors import CorruptModelError
from relay.kernels.packing import packed_bytes
from relay.kernels.weights import Encoding, PackedMatrix
from relay.models.checkpoint import TokenizerFiles
from relay.models.config import ModelConfig

MAGIC = b"RELAYPAK"
VERSION = 1
PREAMBLE_BYTES = 4096
MATRIX_ALIGNMENT = 4096
ALIGNMENT = 64
TOKENIZER = "tokenizer.json"
TEXTS = "texts.json"
_FIELDS = struct.Struct("<8sIIQQQ32s32s")
_CHUNK_BYTES = 1 << 22

Storage = Literal["native", "float32"]


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


class Header(msgspec.Struct, frozen=True):
    """What the file holds. ``storage``: whether matrices keep their source's precision or were widened to fp32."""

    config: ModelConfig
    storage: Storage
    entries: tuple[Entry, ...]


class Texts(msgspec.Struct, frozen=True):
    """Everything about text but tokenizer.json itself."""

    chat_template: str | None
    special_tokens: dict[str, str]
    generation: dict[str, object]


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
        entry = self._entry(name, "matrix")
        return PackedMatrix(entry.shape[0], entry.shape[1], Encoding[entry.encoding], self._view(entry))

    def vector(self, name: str) -> np.ndarray:
        entry = self._entry(name, "vector")
        return self._view(entry).view(np.float32).reshape(entry.shape)

    def tokenizer_files(self) -> TokenizerFiles:
        """The texts of the pack; decoding megabytes of tokenizer.json is left to the caller."""
        texts = msgspec.json.decode(self._view(self._entry(TEXTS, "text")).tobytes(), type=Texts)
        json = self._view(self._entry(TOKENIZER, "text")).tobytes().decode()
        return TokenizerFiles(json, texts.chat_template, texts.special_tokens, texts.generation)

    def verify(self) -> None:
        """Read every byte and compare with the digest. Raises CorruptModelError."""
        content = hashlib.blake2b(digest_size=32)
        with memoryview(self._map) as view:
            for start in range(PREAMBLE_BYTES, len(view), _CHUNK_BYTES):
                content.update(view[start : start + _CHUNK_BYTES])
        if content.digest() != self._preamble.content_digest:
            self._refuse("damaged: its content does not match its digest")

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
        if preamble.version != VERSION:
            self._refuse(f"of pack version {preamble.version}, this Relay reads version {VERSION}")
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

    def _refuse(self, why: str) -> NoReturn:
        raise CorruptModelError(f"{self.path}: {why}; rebuild it with: {self._rebuild}")
