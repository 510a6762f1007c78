"""The tables of docs/failure-model.md, from the report of `relay chaos`."""

from collections.abc import Callable
from typing import Any

MOMENTS = {
    "reserved": "D asked for room",
    "accepted": "D made room",
    "prefill": "prompt computed",
    "streaming": "KV on its way",
    "handed_off": "handed to D",
    "decoding": "decoding",
    "last_token": "last token sent",
    "draining": "draining",
    "idle": "idle",
}


def fault_table(chaos: dict[str, Any], table: Callable[..., str]) -> str:
    """Kinds of faults by what the choices they struck were doing; a dash where none was struck."""
    rows = []
    for kind, row in chaos["by_kind"].items():
        struck = chaos["moments"].get(kind, {})
        cells = [str(struck[moment]) if struck.get(moment) else "–" for moment in MOMENTS]
        rows.append([kind.replace("_", " "), str(row["faults"]), *cells])
    return table(["struck choices", "faults", *MOMENTS.values()], rows)


def resume_table(chaos: dict[str, Any], table: Callable[..., str], number: Callable[..., str]) -> str:
    """Waits of the clients whose worker was struck, and how soon the gateway knew."""
    rows = []
    for kind, row in chaos["by_kind"].items():
        resume, detect = row["resume_ms"], row["detect_ms"]
        if resume["n"] or detect["n"]:
            times = [number(times[share]) for times in (detect, resume) for share in ("p50", "p99")]
            rows.append([kind.replace("_", " "), *times, str(resume["n"])])
    header = ["", "detected, ms, p50", "p99", "next token, ms, p50", "p99", "waits"]
    return table(header, rows)


def summary(chaos: dict[str, Any], number: Callable[..., str]) -> str:
    """What the run was and how it ended."""
    shapes = ", ".join(dict.fromkeys(cell["shape"] for cell in chaos["cells"]))
    seeds = len({cell["seed"] for cell in chaos["cells"]})
    signals = ", ".join(f"{count:,} {name}" for name, count in chaos["signals"].items() if name != "SIGCONT")
    calm = chaos["calm"]
    struck = {"prefill": "no P", "decode": "no D", "both": "no worker at all"}
    left = ", ".join(f"{struck[role]} {count} times" for role, count in chaos.get("roles_struck", {}).items())
    more = f" Faults left {left}." if left else ""
    if reposted := chaos.get("reposted"):
        more += f" {reposted:,} answers went on at another gateway."
    if lost := sum(chaos.get("packets_lost", {}).values()):
        more += f" {lost:,} packets were lost."
    if recordings := chaos.get("replayed", {}).get("recordings"):
        more += f" {chaos['replayed']['replayed']:,} of {recordings:,} recordings replayed to the same decisions."
    each = f"{seeds} seed{'s' * (seeds > 1)} each"
    faults = f"{sum(chaos['faults'].values()):,} faults of {len(chaos['faults'])} kinds"
    return (
        f"{chaos['requests']:,} requests on clusters of {shapes}, {each}; {faults} ({signals}). "
        f"**{chaos['identical']:,} answers identical to the calm run, {chaos['different']} different, {chaos['failed']} failed, "
        f"{chaos['leaked']} leaks.**{more} The median resume had {number(calm['resumed_tokens_p50'])} tokens to compute again; "
        f"without faults and alone on the machine these and one step take {number(calm['reprefill_and_step_ms_p50'])} ms."
    )


def headline(chaos: dict[str, Any]) -> str:
    """The whole run in one sentence."""
    kills, stops = chaos["signals"].get("SIGKILL", 0), chaos["signals"].get("SIGSTOP", 0)
    return (
        f"**Recovery**: {chaos['requests']:,} requests to real processes through {sum(chaos['faults'].values()):,} faults of "
        f"{len(chaos['faults'])} kinds ({kills:,} SIGKILLs, {stops:,} SIGSTOPs): {chaos['identical']:,} answers identical to the "
        f"undisturbed ones byte by byte, {chaos['failed']} failed, {chaos['leaked']} leaks."
    )


def measured_table(resume: dict[str, Any], table: Callable[..., str], number: Callable[..., str]) -> str:
    """What one client waits, beside what the wait is made of."""
    rows = []
    for shape, kinds in resume["shapes"].items():
        for kind, row in kinds.items():
            names = ("detect_ms", "resume_ms", "reprefill_and_step_ms", "beyond_reprefill_ms")
            times = [number(row[name][share]) for name in names for share in ("p50", "p99")]
            rows.append([f"{shape}: {kind}", str(row["n"]), str(row["identical"]), *times])
    waits = [
        f"{name}{share}"
        for name in ("detected, ms, ", "next token, ms, ", "re-prefill and step, ms, ")
        for share in ("p50", "p99")
    ]
    return table(["", "trials", "identical", *waits, "next token less re-prefill, ms, p50", "p99"], rows)
