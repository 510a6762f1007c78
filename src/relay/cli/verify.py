"""``relay verify``: the same requests on every path, compared bit for bit."""

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click

from relay.config import BACKENDS, KV_DTYPES, TRANSPORTS, BackendName, TransportName, WorkerConfig
from relay.devices import RoleDevices
from relay.errors import StartupError
from relay.extras import require_gpu
from relay.verify.compare import PathReport, compare
from relay.verify.paths import PATHS, QUICK, Setting, alone, paths_of

INJECTED_PATH = "split"
KV_MEMORY_BYTES = 1 << 30


@click.command()
@click.argument("model", default="smollm2")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quick", is_flag=True, help="Fewer paths, shorter prompts.")
@click.option(
    "--inject", type=click.Choice(["kv-bit", "rounding"]), help="Make one path wrong by one bit: must turn red."
)
@click.option(
    "--path", "only", multiple=True, type=click.Choice(list(PATHS)), help="Run only this path; may be repeated."
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="cpu",
    show_default=True,
    help="C kernels, an NVIDIA GPU, or numpy (very slow, bits depend on the batch).",
)
@click.option("--device", help="GPUs, with commas; workers take them in turn [default: cuda:0].")
@click.option(
    "--tensor-parallel-size", type=int, default=1, show_default=True, help="Processes that share each worker's work."
)
@click.option("--threads", type=int, default=0, show_default=True, help="Threads of each worker; 0: all cores.")
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(KV_DTYPES),
    default="auto",
    show_default=True,
    help="Numbers in the KV cache; auto: float32, cuda: bfloat16.",
)
@click.option("--quantization", type=click.Choice(["int8"]), help="As `relay serve` takes it; GPUs only.")
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="How KV travels, as `relay serve` takes it.",
)
@click.option("--offline", is_flag=True, help="Never touch the network.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Model cache [default: ~/.cache/relay]."
)
def verify(
    model: str,
    as_json: bool,
    quick: bool,
    inject: str | None,
    only: tuple[str, ...],
    backend: BackendName,
    device: str | None,
    tensor_parallel_size: int,
    threads: int,
    kv_cache_dtype: str,
    quantization: Literal["int8"] | None,
    transport: TransportName,
    offline: bool,
    cache_dir: Path | None,
) -> int:
    """Run one set of requests on MODEL alone, batched, chunked, cached, preempted, split and resumed after SIGKILLs; compare token
    ids, logits rows and KV bytes. Exit 0 only if all are identical and every path was really taken."""
    if transport == "nixl":
        from relay.transfer.nixl.wire import require_installed

        require_installed()
    from relay.models.progress import console_progress
    from relay.models.store import default_cache_dir, open_model
    from relay.verify.requests import verify_requests

    worker = WorkerConfig.of(
        backend,
        devices=tuple(device.split(",")) if device is not None else None,
        by_role=RoleDevices(ranks=tensor_parallel_size),
        threads=threads,
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
        transport=transport,
        kv_cache_memory_bytes=KV_MEMORY_BYTES,
    )
    if backend == "cuda":
        require_gpu()
    loaded = open_model(
        model,
        cache_dir=cache_dir or default_cache_dir(os.environ),
        offline=offline,
        progress=console_progress(),
        for_device=backend == "cuda",
    )
    requests = verify_requests(
        lambda text: loaded.tokenizer.encode(text, add_special=False),
        loaded.config.eos_token_ids,
        loaded.max_model_len,
        quick=quick or inject is not None,
    )
    names = list(only) or ([INJECTED_PATH] if inject else list(QUICK) if quick else paths_of(backend))
    reports = asyncio.run(_run(Setting(loaded, requests, worker), names, inject, quiet=as_json))
    compared = sum(report.compared for report in reports.values())
    identical = sum(report.identical for report in reports.values())
    if as_json:
        click.echo(json.dumps(_document(reports, compared, identical)))
    else:
        click.echo(f"{identical} of {compared} identical")
    taken = all(report.evidence for report in reports.values())
    return 0 if compared == identical > 0 and taken else 1


async def _run(setting: Setting, names: list[str], inject: str | None, *, quiet: bool) -> dict[str, PathReport]:
    """Baseline, then every path of ``names``; a row is printed as soon as its path is done."""
    expected, _ = await alone(setting)
    failures = [f"{name}: {output.failure}" for name, output in expected.items() if output.failure]
    if failures:
        raise StartupError(f"the baseline itself failed: {failures[0]}")
    if not quiet:
        click.echo(f"{'path':20} {'identical':>12} {'logits rows':>12} {'KV blocks':>10}  evidence")
    reports = {}
    for name in names:
        perturbed = Setting(
            setting.model, setting.requests, setting.worker, inject if inject and name == names[-1] else ""
        )
        outputs, evidence = await PATHS[name](perturbed)
        report = reports[name] = compare(expected, outputs, evidence)
        if not quiet:
            counts = f"{report.identical}/{report.compared}"
            shown = evidence or "NOT TAKEN: nothing shows that this path was exercised"
            click.echo(f"{name:20} {counts:>12} {report.logit_rows:>12} {report.kv_blocks:>10}  {shown}")
            for line in report.differences[:5]:
                click.echo(f"    {line}")
    return reports


def _document(reports: dict[str, PathReport], compared: int, identical: int) -> dict[str, Any]:
    return {
        "paths": {name: asdict(report) for name, report in reports.items()},
        "compared": compared,
        "identical": identical,
    }
