"""From a spec to a loaded engine: pack, backend, KV pool, scheduler, runner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler, SchedulerLimits
from relay.errors import UsageError
from relay.kernels.backend import Backend, QueueingBackend
from relay.kernels.numerics import numerics_id
from relay.kernels.perturbed import perturbed
from relay.models.llama import build_program
from relay.transfer.contract import Identity, Layout
from relay.transfer.frame import Checksum
from relay.worker.device import make_backend, num_kv_blocks
from relay.worker.served_pack import open_pack
from relay.worker.spec import WorkerSpec
from relay.worker.status_page import Phase


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that computes, ready to run."""

    backend: Backend
    runner: Runner
    scheduler: Scheduler
    limits: SchedulerLimits
    identity: Identity
    num_layers: int
    checksum: Checksum
    overlapped: bool  # the backend queues its work on a device


def assemble(spec: WorkerSpec, announce: Callable[[Phase], None] = lambda phase: None) -> Engine:
    """Load what ``spec`` names; ``announce`` hears of each phase that follows "loading". Raises RelayError with the line for the
    user."""
    pack = open_pack(spec)
    program = build_program(pack.config)
    geometry = program.geometry
    max_model_len = spec.max_model_len or geometry.max_positions
    if max_model_len > geometry.max_positions:
        raise UsageError(f"max_model_len {max_model_len} exceeds the model's {geometry.max_positions} positions")
    layout = Layout(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, spec.kv_cache_dtype)
    block_bytes = layout.token_bytes * geometry.num_layers * spec.block_size
    backend, checksum = make_backend(spec)
    if spec.perturb:
        backend = perturbed(backend, spec.perturb)
    if spec.kv_cache_memory_bytes:
        num_kv_blocks(spec, backend, block_bytes)  # before gigabytes are loaded for nothing
    backend.load(program, pack)
    num_blocks = num_kv_blocks(spec, backend, block_bytes)
    backend.allocate_kv(num_blocks, spec.block_size, spec.kv_cache_dtype)
    queueing = spec.backend == "cuda"
    if queueing:
        announce("compiling")
        cast(QueueingBackend, backend).warm_up(max_model_len)
    name = numerics_id({**backend.numerics(), "model": pack.digest})
    try:
        limits = SchedulerLimits(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            block_size=spec.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            growth_tokens=spec.growth_tokens,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Engine(
        backend=backend,
        runner=Runner(backend, program, limits),
        scheduler=Scheduler(limits, name),
        limits=limits,
        identity=Identity(spec.worker, spec.incarnation, pack.digest, name, layout),
        num_layers=geometry.num_layers,
        checksum=checksum,
        overlapped=queueing,
    )
