"""``relay bench``: measurements a user can repeat on a machine of theirs."""

import json
import os
from pathlib import Path
from typing import Any

import click

from relay.errors import UsageError

DEFAULT_TOKENS = "128,512,2048,8191"


@click.group()
def bench() -> None:
    """Measure parts of Relay on this machine."""


@bench.command()
@click.argument("model", default="smollm2")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--tokens", default=DEFAULT_TOKENS, show_default=True, help="Prompt lengths.")
@click.option(
    "--transport", "transports", default="shm,tcp", show_default=True, help="Transports; nixl where it is installed."
)
@click.option(
    "--kv-cache-dtype", "dtypes", default="float32,bfloat16", show_default=True, help="Numbers in the KV cache."
)
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Runs a median is taken of.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 1e6),
    default=200.0,
    show_default=True,
    help="No run of a length begins later, but 3 always do.",
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Threads of the prefill engine; 0: all cores.",
)
@click.option(
    "--chart", type=click.Path(path_type=Path, file_okay=False), help="Write the charts as SVG to this folder."
)
@click.option(
    "--probes",
    type=click.IntRange(0),
    default=60,
    show_default=True,
    help="Requests beside a full D; 0: leave that out.",
)
@click.option("--offline", is_flag=True, help="Never touch the network.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Model cache [default: ~/.cache/relay]."
)
def kv(
    model: str,
    as_json: bool,
    tokens: str,
    transports: str,
    dtypes: str,
    runs: int,
    seconds: float,
    threads: int,
    chart: Path | None,
    probes: int,
    offline: bool,
    cache_dir: Path | None,
) -> None:
    """How much of the KV transfer a prompt's own compute hides, with the send-after-prefill baseline and the machine's ceilings."""
    from relay.bench.kv_run import KvSettings, run_kv
    from relay.models.progress import console_progress
    from relay.models.store import default_cache_dir, open_model
    from relay.transfer.nixl.wire import require_installed

    settings = KvSettings(
        tokens=list(dict.fromkeys(_length(text) for text in tokens.split(","))),
        transports=_names("--transport", transports, ("shm", "tcp", "nixl")),
        dtypes=_names("--kv-cache-dtype", dtypes, ("float32", "bfloat16")),
        runs=runs,
        seconds=seconds,
        threads=threads,
    )
    if not seconds >= 0:
        raise UsageError("--seconds: that is no number of seconds")
    if "nixl" in settings.transports:
        require_installed()
    if chart is not None:
        _writable(chart)  # now, not after half an hour of measuring
    loaded = open_model(
        model, cache_dir=cache_dir or default_cache_dir(os.environ), offline=offline, progress=console_progress()
    )
    too_long = [length for length in settings.tokens if length >= loaded.max_model_len]
    if too_long:
        raise UsageError(
            f"--tokens: {too_long[0]} and one more are too many for {loaded.name}: {loaded.max_model_len} fit"
        )
    document, timelines = run_kv(loaded, settings, lambda text: click.echo(f"\r\x1b[K{text}", err=True, nl=False))
    click.echo(err=True)
    if probes:
        from relay.bench.backpressure import measure_backpressure

        document["backpressure"] = measure_backpressure(loaded, threads, probes)
    if chart is not None:
        from relay.bench.charts import write_charts

        write_charts(chart, document["rows"], timelines)
    if as_json:
        click.echo(json.dumps(document, indent=1))
    else:
        _print(document)


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--chart: {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--chart: {folder} is not writable")


def _length(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--tokens: {text!r} is no number of tokens")
    return int(text)


def _names(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    return names


def _print(document: dict[str, Any]) -> None:
    click.echo(
        f"{'transport':9} {'kv':8} {'tokens':>6} {'MB':>6} {'prefill':>8} {'wire':>9} {'baseline':>9} {'exposed':>9}  hidden"
    )
    for row in document["rows"]:
        share = f"below noise ± {row['noise_s'] * 1e3:.2f} ms" if row["below_noise"] else f"{row['hidden_share']:.1%}"
        times = (row[name] * 1e3 for name in ("wire_s", "baseline_exposed_s", "exposed_s"))
        click.echo(
            f"{row['transport']:9} {row['kv_cache_dtype']:8} {row['tokens']:6} {row['bytes'] / 1e6:6.1f}"
            f" {row['prefill_s'] * 1e3:6.0f}ms {' '.join(f'{value:7.2f}ms' for value in times)}  {share}"
            f" (prefill {row['prefill_slowdown']:+.1%}, CPU {row['send_cpu_s'] * 1e3:.1f} + {row['receive_cpu_s'] * 1e3:.1f} ms,"
            f" burst {row['burst_gb_s']:.1f} GB/s, {row['burst_of_ceiling']:.2f} of its ceiling)"
        )
    for row in document["ceilings"]:
        click.echo(
            f"ceiling {row['ceiling']:13} {'with' if row['checksum'] else 'without':7} CRC32C {row['gb_s']:6.2f} GB/s"
        )
    if "backpressure" in document:
        row = document["backpressure"]
        click.echo(
            f"D full: {row['failed_requests']} failed, {row['parked']} parked, TTFT p99 of others {row['ttft_p99_full_s']:.3f} s,"
            f" with D free {row['ttft_p99_free_s']:.3f} s: × {row['ttft_p99_ratio']:.2f}"
        )
