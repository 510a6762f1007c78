"""The tables of docs/benchmarks.md about KV transfer, from the documents of `relay bench kv`."""

from collections.abc import Callable, Iterable
from typing import Any

GOAL_TOKENS = 2048


def hidden(row: dict[str, Any]) -> str:
    """The share of the baseline that a prompt's own compute hides, or that the rest cannot be told from nothing."""
    if row["below_noise"]:
        return f"below noise ± {row['noise_s'] * 1e3:.2f} ms"
    return f"{100 * row['hidden_share']:.1f} %"


def headline(documents: Iterable[dict[str, Any]]) -> str:
    """What is left of the transfer of a long prompt, in one sentence; empty without such a row."""
    rows = [row for document in documents for row in document["rows"] if row["tokens"] == GOAL_TOKENS]
    shown = ", ".join(
        f"{row['transport']} {row['kv_cache_dtype']} {row['exposed_s'] * 1e3:.2f} "
        f"(noise ± {row['noise_s'] * 1e3:.2f}) against {row['baseline_exposed_s'] * 1e3:.0f}"
        for row in rows
    )
    what = f"what a first token waits for the KV of {GOAL_TOKENS:,} tokens, streamed against sent after the prompt, ms"
    return f"**Transfer**: {what}: {shown}." if rows else ""


def rows_table(documents: Iterable[dict[str, Any]], table: Callable[..., str], number: Callable[..., str]) -> str:
    """One row a length, KV dtype and transport."""
    rows = []
    for document in documents:
        for row in document["rows"]:
            name = f"{row['tokens']:,} tokens, {row['kv_cache_dtype']}, {row['transport']}"
            times = (row["baseline_exposed_s"], row["exposed_s"], row["exposed_p90_s"])
            cells = [number(row["bytes"] / 1e6), number(row["prefill_s"]), *(f"{value * 1e3:.2f}" for value in times)]
            cells += [hidden(row), f"{100 * row['prefill_slowdown']:+.1f} %"]
            cells += [f"{row['send_cpu_s'] * 1e3:.1f} + {row['receive_cpu_s'] * 1e3:.1f}"]
            cells += [number(row["burst_gb_s"]), f"{row['burst_of_ceiling']:.2f}"]
            rows.append([name, *cells])
    header = [
        "",
        "MB",
        "prefill, s",
        "sent after it, ms",
        "streamed: exposed, ms",
        "p90, ms",
        "hidden",
        "prefill slowed",
    ]
    return table([*header, "CPU of P + D, ms", "burst, GB/s", "of its ceiling"], rows)


def ceilings_table(documents: Iterable[dict[str, Any]], table: Callable[..., str], number: Callable[..., str]) -> str:
    """The machine's ceilings, those of the first document."""
    rows: dict[str, dict[bool, str]] = {}
    for row in next(iter(documents))["ceilings"]:
        rows.setdefault(row["ceiling"], {})[row["checksum"]] = number(row["gb_s"])
    cells = [[name, values[False], values[True]] for name, values in rows.items()]
    return table(["GB/s", "bare", "with CRC32C"], cells)


def goals_table(documents: Iterable[dict[str, Any]], table: Callable[..., str]) -> str:
    """What was asked of 2,048 tokens, and of a full D, with what was measured."""
    rows = []

    def add(name: str, bound: str, measured: str, met: bool) -> None:
        rows.append([name, bound, f"{measured} {'met' if met else '**missed**'}"])

    for document in documents:
        for row in document["rows"]:
            if row["tokens"] != GOAL_TOKENS:
                continue
            where = f"{row['transport']}, {row['kv_cache_dtype']}"
            kept = row["below_noise"] or row["hidden_share"] >= 0.99
            add(f"hidden, {where}", "≥ 99 % or below noise", hidden(row), kept)
            share = row["burst_of_ceiling"]
            add(f"burst of its ceiling, {where}", "≥ 0.8", f"{share:.2f}", share >= 0.8)
            slower = 100 * row["prefill_slowdown"]
            add(f"prefill slowed, {where}", "≤ 3 %", f"{slower:+.1f} %", slower <= 3)
        if "backpressure" in document:
            full = document["backpressure"]
            failed, ratio = full["failed_requests"], full["ttft_p99_ratio"]
            add("D full: failed requests", "0", str(failed), failed == 0)
            add("D full: first tokens of others, p99, to D free", "≤ 1.1", f"{ratio:.2f}", ratio <= 1.1)
    return table([f"{GOAL_TOKENS:,} tokens", "limit", "measured"], rows)


def full_text(document: dict[str, Any], number: Callable[..., str]) -> str:
    """The sentence about a full D."""
    row = document["backpressure"]
    return (
        f"Beside {row['probes']} requests D, full, refused {row['refused_full']} reservations; P parked {row['parked']}, and "
        f"{row['failed_requests']} failed. The 99th percentile of their first token was {number(row['ttft_p99_full_s'])} s "
        f"with D full and {number(row['ttft_p99_free_s'])} s with D free."
    )


def pictures(document: dict[str, Any]) -> str:
    """The pictures that were drawn with it, as docs/benchmarks.md shows them."""
    names = {"kv-exposed": "Bars: the transfer sent after prefill beside what is exposed of it when streamed"}
    for scheme in dict.fromkeys(row["transport"] for row in document["rows"]):
        names[f"kv-timeline-{scheme}"] = f"Timeline: compute, pack, wire and scatter of each layer over {scheme}"
    return "\n\n".join(f"![{text}](images/{name}.svg)" for name, text in names.items())
