"""``relay serve``: flags to configuration, and one line for whatever is wrong with them."""

from pathlib import Path
from typing import Literal

import click

from relay.config import (
    BACKENDS,
    DTYPES,
    KV_DTYPES,
    LOG_LEVELS,
    TRANSPORTS,
    BackendName,
    ServeConfig,
    TransportName,
    WorkerConfig,
    parse_bytes,
)
from relay.devices import RoleDevices
from relay.extras import require_gpu


@click.command()
@click.argument("model", default="smollm2")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--served-model-name", help="Name in the API [default: the model's own].")
@click.option(
    "--prefill",
    type=int,
    help="Prefill workers; 0 serves colocated [default: 1, or one for each of --prefill-devices].",
)
@click.option(
    "--decode",
    type=int,
    help="Decode workers (with --prefill 0: workers for both) [default: 1, or one for each of --decode-devices].",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="cpu",
    show_default=True,
    help="C kernels, an NVIDIA GPU, or numpy (very slow, bits depend on the batch).",
)
@click.option("--device", help="GPUs, with commas; workers take them in turn [default: cuda:0].")
@click.option("--prefill-devices", help="GPUs of the prefill workers, with commas [default: those of --device].")
@click.option("--decode-devices", help="GPUs of the decode workers, with commas [default: those of --device].")
@click.option("--gpu-memory-utilization", type=float, help="Part of each GPU that workers share [default: 0.9].")
@click.option(
    "--tensor-parallel-size",
    type=int,
    default=1,
    show_default=True,
    help="Processes that share each worker's work, up to 8; output is exact for each number, and differs between numbers.",
)
@click.option("--threads", type=int, default=0, show_default=True, help="Threads of each worker; 0: all cores.")
@click.option(
    "--kv-cache-memory", metavar="SIZE", help="KV cache of each worker [default: 1G; cuda: what the GPU has left]."
)
@click.option("--max-model-len", type=int, help="Longest sequence in tokens [default: the model's].")
@click.option("--max-num-seqs", type=int, help="Sequences a worker runs at once [default: 64; cuda: 256].")
@click.option("--max-num-batched-tokens", type=int, help="Tokens of one engine step [default: 256; cuda: 2048].")
@click.option("--block-size", type=int, help="Tokens of a KV block [default: 16; cuda: 64].")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Activations.")
@click.option(
    "--quantization", type=click.Choice(["int8"]), help="Weights of linears [default: as they are]; GPUs only."
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(KV_DTYPES),
    default="auto",
    show_default=True,
    help="Numbers in the KV cache; auto: float32, cuda: that of --dtype. On CPUs bfloat16 halves it and gives other tokens.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="How KV travels; auto: GPU to GPU where that works, else shared memory on one host, else TCP. ipc: as auto, and GPU to "
    "GPU must work. nixl: needs the extra of that name.",
)
@click.option("--seed", type=int, help="Draw the seeds of requests without one from this [default: at random].")
@click.option("--offline", is_flag=True, help="Never touch the network.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Model cache [default: ~/.cache/relay]."
)
@click.option(
    "--grace", type=float, default=30.0, show_default=True, help="Seconds running requests get after SIGTERM."
)
@click.option(
    "--gateways", type=int, default=1, show_default=True, help="Gateway processes on the one port, under a supervisor."
)
@click.option(
    "--orphan-hold",
    type=float,
    default=10.0,
    show_default=True,
    help="With --gateways: seconds workers keep what a lost gateway ordered.",
)
@click.option(
    "--worker-port",
    type=int,
    default=0,
    show_default=True,
    help="Port workers dial, of the first gateway (the next ports follow); 0 takes free ones.",
)
@click.option(
    "--worker-address",
    help="tcp://HOST:PORT that workers are told to dial, with commas for each gateway [default: our own].",
)
@click.option("--perturb", metavar="WORKER=KIND", multiple=True, help="Make a worker wrong on purpose, for tests.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to record what the gateway and every worker are told and decide, for `relay replay`. Holds prompts.",
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="Of what stderr shows."
)
def serve(
    model: str,
    host: str,
    port: int,
    served_model_name: str | None,
    prefill: int | None,
    decode: int | None,
    backend: BackendName,
    device: str | None,
    prefill_devices: str | None,
    decode_devices: str | None,
    tensor_parallel_size: int,
    gpu_memory_utilization: float | None,
    threads: int,
    kv_cache_memory: str | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    block_size: int | None,
    dtype: str,
    quantization: Literal["int8"] | None,
    kv_cache_dtype: str,
    transport: TransportName,
    seed: int | None,
    offline: bool,
    cache_dir: Path | None,
    grace: float,
    gateways: int,
    orphan_hold: float,
    record: Path | None,
    worker_port: int,
    worker_address: str | None,
    perturb: tuple[str, ...],
    log_level: str,
) -> int:
    """Serve MODEL (a short name, org/name, a folder or a GGUF file) over HTTP."""
    by_role = RoleDevices(_names(prefill_devices), _names(decode_devices), tensor_parallel_size)
    if transport == "nixl":
        from relay.transfer.nixl.wire import require_installed

        require_installed()
    config = ServeConfig(
        model=model,
        host=host,
        port=port,
        served_model_name=served_model_name,
        prefill=by_role.num_workers(by_role.prefill) if prefill is None else prefill,
        decode=by_role.num_workers(by_role.decode) if decode is None else decode,
        seed=seed,
        offline=offline,
        cache_dir=cache_dir,
        log_level=log_level,
        grace_s=grace,
        gateways=gateways,
        orphan_hold_s=orphan_hold,
        worker_port=worker_port,
        worker_address=worker_address,
        perturb=perturb,
        worker=WorkerConfig.of(
            backend,
            devices=_names(device) if device is not None else None,
            by_role=by_role,
            gpu_memory_utilization=gpu_memory_utilization,
            threads=threads,
            dtype=dtype,
            quantization=quantization or "",
            kv_cache_dtype=kv_cache_dtype,
            transport=transport,
            kv_cache_memory_bytes=parse_bytes(kv_cache_memory) if kv_cache_memory is not None else None,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            record=record,
        ),
    )
    if backend == "cuda":
        require_gpu()
    if config.gateways > 1:
        from relay.cli.supervisor import run_supervisor

        return run_supervisor(config)
    from relay.cli.server import run_server

    return run_server(config)


def _names(devices: str | None) -> tuple[str, ...]:
    return tuple(devices.split(",")) if devices is not None else ()
