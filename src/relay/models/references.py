"""What a direct pack says of matrices that stay in their safetensors files: which tensors they are, and where those lie now.

The first (``Reference``) is content and in the pack's digest; the second (``Places``) is not, so that the same weights elsewhere,
or cut into other shards, have the same digest. See docs/decisions/0017-direct-packs.md.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import NamedTuple

import msgspec
import numpy as np

from relay.kernels.model_files import VALUE_BYTES, FileMatrix, FilePart, ModelFile, OpenFiles
from relay.kernels.packing import MatrixSource, all_finite
from relay.kernels.weights import Encoding

LEAF_BYTES = 8 << 20  # fixed: the digests depend on it
MAX_THREADS = 32


class Rows(msgspec.Struct, frozen=True):
    """``rows`` rows of a matrix, one checkpoint tensor. ``digest``: hexadecimal BLAKE2b-256 over those of its LEAF_BYTES leaves."""

    rows: int
    encoding: str
    digest: str


class Reference(msgspec.Struct, frozen=True):
    """Matrix ``name``: ``parts`` one below the other, each row of ``k`` values."""

    name: str
    k: int
    parts: tuple[Rows, ...]


class Places(msgspec.Struct, frozen=True):
    """The files, and for each matrix the (file, offset) of its parts."""

    files: tuple[ModelFile, ...]
    parts: dict[str, tuple[tuple[int, int], ...]]

    def matrix(self, reference: Reference) -> FileMatrix:
        places = zip(reference.parts, self.parts[reference.name], strict=True)
        parts = [FilePart(self.files[file], at, part.rows, Encoding[part.encoding]) for part, (file, at) in places]
        return FileMatrix(reference.k, tuple(parts))


class WholeRead(NamedTuple):
    """What reading a part shows."""

    digest: str
    finite: bool


def read_whole(matrices: Sequence[FileMatrix], advance: Callable[[int], None]) -> list[list[WholeRead]]:
    """Every byte of every part, by all processors; ``advance`` hears of bytes in this thread. Raises CorruptModelError."""
    buffers = local()
    parts = [(part, matrix.part_bytes(part)) for matrix in matrices for part in matrix.parts]
    leaves = [(part, at, min(LEAF_BYTES, size - at)) for part, size in parts for at in range(0, size, LEAF_BYTES)]
    with OpenFiles() as files, ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for part, _ in parts:
            files.descriptor(part.file)

        def read(leaf: tuple[FilePart, int, int]) -> tuple[bytes, bool, int]:
            part, start, size = leaf
            if not hasattr(buffers, "bytes"):
                buffers.bytes = np.empty(LEAF_BYTES, np.uint8)
            raw: np.ndarray = buffers.bytes[:size]
            files.read(part.file, part.offset + start, raw.data)
            return hashlib.blake2b(raw.data, digest_size=32).digest(), _finite(raw, part.encoding), size

        results = pool.map(read, leaves)
        found = []
        try:
            for _, size in parts:
                digest, finite = hashlib.blake2b(digest_size=32), True
                for _ in range(0, size, LEAF_BYTES):
                    leaf_digest, leaf_finite, leaf_size = next(results)
                    digest.update(leaf_digest)
                    finite &= leaf_finite
                    advance(leaf_size)
                found.append(WholeRead(digest.hexdigest(), finite))
        finally:
            pool.shutdown(cancel_futures=True)  # an error ends the reading, too
        files.check()
    ordered = iter(found)
    return [[next(ordered) for _ in matrix.parts] for matrix in matrices]


def _finite(raw: np.ndarray, encoding: Encoding) -> bool:
    values = raw.view(np.float32 if VALUE_BYTES[encoding] == 4 else np.uint16)
    return all_finite(MatrixSource(1, len(values), encoding, values))
