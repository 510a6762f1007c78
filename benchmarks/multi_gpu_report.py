"""What the two-GPU benchmark's parts say together: the best token budget at each load, ratios, whether tokens are the same."""

from collections.abc import Iterable
from typing import Any

Parts = dict[str, Any]
LOAD = "load x "


def budget_of(part: str, family: str) -> int | None:
    """The token budget of ``part`` if it is one of ``family``: 512 of ``colocated-512``."""
    name, _, number = part.rpartition("-")
    return int(number) if name == family and number.isdigit() else None


def budgets(parts: Parts, family: str) -> dict[int, Any]:
    """The parts ``family-BUDGET`` that have figures, by budget."""
    found = {budget: part for name, part in parts.items() if (budget := budget_of(name, family)) is not None}
    return dict(sorted(found.items()))


def factors(parts: Parts) -> list[float]:
    """Every factor of the load that a part was measured at."""
    found = {
        float(key.removeprefix(LOAD))
        for name, part in parts.items()
        if name.startswith(("split", "colocated", "ranks"))
        for key in part
        if key.startswith(LOAD)
    }
    return sorted(found)


def best_budget(parts: Parts, family: str, key: str) -> int | None:
    """The budget of ``family`` with most goodput at load ``key``, then with the least p99 of gaps; None if none was measured."""
    rows = {budget: part[key] for budget, part in budgets(parts, family).items() if key in part}
    return max(rows, key=lambda one: (rows[one]["goodput_per_s"], -_p99(rows[one])), default=None)


def shapes(parts: Parts, key: str) -> dict[str, dict[str, Any]]:
    """The rows to compare at load ``key``: the split, colocated and ranks at the best of their budgets."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in (("split", "1P + 1D"), ("split-other", "1P + 1D over host memory")):
        if key in parts.get(name, {}):
            found[text] = parts[name][key]
    for family, text in (("colocated", "2 colocated"), ("ranks", "2 ranks")):
        budget = best_budget(parts, family, key)
        if budget is not None:
            found[f"{text}, {budget:,} tokens a step"] = parts[f"{family}-{budget}"][key]
    if key in parts.get("vllm", {}):
        found["vLLM"] = parts["vllm"][key]
    return found


def compared(parts: Parts) -> dict[str, Any]:
    """Split against colocated and ranks at their best budget, at each load: ratios over 1 favour the split, None is of nothing.

    ``itl_p99_over_least`` is against the budget with the least p99 of gaps, whatever its goodput. ``same_tokens``: of every
    request, in all shapes of one numerics id; None where fewer than two of them were measured.
    """
    found: dict[str, Any] = {}
    for factor in factors(parts):
        key = f"{LOAD}{factor:g}"
        split = parts.get("split", {}).get(key)
        for family in ("colocated", "ranks"):
            budget = best_budget(parts, family, key)
            if not split or budget is None:
                continue
            part = parts[f"{family}-{budget}"]
            row = part[key]
            least = min(_p99(one[key]) for one in budgets(parts, family).values() if key in one)
            found[f"split over {family}, {key}"] = {
                "budget": budget,
                "itl_p99": _ratio(_p99(row), _p99(split)),
                "itl_p99_over_least": _ratio(least, _p99(split)),
                "split_goodput_per_s": split["goodput_per_s"],
                "other_goodput_per_s": row["goodput_per_s"],
                "goodput": _ratio(split["goodput_per_s"], row["goodput_per_s"]),
                "ttft_p50": _ratio(row["ttft_ms"]["p50"], split["ttft_ms"]["p50"]),
                "output_tokens_per_s": _ratio(split["output_tokens_per_s"], row["output_tokens_per_s"]),
                "backlog_tokens_per_s": _ratio(_backlog(parts["split"]), _backlog(part)),
            }
    same = {key: same_tokens(parts, key) for key in [*(f"{LOAD}{factor:g}" for factor in factors(parts)), "backlog"]}
    return {**found, "same_tokens": same}


def same_tokens(parts: Parts, key: str) -> dict[str, bool | None]:
    """By numerics (of one rank, of two): whether all digests at load ``key`` are equal and whole."""
    families: dict[str, Iterable[Any]] = {
        "one rank": [parts.get("split", {}), parts.get("split-other", {}), *budgets(parts, "colocated").values()],
        "two ranks": budgets(parts, "ranks").values(),
    }
    found: dict[str, bool | None] = {}
    for name, members in families.items():
        digests = [part[key]["digest"] for part in members if key in part]
        found[name] = len(set(digests)) == 1 and "" not in digests if len(digests) > 1 else None
    return found


def _p99(row: dict[str, Any]) -> float:
    value = row["itl_ms"]["p99"]
    return float("inf") if value is None else float(value)


def _backlog(part: dict[str, Any]) -> float | None:
    return part["backlog"]["all_tokens_per_s"] if "backlog" in part else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 3) if above is not None and below else None
