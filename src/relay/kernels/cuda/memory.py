"""How much of a device one process may use, and the lines that say so when it is too little."""

import math
from collections.abc import Callable

import torch

from relay.devices import GPU_OVERHEAD_BYTES
from relay.errors import DoesNotFitError, UsageError
from relay.kernels.program import Geometry

LEAST_CAPABILITY = (8, 0)
MIB, GIB = 1 << 20, 1 << 30

Allocate = Callable[[int], torch.Tensor]
"""Bytes → uint8 memory of the device. Raises DoesNotFitError."""


def check_device(device: str) -> None:
    """Raises UsageError for no GPU, no such GPU, or one too old for bf16 tensor cores."""
    if not torch.cuda.is_available():
        raise UsageError(
            "no CUDA device: torch sees none; check the driver with nvidia-smi, or serve with --backend cpu"
        )
    count, index = torch.cuda.device_count(), torch.device(device).index or 0
    if index >= count:
        raise UsageError(
            f"--device {device}: torch sees {count} CUDA device{'s' if count > 1 else ''}, numbered from 0"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        raise UsageError(
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}; "
            f"the cuda backend needs {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (Ampere) or newer"
        )


def kv_block_bytes(geometry: Geometry, block_size: int) -> int:
    return geometry.num_layers * 2 * geometry.kv_width * block_size * 2


def kv_blocks_that_fit(device: str, geometry: Geometry, block_size: int, fraction: float, borrowed: int = 0) -> int:
    """KV blocks that fit in ``fraction`` of the device beside what this process holds already, and in what is free now.
    Raises DoesNotFitError for none.

    ``borrowed``: its part of memory that another process holds for it.

    The first bound does not depend on other processes, so that workers that start together get what they get alone.
    """
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) + borrowed
    allowed, kept = fraction * total, GPU_OVERHEAD_BYTES // 4
    room = min(allowed - held - GPU_OVERHEAD_BYTES, free - kept)
    block = kv_block_bytes(geometry, block_size)
    if room >= block:
        return int(room) // block
    if free - kept < block:
        why = (
            f"only {_gib(free)} of it are free, of which {_gib(kept)} stay so; end what else uses it, or choose another"
        )
    else:
        why = (
            f"a worker here may use {_gib(allowed)} ({fraction:.0%} of it), its weights and buffers take {_gib(held)}, and "
            f"{_gib(GPU_OVERHEAD_BYTES)} are kept for CUDA's own; raise --gpu-memory-utilization, start fewer workers on this GPU, "
            "use a larger one or several (--tensor-parallel-size), or lower --max-num-batched-tokens"
        )
    raise DoesNotFitError(
        f"no room for a KV block, which needs {_gib(block)} for its {block_size} tokens: {device} has {_gib(total)}; {why}"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / GIB:.4f} GiB"


def kv_pool(shape: tuple[int, ...], dtype: torch.dtype, device: str, allocate: Allocate | None) -> torch.Tensor:
    """A cache of this shape and 16-bit type, its contents undefined. Raises DoesNotFitError."""
    size = 2 * math.prod(shape)
    try:
        if allocate is not None:
            return allocate(size).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise does_not_fit(device, f"{shape[2]} KV blocks", size) from error


class Fitting:
    """Within it a lack of memory for ``what``, whose bytes nobody has counted, is a DoesNotFitError."""

    def __init__(self, device: str, what: str) -> None:
        self._device, self._what = device, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            free, total = torch.cuda.mem_get_info(self._device)
            raise DoesNotFitError(
                f"{self._what} do not fit on {self._device}, where {free // MIB} of {total // MIB} MiB are free; use a larger GPU, "
                "or lower --max-num-batched-tokens, --max-num-seqs or the KV cache (--gpu-memory-utilization, --kv-cache-memory)"
            ) from error


def does_not_fit(device: str, what: str, needed: int) -> DoesNotFitError:
    free, total = torch.cuda.mem_get_info(device)
    return DoesNotFitError(
        f"{what} need {needed // MIB} MiB on {device}, where {free // MIB} of {total // MIB} MiB are free; "
        "use a larger GPU, more of them (--device), or fewer workers on it"
    )
