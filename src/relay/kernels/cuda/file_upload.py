"""Rows of model files onto the device: several threads fill pinned buffers, one copies them in order to where they belong.

Equal types are copied into the matrix itself. Other types, and rows of which only some columns are wanted, are put together on
the device and converted there, each value rounded once. (Why such rows are read whole: docs/decisions/0017-direct-packs.md.)
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from relay.kernels.cuda.weights import Progress, no_progress
from relay.kernels.model_files import FileMatrix, FilePart, OpenFiles
from relay.kernels.weights import Encoding

CHUNK_BYTES = 16 << 20
MAX_THREADS = 8  # a thread copies 5 to 10 GB/s out of the file cache, the bus takes up to 55
_TYPES = {Encoding.F32: torch.float32, Encoding.BF16: torch.bfloat16, Encoding.F16: torch.float16}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``size`` bytes of a part of matrix ``name``, from byte ``start`` of it; the part's rows begin at ``row``."""

    name: str
    part: FilePart
    row: int
    start: int
    size: int
    ends_part: bool
    ends_matrix: bool


class FileUpload:
    """Loads matrices to ``device`` on the current stream; one object for one load, whose buffers go with it."""

    def __init__(self, device: str, progress: Progress = no_progress, dtype: torch.dtype = torch.bfloat16) -> None:
        self._device = torch.device(device)
        self._queues = self._device.type == "cuda"  # copies only end later
        self._type = dtype
        self._progress = progress
        self._threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
        self._open: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}  # being filled: matrix, raw part

    def load(self, wanted: Mapping[str, FileMatrix], done: Callable[[str, torch.Tensor], None]) -> None:
        """Call ``done`` with each of ``wanted``, in order, as a [n, k] of the type asked for.

        Raises CorruptModelError for files that are not what they were when they were read whole, before the first ``done`` or after
        the last."""
        chunks = [chunk for name, matrix in wanted.items() for chunk in _chunks(name, matrix)]
        # One buffer a thread is being filled, as many are full or on their way to the device.
        count = min(len(chunks), 2 * self._threads + 1)
        stages = [_stage(self._queues) for _ in range(count)]
        views = [memoryview(stage.numpy()) for stage in stages]  # type: ignore[arg-type]
        copied: list[torch.cuda.Event | None] = [None] * count
        ahead = max(1, count - 2)  # so that a buffer's copy is long queued when it is filled again
        reading: deque[Future[None]] = deque()
        with OpenFiles() as files:
            for chunk in chunks:
                files.descriptor(chunk.part.file)
            pool = ThreadPoolExecutor(self._threads, thread_name_prefix="weights")
            try:

                def begin(index: int) -> None:
                    turn, chunk = index % count, chunks[index]
                    event = copied[turn]
                    if event is not None:
                        event.synchronize()
                    view = views[turn][: chunk.size]
                    reading.append(pool.submit(files.read, chunk.part.file, chunk.part.offset + chunk.start, view))

                for index in range(min(ahead, len(chunks))):
                    begin(index)
                for index, chunk in enumerate(chunks):
                    reading.popleft().result()
                    turn = index % count
                    self._copy(wanted[chunk.name], chunk, stages[turn][: chunk.size])
                    if self._queues:
                        event = copied[turn] = torch.cuda.Event()
                        event.record()
                    if index + ahead < len(chunks):
                        begin(index + ahead)
                    self._progress(chunk.size)
                    if chunk.ends_matrix:
                        done(chunk.name, self._open.pop(chunk.name)[0])
            finally:
                pool.shutdown(cancel_futures=True)  # before their files are closed
            files.check()

    def _copy(self, matrix: FileMatrix, chunk: _Chunk, stage: torch.Tensor) -> None:
        """Queue the copy of a chunk, and the conversion of the part that it ends."""
        target, raw = self._open.get(chunk.name, (None, None))
        if target is None:
            target = torch.empty(matrix.n, matrix.k, dtype=self._type, device=self._device)
        rows = target[chunk.row : chunk.row + chunk.part.rows]
        kind = _TYPES[chunk.part.encoding]
        plain = kind == self._type and matrix.columns is None
        if plain:
            into = rows.view(torch.uint8).view(-1)
        else:
            if chunk.start == 0:
                raw = torch.empty(matrix.part_bytes(chunk.part), dtype=torch.uint8, device=self._device)
            assert raw is not None
            into = raw
        into[chunk.start : chunk.start + chunk.size].copy_(stage, non_blocking=True)
        if chunk.ends_part and not plain:
            assert raw is not None
            first, last = matrix.columns or (0, matrix.stored_k)
            rows.copy_(raw.view(kind).view(-1, matrix.stored_k)[:, first:last])
            raw = None
        self._open[chunk.name] = (target, raw)


def _stage(pinned: bool) -> torch.Tensor:
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)


def _chunks(name: str, matrix: FileMatrix) -> Iterator[_Chunk]:
    row = 0
    for index, part in enumerate(matrix.parts):
        total = matrix.part_bytes(part)
        for start in range(0, total, CHUNK_BYTES):
            size = min(CHUNK_BYTES, total - start)
            ends = start + size == total
            yield _Chunk(name, part, row, start, size, ends, ends and index == len(matrix.parts) - 1)
        row += part.rows
