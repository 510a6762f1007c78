"""Weights of one process in others of the same GPU, through CUDA's inter-process handles: bytes in a message, no copy.

The process that exports must outlive those that attach; each of them needs an export of its own (torch counts references).
"""

import msgspec
import torch

from relay.kernels.cuda.weights import TYPES


class SharedTensor(msgspec.Struct, frozen=True):
    """Where a contiguous [n, k] lies in another process: the fields of torch's storage handle."""

    name: str
    shape: tuple[int, int]
    offset: int  # of the tensor in its storage, in elements
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    dtype: str = "bfloat16"


def export_tensors(matrices: dict[str, torch.Tensor]) -> bytes:
    """A message for one process. The tensors must stay as they are."""
    shared = []
    for name, tensor in matrices.items():
        _, handle, size, offset, counter, counter_offset, event, sync = tensor.untyped_storage()._share_cuda_()
        shape = (tensor.shape[0], tensor.shape[1])
        shared.append(
            SharedTensor(
                name,
                shape,
                tensor.storage_offset(),
                handle,
                size,
                offset,
                counter,
                counter_offset,
                event,
                sync,
                str(tensor.dtype).removeprefix("torch."),
            )
        )
    return msgspec.msgpack.encode(shared)


def attach_tensors(message: bytes, device: str) -> dict[str, torch.Tensor]:
    """The tensors of ``message`` on ``device``, the GPU they were exported from."""
    torch.cuda.init()
    torch.cuda.set_device(device)
    index = torch.device(device).index or 0
    found: dict[str, torch.Tensor] = {}
    for one in msgspec.msgpack.decode(message, type=list[SharedTensor]):
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
        tensor = torch.empty(0, dtype=TYPES[one.dtype], device=device)
        found[one.name] = tensor.set_(storage, one.offset, one.shape, (one.shape[1], 1))
    return found
