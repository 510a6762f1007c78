"""Packed weights on the device as bf16 or fp16 [n, k], the layout that the tensor cores, the copy engine and the library read.

Packed bytes go from the mapped file through two pinned buffers to the device and are unpacked there, so that a load runs at
the speed of the host's memory. Values are those of ``packing.unpack_matrix``, rounded once to the type asked
for (exact for packs of that type).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from relay.kernels import packing
from relay.kernels.weights import Encoding, PackedMatrix

STAGE_BYTES = 32 << 20
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[int], None]  # bytes moved since the last call


def no_progress(moved: int) -> None:
    """For callers that do not look."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Matrices of a program by name: 16-bit [n, k], or a quantised layer's codes, in the layout of its kernel, where ``scales``
    (fp32 [n]) has the name."""

    matrices: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (*self.matrices.values(), *self.scales.values()))


class WeightUpload:
    """Moves packed matrices to ``device`` on the current stream; one object for one load, whose buffers go with it."""

    def __init__(self, device: str, progress: Progress = no_progress, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.dtype = dtype
        self.progress = progress
        self._stages: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def matrix(self, packed: PackedMatrix) -> torch.Tensor:
        """[n, k] of ``packed``, of the type asked for."""
        return unpack(self._bytes(packed.data), packed.n, packed.k, packed.encoding, self.dtype)

    def _bytes(self, data: np.ndarray) -> torch.Tensor:
        """``data`` as uint8 on the device; pinned buffers in turn, each refilled once its copy has ended."""
        source = data.view(np.uint8).reshape(-1)
        target = torch.empty(source.size, dtype=torch.uint8, device=self.device)
        if not self._stages:
            self._stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        for start in range(0, source.size, STAGE_BYTES):
            turn, self._next = self._next, 1 - self._next
            event = self._events[turn]
            if event is not None:
                event.synchronize()
            count = min(STAGE_BYTES, source.size - start)
            self._stages[turn].numpy()[:count] = source[start : start + count]
            target[start : start + count].copy_(self._stages[turn][:count], non_blocking=True)
            event = self._events[turn] = torch.cuda.Event()
            event.record()
            self.progress(count)
        return target


def unpack(raw: torch.Tensor, n: int, k: int, encoding: Encoding, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[n, k] of the bytes of a packed matrix (``packing.py`` has the layouts), on whatever device they are.

    Each step is one fp32 operation rounded by itself, as in ``packing.unpack_matrix``.
    """
    panels = -(-n // packing.PANEL)
    match encoding:
        case Encoding.BF16:
            return _rows(raw.view(torch.bfloat16).view(panels, k, packing.PANEL).to(dtype), n, k)
        case Encoding.F16:
            return _rows(raw.view(torch.float16).view(panels, k, packing.PANEL).to(dtype), n, k)
        case Encoding.F32:
            return _rows(raw.view(torch.float32).view(panels, k, packing.PANEL).to(dtype), n, k)
        case Encoding.Q8_0:
            groups = raw.view(-1, 2176)
            scales = groups[:, :128].contiguous().view(torch.float16).float()[:, None, :]
            codes = groups[:, 128:].contiguous().view(torch.int8).view(-1, packing.GROUP, packing.PANEL)
            wide = codes.float() * scales
        case Encoding.Q4_1:
            groups = raw.view(-1, 1280)
            scales = groups[:, :128].contiguous().view(torch.float16).float()[:, None, :]
            minimums = groups[:, 128:256].contiguous().view(torch.float16).float()[:, None, :]
            words = groups[:, 256:].contiguous().view(torch.int32).view(-1, 4, 1, packing.PANEL)
            shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=raw.device).view(1, 1, 8, 1)
            nibbles = (words >> shifts) & 15
            wide = nibbles.view(-1, packing.GROUP, packing.PANEL).float() * scales + minimums
    return _rows(wide.to(dtype).view(panels, k, packing.PANEL), n, k)


def _rows(panels: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """[panels, k, 64] → [n, k]."""
    return panels.permute(0, 2, 1).reshape(-1, k)[:n].contiguous()
