"""Weights of one process in others of the same GPU, through CUDA's inter-process handles: bytes in a message, no copy.

The process that exports must outlive those that attach; each of them needs an export of its own (torch counts references).
"""

import math

import msgspec
import torch

from relay.kernels.cuda.weights import HeldWeights

_TYPES = {
    str(one).removeprefix("torch."): one
    for one in (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int16, torch.int32)
}


class SharedTensor(msgspec.Struct, frozen=True):
    """Where a contiguous tensor lies in another process: the fields of torch's storage handle."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # of the tensor in its storage, in elements
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class Message(msgspec.Struct, frozen=True):
    """``HeldWeights`` as other processes find them."""

    matrices: list[SharedTensor]
    scales: list[SharedTensor]


def export_weights(held: HeldWeights) -> bytes:
    """A message for one process. The tensors must stay as they are."""
    return msgspec.msgpack.encode(Message(_export(held.matrices), _export(held.scales)))


def attach_weights(message: bytes, device: str) -> HeldWeights:
    """The weights of ``message`` on ``device``, the GPU they were exported from."""
    torch.cuda.init()
    torch.cuda.set_device(device)
    found = msgspec.msgpack.decode(message, type=Message)
    return HeldWeights(_attach(found.matrices, device), _attach(found.scales, device))


def _export(tensors: dict[str, torch.Tensor]) -> list[SharedTensor]:
    shared = []
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        _, handle, size, offset, counter, counter_offset, event, sync = tensor.untyped_storage()._share_cuda_()
        shared.append(
            SharedTensor(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tensor.storage_offset(),
                handle,
                size,
                offset,
                counter,
                counter_offset,
                event,
                sync,
            )
        )
    return shared


def _attach(shared: list[SharedTensor], device: str) -> dict[str, torch.Tensor]:
    index = torch.device(device).index or 0
    found: dict[str, torch.Tensor] = {}
    for one in shared:
        storage = torch.UntypedStorage._new_shared_cuda(
            index,
            one.handle,
            one.storage_bytes,
            one.storage_offset_bytes,
            one.counter_handle,
            one.counter_offset,
            one.event_handle,
            one.event_sync_required,
        )
        strides = [math.prod(one.shape[axis + 1 :]) for axis in range(len(one.shape))]
        tensor = torch.empty(0, dtype=_TYPES[one.dtype], device=device)
        found[one.name] = tensor.set_(storage, one.offset, one.shape, strides)
    return found
