"""``relay chaos``: a real cluster under faults from a seed; every answer compared byte for byte with a calm run."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import click

from relay.chaos.netns import enter
from relay.chaos.oracle import Calm
from relay.chaos.packets import PacketsUnavailable
from relay.chaos.plan import choose_kinds
from relay.chaos.report import report
from relay.chaos.run import run_chaos
from relay.chaos.settings import CellResult, ChaosSettings
from relay.chaos.shapes import parse_shape
from relay.config import BACKENDS, KV_DTYPES, TRANSPORTS, BackendName, WorkerConfig, parse_bytes
from relay.errors import UsageError
from relay.extras import require_gpu


@click.command()
@click.argument("model", default="smollm2")
@click.option("--requests", type=int, default=120, show_default=True, help="Requests to each cluster.")
@click.option("--faults", type=int, default=30, show_default=True, help="Faults to each cluster.")
@click.option("--seed", "seeds", type=click.IntRange(min=0), multiple=True, help="Of requests and faults; several.")
@click.option("--seeds", "num_seeds", type=click.IntRange(1, 1000), help="That many seeds from 1 on instead.")
@click.option("--shape", "shapes", multiple=True, help="2P+3D, or 3 for colocated workers; several.  [default: 1P+2D]")
@click.option("--gateways", type=int, default=1, show_default=True, help="Of each cluster; several are killed, too.")
@click.option(
    "--netns",
    type=click.Choice(["off", "on", "auto"]),
    is_flag=False,
    flag_value="on",
    default="off",
    show_default=True,
    help="Run in a network namespace of its own and lose packets there (Linux root, nft); auto: where that is possible.",
)
@click.option("--kinds", help="Only these kinds of faults, separated by commas.")
@click.option("--concurrency", type=int, default=6, show_default=True, help="Requests at once.")
@click.option("--longest-prompt", type=int, default=460, show_default=True, help="Words of the longest prompt.")
@click.option("--longest-answer", type=int, default=48, show_default=True, help="Tokens of the longest answer.")
@click.option("--backend", type=click.Choice(BACKENDS), default="cpu", show_default=True, help="Of the workers.")
@click.option("--device", help="GPUs, with commas; workers take them in turn [default: cuda:0].")
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="Of KV; what is not TCP goes past the proxy.",
)
@click.option("--threads", type=int, default=0, show_default=True, help="Threads of each worker; 0: all cores.")
@click.option("--kv-cache-memory", metavar="SIZE", default="512M", show_default=True, help="KV cache of each worker.")
@click.option("--kv-cache-dtype", type=click.Choice(KV_DTYPES), default="auto", show_default=True, help="Of it.")
@click.option("--max-num-batched-tokens", type=int, default=256, show_default=True, help="Tokens of one engine step.")
@click.option("--offline", is_flag=True, help="Never touch the network.")
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Model cache.")
@click.option("--poison", type=int, default=0, help="Add requests that crash every engine they visit.")
@click.option("--inject", type=click.Choice(["kv-bit", "rounding"]), help="Make one worker wrong: must turn red.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for recordings of every gateway and worker; they are replayed and must decide the same. Holds prompts.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of cells' results; those that passed already are not run again.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def chaos(
    model: str,
    requests: int,
    faults: int,
    seeds: tuple[int, ...],
    num_seeds: int | None,
    shapes: tuple[str, ...],
    gateways: int,
    netns: str,
    kinds: str | None,
    concurrency: int,
    longest_prompt: int,
    longest_answer: int,
    backend: BackendName,
    device: str | None,
    transport: str,
    threads: int,
    kv_cache_memory: str,
    kv_cache_dtype: str,
    max_num_batched_tokens: int,
    offline: bool,
    cache_dir: Path | None,
    poison: int,
    inject: str | None,
    trace: Path | None,
    keep: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Serve MODEL on real clusters, kill, stop and cut everything in them while requests run, and compare every answer with
    that of a calm run. Exit 0 only if all are identical, none failed and nothing is left behind."""
    if seeds and num_seeds:
        raise UsageError("give --seed or --seeds")
    names = tuple(name.strip() for name in (kinds or "").split(",") if name.strip())
    if kinds is not None and not names:
        raise UsageError("--kinds names no kind; leave it out for all of them")
    worker = WorkerConfig.of(  # what `relay serve` would refuse is refused before anything starts
        backend,
        devices=tuple(device.split(",")) if device is not None else None,
        threads=threads,
        transport=transport,
        kv_cache_memory_bytes=parse_bytes(kv_cache_memory),
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    if backend == "cuda":
        require_gpu()
    serve = ["--backend", backend, "--threads", str(threads), "--kv-cache-memory", kv_cache_memory]
    serve += ["--kv-cache-dtype", kv_cache_dtype, "--max-num-batched-tokens", str(max_num_batched_tokens)]
    serve += ["--transport", transport, *(["--device", device] if device is not None else [])]
    inside = netns != "off" and _enter(auto=netns == "auto")
    serve += ["--offline"] if offline or inside else []
    serve += ["--cache-dir", str(cache_dir)] if cache_dir is not None else []
    settings = ChaosSettings(
        requests=requests,
        faults=faults,
        seeds=seeds or tuple(range(1, (num_seeds or 1) + 1)),
        shapes=tuple(parse_shape(text) for text in shapes or ("1P+2D",)),
        kinds=names,
        model=model,
        serve=tuple(serve),
        concurrency=concurrency,
        longest_words=longest_prompt,
        longest_answer=longest_answer,
        gateways=gateways,
        transport=transport,
        devices=worker.devices if backend == "cuda" else (),
        netns=inside,
        poison=poison,
        inject=inject or "",
        trace=trace,
        keep=keep,
    )
    for shape in settings.shapes:
        choose_kinds(list(settings.kinds), settings.ground(shape))
    _check_places(trace, keep, output)

    def say(text: str) -> None:
        click.echo(text, err=True)

    def keep_report(cells: list[CellResult], calm: list[Calm]) -> None:
        """After every cell: what was done stands there, however a later one ends."""
        if output is not None:
            output.write_text(json.dumps(report(cells, calm), indent=1) + "\n")

    cells, calm = asyncio.run(run_chaos(settings, say, keep_report))
    document = report(cells, calm)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print(document)
    return 0 if all(cell.passed for cell in cells) else 1


def _check_places(trace: Path | None, keep: Path | None, output: Path | None) -> None:
    """Make the folders, and see that the report can be written: before an hour's work is done for it. Raises UsageError."""
    for flag, folder in (("--trace", trace), ("--keep", keep)):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{flag} {folder}: {error.strerror}") from error
    if output is not None and not os.access(output.absolute().parent, os.W_OK):
        raise UsageError(f"--output {output}: there is no folder to write it to")


def _enter(*, auto: bool) -> bool:
    """Whether we are in a network namespace of our own now. Raises PacketsUnavailable unless it may be done without."""
    try:
        enter()
    except PacketsUnavailable as error:
        if not auto:
            raise
        click.echo(f"relay: {error}", err=True)
        return False
    return True


def _print(document: dict[str, Any]) -> None:
    """The report for people: a line a kind, then the sums."""
    click.echo(
        f"{'kind':20} {'faults':>6} {'resume ms p50':>14} {'p99':>9} {'detected ms p50':>16} {'p99':>9}  struck while"
    )
    for kind, row in document["by_kind"].items():
        resume, detect = row["resume_ms"], row["detect_ms"]
        moments = ", ".join(f"{moment} {count}" for moment, count in document["moments"].get(kind, {}).items())
        times = f"{_ms(resume['p50']):>14} {_ms(resume['p99']):>9} {_ms(detect['p50']):>16} {_ms(detect['p99']):>9}"
        click.echo(f"{kind:20} {row['faults']:>6} {times}  {moments}")
    calm = document["calm"]
    click.echo(
        f"resume p50 {_ms(document['resume_ms']['p50'])} ms, p99 {_ms(document['resume_ms']['p99'])} ms; without faults, "
        f"{calm['resumed_tokens_p50'] or 0:.0f} tokens and a step take {_ms(calm['reprefill_and_step_ms_p50'])} ms"
    )
    for problem in document["problems"]:
        click.echo(problem)
    poison = document["poison"]
    if poison["poison"]:
        click.echo(
            f"{poison['poison']} poison requests: {poison['quarantined']} quarantined, {poison['crashes']} engines crashed"
        )
    replayed = document["replayed"]
    if replayed["recordings"]:
        click.echo(f"{replayed['replayed']} of {replayed['recordings']} recordings replayed to the same decisions")
    if document["reposted"]:
        click.echo(f"{document['reposted']} answers went on at another gateway")
    counts = ", ".join(f"{document[name]} {name}" for name in ("identical", "different", "failed", "leaked"))
    click.echo(f"{document['requests']} requests, {sum(document['faults'].values())} faults: {counts}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
