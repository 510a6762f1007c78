"""The report of a run: cells added up, waits as percentiles, and what makes it a failure."""

import sys
import time
from collections import Counter
from statistics import median
from typing import Any

from relay import __version__
from relay.chaos.oracle import Calm
from relay.chaos.settings import CellResult
from relay.record.commit import commit
from relay.record.machine import machine

SHOWN_PROBLEMS = 40  # of each cell
REPLAYED = ("recordings", "replayed", "replayed_events")


def percentile(values: list[float], share: float) -> float | None:
    """The value that ``share`` of ``values`` do not exceed (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else None


def waits(values: list[float]) -> dict[str, float | int | None]:
    return {"n": len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def report(cells: list[CellResult], calm: list[Calm]) -> dict[str, Any]:
    """What ``relay chaos --json`` prints."""
    faults: Counter[str] = Counter()
    signals: Counter[str] = Counter()
    packets: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    transfers: Counter[str] = Counter()
    moments: dict[str, Counter[str]] = {}
    resumes: dict[str, list[float]] = {}
    detections: dict[str, list[float]] = {}
    for cell in cells:
        faults.update(cell.faults)
        signals.update(cell.signals)
        packets.update(cell.packets_lost)
        roles.update(cell.roles_struck)
        transfers.update(cell.kv_transfers)
        for kind, row in cell.moments.items():
            moments.setdefault(kind, Counter()).update(row)
        for target, source in ((resumes, cell.resume_ms), (detections, cell.detect_ms)):
            for kind, values in source.items():
                target.setdefault(kind, []).extend(values)
    tokens = [count for cell in cells for count in cell.resumed_tokens if count]
    return {
        "requests": sum(cell.requests for cell in cells),
        "identical": sum(cell.identical for cell in cells),
        "different": sum(cell.different for cell in cells),
        "failed": sum(cell.failed for cell in cells),
        "leaked": sum(cell.leaked for cell in cells),
        "reposted": sum(cell.reposted for cell in cells),
        "kv_transfers": dict(sorted(transfers.items())),
        "disagreements": sum(cell.disagreements for cell in cells),
        "poison": {name: sum(getattr(cell, name) for cell in cells) for name in ("poison", "quarantined", "crashes")},
        "replayed": {name: sum(getattr(cell, name) for cell in cells) for name in REPLAYED},
        "faults": dict(sorted(faults.items())),
        "signals": dict(sorted(signals.items())),
        "packets_lost": dict(sorted(packets.items())),
        "roles_struck": dict(sorted(roles.items())),
        "moments": {kind: dict(sorted(row.items())) for kind, row in sorted(moments.items())},
        "resume_ms": waits([value for values in resumes.values() for value in values]),
        "detect_ms": waits([value for values in detections.values() for value in values]),
        "by_kind": {
            kind: {
                "faults": faults[kind],
                "resume_ms": waits(resumes.get(kind, [])),
                "detect_ms": waits(detections.get(kind, [])),
            }
            for kind in sorted(faults)
        },
        "calm": _calm(calm, tokens),
        "cells": [
            {
                "shape": cell.shape,
                "seed": cell.seed,
                "requests": cell.requests,
                "identical": cell.identical,
                "failed": cell.failed,
                "leaked": cell.leaked,
                "faults": sum(cell.faults.values()),
                "seconds": cell.seconds,
            }
            for cell in cells
        ],
        "problems": [
            f"{cell.shape} seed {cell.seed}: {text}" for cell in cells for text in cell.problems[:SHOWN_PROBLEMS]
        ],
        "command": "relay " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "version": __version__,
        "commit": commit(),
    }


def _calm(costs: list[Calm], tokens: list[int]) -> dict[str, float | None]:
    """The fault-free cost of what the median resume has to do: compute its tokens again, and one step."""
    middle = percentile([float(count) for count in tokens], 0.5)
    token_s, step_s = median(cost.token_s for cost in costs), median(cost.step_s for cost in costs)
    return {
        "prefill_ms_per_token": round(token_s * 1e3, 4),
        "step_ms": round(step_s * 1e3, 2),
        "resumed_tokens_p50": middle,
        "reprefill_and_step_ms_p50": None if middle is None else round((middle * token_s + step_s) * 1e3, 2),
    }
