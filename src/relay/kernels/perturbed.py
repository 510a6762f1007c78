"""Backends made wrong on purpose: the tests of ``relay verify`` and ``relay chaos`` themselves.

``kv-bit`` flips one bit of one K value once. ``rounding`` makes one op round one output the other way: a norm weight is
moved by one unit in the last place of the activations. Both must turn a comparison red. ``crash:ID`` dies of a segmentation
fault in every step that computes token ID of a prompt four times in a row: a poison request (one may be drawn by chance).
``fault:ID`` lets a kernel of a GPU read outside of all memory there, which is the end of the CUDA context.
Nothing else uses this module.
"""

import signal
from collections.abc import Callable
from typing import Literal, cast, get_args

import numpy as np

from relay.errors import UsageError
from relay.kernels.backend import Backend, Batch
from relay.kernels.model_files import FileMatrix, in_files
from relay.kernels.program import Program, RopeWriteKv
from relay.kernels.weights import PackedMatrix, WeightSource
from relay.protocol.block_hash import UNIT_TOKENS

Perturbation = Literal["kv-bit", "rounding"]


class NudgedWeights:
    """Passes weights through, with element 0 of vector ``name`` moved to the next value of fp32, or (``coarse``) of bf16."""

    def __init__(self, inner: WeightSource, name: str, coarse: bool) -> None:
        self._inner = inner
        self._name = name
        self._coarse = coarse

    def matrix(self, name: str) -> PackedMatrix:
        return self._inner.matrix(name)

    def in_files(self, name: str) -> FileMatrix | None:
        return in_files(self._inner, name)

    def vector(self, name: str) -> np.ndarray:
        values = self._inner.vector(name)
        if name != self._name:
            return values
        nudged = np.array(values, dtype=np.float32)
        nudged[0] = nudged[0] * np.float32(1 + 2**-7) if self._coarse else np.nextafter(nudged[0], np.float32(np.inf))
        return nudged


class PerturbedBackend:
    """Wraps ``inner`` and disturbs it as ``kind`` says; everything else is passed on unchanged."""

    def __init__(self, inner: Backend, kind: Perturbation) -> None:
        self._inner = inner
        self._kind = kind
        self._layer_zero_written_at = -1
        self._pending = kind == "kv-bit"

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def load(self, program: Program, weights: WeightSource) -> None:
        if self._kind == "rounding":
            weights = NudgedWeights(weights, "layers.0.mlp_norm", coarse=self._inner.name == "cuda")
        self._layer_zero_written_at = next(i for i, op in enumerate(program.ops) if isinstance(op, RopeWriteKv)) + 1
        self._inner.load(program, weights)

    def run(self, start: int, stop: int, batch: Batch) -> None:
        split = self._layer_zero_written_at
        row = self._row_with_a_full_block(batch) if self._pending and start < split <= stop else None
        if row is None:
            self._inner.run(start, stop, batch)
            return
        self._inner.run(start, split, batch)
        self._flip(batch.block_tables[row])
        if split < stop:
            self._inner.run(split, stop, batch)

    def _row_with_a_full_block(self, batch: Batch) -> int | None:
        """A row of ``batch`` whose sequence has a full unit of tokens before it: what digests of KV blocks cover."""
        firsts = batch.positions[batch.row_starts[:-1]]
        return next((row for row, first in enumerate(firsts.tolist()) if first >= UNIT_TOKENS), None)

    def _flip(self, block_table: np.ndarray) -> None:
        """Flip the lowest bit of the first K value of the sequence's first token, in layer 0."""
        self._pending = False
        data = bytearray(self._inner.kv_bytes_per_token_layer())
        self._inner.read_kv(0, block_table, 0, 1, memoryview(data))
        data[0] ^= 1
        self._inner.write_kv(0, block_table, 0, 1, memoryview(data))


class CrashingBackend:
    """Wraps ``inner`` and does ``crash`` when ``token_id`` is computed four times in a row, as of a bug in a kernel."""

    def __init__(self, inner: Backend, token_id: int, crash: Callable[[Batch], None]) -> None:
        self._inner = inner
        self._token_id = token_id
        self._crash = crash

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def run(self, start: int, stop: int, batch: Batch) -> None:
        hits = batch.token_ids == self._token_id
        if np.any(hits[:-3] & hits[1:-2] & hits[2:-1] & hits[3:]):
            self._crash(batch)
        self._inner.run(start, stop, batch)


def _segfault(batch: Batch) -> None:
    signal.raise_signal(signal.SIGSEGV)  # in this thread, as a fault would: a signal to the process may come later


def _point_nowhere(batch: Batch) -> None:
    """The row of this token lies terabytes behind the embeddings."""
    batch.token_ids[0] = np.iinfo(np.int32).max


CRASHES: dict[str, Callable[[Batch], None]] = {"crash": _segfault, "fault": _point_nowhere}


def check_kind(kind: str) -> None:
    """Raises UsageError for an unknown kind."""
    crash, _, token_id = kind.partition(":")
    if kind not in get_args(Perturbation) and not (crash in CRASHES and token_id.isdecimal()):
        crashes = ", ".join(f"{name}:TOKEN_ID" for name in CRASHES)
        raise UsageError(f"unknown perturbation {kind!r}; known: {', '.join(get_args(Perturbation))}, {crashes}")


def perturbed(inner: Backend, kind: str) -> Backend:
    """``inner`` made wrong as ``kind`` says. Raises UsageError for an unknown kind."""
    check_kind(kind)
    crash, _, token_id = kind.partition(":")
    if crash == "fault" and inner.name != "cuda":
        raise UsageError(f"perturbation {kind!r} is for --backend cuda")
    if crash in CRASHES:
        return cast(Backend, CrashingBackend(inner, int(token_id), CRASHES[crash]))
    return cast(Backend, PerturbedBackend(inner, cast(Perturbation, kind)))
