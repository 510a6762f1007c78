"""Building the backend that a spec names, and the KV pool that fits."""

import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from relay.errors import DoesNotFitError, UsageError, WeightsLostError
from relay.extras import require_gpu
from relay.kernels.backend import Backend, QueueingBackend
from relay.kernels.kv_frames import SharingFailed
from relay.transfer.contract import TransferLimits
from relay.transfer.frame import Checksum
from relay.transfer.ring import DEFAULT_RING_BYTES
from relay.transfer.wire import Wire
from relay.worker.load_report import report_for
from relay.worker.spec import WorkerSpec
from relay.worker.weights_link import NotShared, fetch, wait_for_end

if TYPE_CHECKING:
    from relay.kernels.cpu.backend import CpuBackend
    from relay.kernels.cuda.backend import CudaBackend
    from relay.kernels.cuda.weights import HeldWeights
    from relay.kernels.ranks.exchange import MeetingPlace
    from relay.kernels.ranks.share import Share


@dataclass(frozen=True, slots=True)
class Flow:
    """How much of a transfer may be under way."""

    ring_bytes: int
    limits: TransferLimits


def device_wires(spec: WorkerSpec, host_identity: str) -> list[Wire]:
    """CUDA IPC, which goes before the other wires. Raises UsageError where it was asked for by name and cannot be."""
    if spec.transport not in ("auto", "ipc") or spec.backend != "cuda":
        return []
    from relay.kernels.cuda.ipc import DeviceMemory
    from relay.transfer.ipc import IpcWire

    try:
        memory = DeviceMemory(spec.device)
        return [IpcWire(host_identity, memory, area_bytes(memory.total_bytes()))]
    except SharingFailed as error:
        if spec.transport == "ipc":
            raise UsageError(f"--transport ipc: {error}") from error
        print(f"KV goes through host memory: {error}", file=sys.stderr, flush=True)
        return []


def area_bytes(total: int) -> int:
    """Of the memory that one connection over CUDA IPC gets on a device of ``total`` bytes: 1 GiB on the largest, so that P fills
    one half while D empties the other. The 2 MiB more are for the records' slots: eight of the largest frames fit and not seven."""
    return (max(64 << 20, min(1 << 30, total // 128)) >> 21 << 21) + (2 << 20)


def flow_of(backend: str) -> Flow:
    """What suits ``backend``: on a device a frame costs launches and waits, so it is large, and many are under way at once. A
    prompt of 256 tokens (32 MiB in Llama's 8B) is one frame, and four layers of 2,048 tokens are; in the ring a layer is. The
    window is so wide that the ring or the area bounds what is under way: room comes back frame by frame, credit for several."""
    if backend == "cuda":
        limits = TransferLimits(
            max_frame_bytes=128 << 20, window_bytes=2 << 30, join_bytes=32 << 20, credit_bytes=192 << 20
        )
        return Flow(64 << 20, limits)
    return Flow(DEFAULT_RING_BYTES, TransferLimits())


def make_backend(spec: WorkerSpec) -> tuple[Backend, Checksum]:
    """The backend ``spec`` names and the fastest CRC32C there is for it. Raises UsageError for a missing extra or device."""
    if spec.backend == "reference":
        from relay.kernels.reference.backend import ReferenceBackend
        from relay.transfer.checksum import crc32c as vectorised

        return ReferenceBackend(), vectorised
    from relay.kernels.cpu.crc32c import crc32c as instruction

    if spec.backend == "cuda":
        instruction(b"")  # C kernels that are not built are found now and not by the first transfer
    if spec.ranks > 1:
        from relay.worker.ranks import start_ranks

        return start_ranks(spec), instruction
    if spec.backend == "cuda":
        return _cuda(spec), instruction
    return cpu_backend(spec), instruction


def rank_share(spec: WorkerSpec, rank: int, place: "MeetingPlace") -> "Share":
    """What ``rank`` of the worker computes with. Raises UsageError for a missing extra or device."""
    if spec.backend == "cuda":
        device = spec.rank_devices[rank]
        backend = _cuda(msgspec.structs.replace(spec, device=device, weights_socket="", gpu_sharers=1))
        from relay.kernels.cuda.rank_share import CudaRankShare

        return CudaRankShare(backend, device, spec.ranks, rank, spec.max_num_batched_tokens, spec.max_num_seqs)
    from relay.kernels.ranks.exchange import Exchange
    from relay.kernels.ranks.share import RankShare

    return RankShare(cpu_backend(spec), Exchange(place, rank), spec.ranks, rank)


def cpu_backend(spec: WorkerSpec) -> "CpuBackend":
    """With its rank's share of the worker's threads."""
    from relay.kernels.cpu.backend import CpuBackend

    threads = max(1, (spec.threads or len(os.sched_getaffinity(0))) // spec.ranks)
    return CpuBackend(threads, max_tokens=spec.max_num_batched_tokens, max_sampled=spec.max_num_seqs)


def num_kv_blocks(spec: WorkerSpec, backend: Backend, block_bytes: int) -> int:
    """Blocks of the KV pool: by the memory given, or what the loaded device has left. Raises DoesNotFitError for none."""
    if spec.kv_cache_memory_bytes:
        num_blocks = spec.kv_cache_memory_bytes // block_bytes
        if num_blocks < 1:
            raise DoesNotFitError(
                f"--kv-cache-memory of {spec.kv_cache_memory_bytes} bytes holds no block: "
                f"the {spec.block_size} tokens of --block-size need {block_bytes} bytes"
            )
        return num_blocks
    return cast(QueueingBackend, backend).kv_blocks_that_fit(spec.block_size, spec.gpu_memory_fraction)


def _cuda(spec: WorkerSpec) -> "CudaBackend":
    require_gpu()
    from relay.kernels.cuda.backend import CudaBackend

    return CudaBackend(
        spec.device,
        shared=_shared_weights(spec) if spec.weights_socket else None,
        sharers=spec.gpu_sharers,
        max_rows=spec.max_num_seqs,
        max_tokens=spec.max_num_batched_tokens,
        progress=report_for(spec.worker, spec.pack_path, spec.device).moved,
        dtype=spec.kv_cache_dtype,
        quantized=spec.quantization == "int8",
    )


def _shared_weights(spec: WorkerSpec) -> "HeldWeights | None":
    """What the device's holder has loaded; None, with a line that says why, if it cannot be had."""
    from relay.kernels.cuda.memory import check_device
    from relay.kernels.cuda.sharing import attach_weights

    check_device(spec.device)
    try:
        connection, message = fetch(spec.weights_socket)
        shared = attach_weights(message, spec.device)
    except (NotShared, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        print(f"weights are not shared: {reason}; this worker loads a copy", file=sys.stderr, flush=True)
        return None

    def watch() -> None:
        wait_for_end(connection)
        raise WeightsLostError("the process that holds this worker's weights has ended; this worker ends")

    threading.Thread(target=watch, name="weights", daemon=True).start()
    print(f"weights of {spec.device} are shared by {spec.gpu_sharers} workers", file=sys.stderr, flush=True)
    return shared
