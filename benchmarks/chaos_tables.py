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
    return (
        f"{chaos['requests']:,} requests on clusters of {shapes}, {seeds} seeds each; {sum(chaos['faults'].values()):,} faults of "
        f"{len(chaos['faults'])} kinds ({signals}). **{chaos['identical']:,} answers identical to the calm run, "
        f"{chaos['different']} different, {chaos['failed']} failed, {chaos['leaked']} leaks.** The median resume had "
        f"{number(calm['resumed_tokens_p50'])} tokens to compute again; without faults and alone on the machine these and one "
        f"step take {number(calm['reprefill_and_step_ms_p50'])} ms."
    )
