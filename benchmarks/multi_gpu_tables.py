"""The tables of docs/several-gpus.md, from the document of ``benchmarks.multi_gpu``."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.multi_gpu_charts import pictures, transfer_rows
from benchmarks.multi_gpu_report import LOAD, Parts, budgets, compared, factors

Document = dict[str, Any]
Table = Callable[..., str]
Number = Callable[..., str]
CAPTIONS = {
    "multi-gpu-load.svg": "Bars: gaps, first token, good requests and throughput of each shape at each load",
    "multi-gpu-kv.svg": "Bars: KV exposed, streamed and sent after the prompt; its rate beside a plain copy",
}
PARTS = ("split", "kill", "colocated", "kill-replica", "ranks", "kv", "kv-other", "split-other", "exact-ranks")
KILLS = {
    "kill": ("the only D killed, P has the prompts' KV", 300.0),
    "kill-replica": ("one of two replicas killed, whole re-prefill", 1000.0),
}


def text(document: Document, table: Table, number: Number) -> str:
    """Everything that was measured; what is missing is said in a line of its own."""
    parts = document["parts"]
    found = [goals_table(parts, table, number)]
    found += [f"![{CAPTIONS[name]}](images/{name})" for name in pictures(document)]
    if factors(parts):
        found += [loads_table(parts, table, number), limits_table(parts, table), *_ratios(parts, table, number)]
    if transfer_rows(parts):
        found.append(transfers_table(parts, table, number))
    if any(name in parts for name in KILLS):
        found.append(kills_table(parts, table, number))
    found += list(_remarks(document))
    return "\n\n".join(found)


def headline(document: Document, number: Number) -> str:
    """Split against colocated in a few sentences, what it costs among them; empty without both."""
    parts = document["parts"]
    ratios = {name: row for name, row in compared(parts).items() if name.startswith("split over colocated")}
    if not ratios:
        return ""
    columns: list[list[str]] = []
    for name, row in ratios.items():
        key = name.removeprefix("split over colocated, ")
        split, other = parts["split"][key], parts[f"colocated-{row['budget']}"][key]
        figures = [split["load"]["chats_per_s"] + split["load"]["documents_per_s"], row["itl_p99"]]
        figures += [
            one[kind][share] for kind, share in (("itl_ms", "p99"), ("ttft_ms", "p50")) for one in (split, other)
        ]
        figures += [split["second_ms"][share] for share in ("p50", "p99")]
        columns.append([number(figure) for figure in figures])
    rates, ratio, gap, other_gap, first, other_first, second, second_most = (
        " / ".join(each) for each in zip(*columns, strict=True)
    )
    text = (
        f"**Two H200s**, the same shape, long prompts beside chats at {rates} requests/s, 1P + 1D against two colocated replicas "
        f"at their best token budget: the 99th percentile of the gaps between tokens is {gap} against {other_gap} ms, {ratio} "
        f"times better. It costs the first token ({first} against {other_first} ms at the median) and, once a request, the gap "
        f"in which it changes hands (median {second}, p99 {second_most} ms)"
    )
    backlogs = {
        budget: part["backlog"]["all_tokens_per_s"]
        for budget, part in budgets(parts, "colocated").items()
        if "backlog" in part
    }
    if backlogs and "backlog" in parts["split"]:
        rate = parts["split"]["backlog"]["all_tokens_per_s"]
        best = " / ".join(
            f"{rate / backlogs[one]:.2f}" for one in dict.fromkeys(row["budget"] for row in ratios.values())
        )
        text += f"; a backlog is worked off at {best} of their rate, {rate / max(backlogs.values()):.2f} of the fastest budget's"
    text += "."
    shares = [row["after_share_of_copy_rate"] for row in parts.get("kv", {}).values() if isinstance(row, dict)]
    missed = []
    if min(row["itl_p99"] for row in ratios.values()) < 3:
        missed.append("three times shorter gaps than the best token budget")
    goodputs = [row["goodput"] for row in ratios.values() if row["goodput"] is not None]  # None: they had none at all
    if goodputs and (least := min(goodputs)) < 1.2:
        missed.append(f"1.2 times its goodput at every load ({number(least)} at the lowest)")
    if shares and min(shares) < 0.8:
        missed.append(
            f"a burst of KV at 80 % of the copy rate (it is {100 * min(shares):.0f} to {100 * max(shares):.0f})"
        )
    if "kill" in parts and (wait := parts["kill"]["next_token_ms_of_disturbed"]["p99"]) > KILLS["kill"][1]:
        missed.append(f"the next token within {KILLS['kill'][1]:.0f} ms of killing the only D (it is {number(wait)})")
    return text + (f" Missed: {'; '.join(missed)}." if missed else "") + " ([several GPUs](docs/several-gpus.md))"


def _served(parts: Parts) -> dict[str, Any]:
    """Every part with loads, by what the tables call it."""
    found = {"1P + 1D": parts.get("split"), "1P + 1D, host memory": parts.get("split-other")}
    for family, name in (("colocated", "2 colocated"), ("ranks", "2 ranks")):
        found |= {f"{name}, {budget:,}": part for budget, part in budgets(parts, family).items()}
    found["vLLM"] = parts.get("vllm")
    return {name: part for name, part in found.items() if part}


def loads_table(parts: Parts, table: Table, number: Number) -> str:
    """One row a load and shape, every budget of it."""
    rows = []
    for key in [*(f"{LOAD}{factor:g}" for factor in factors(parts)), "backlog"]:
        for name, part in _served(parts).items():
            if key not in part:
                continue
            row = part[key]
            cells = [number(row[one][share]) for one in ("itl_ms", "ttft_ms") for share in ("p50", "p99")]
            cells += [number(row["second_ms"][share]) for share in ("p50", "p99")]
            cells += [number(row["chat"]["ttft_ms"]["p50"]), number(row["document"]["ttft_ms"]["p50"])]
            good = [f"{row['good_requests']} of {row['requests']}", number(row["goodput_per_s"])]
            cells += ["–", "–"] if key == "backlog" else good
            rows.append([f"{key}: {name}", *cells, number(row["output_tokens_per_s"]), number(row["all_tokens_per_s"])])
    header = [
        "ms, /s",
        "ITL p50",
        "ITL p99",
        "TTFT p50",
        "TTFT p99",
        "second token p50",
        "p99",
        "TTFT chats",
        "documents",
    ]
    return table([*header, "good", "goodput", "output tok/s", "all tok/s"], rows)


def limits_table(parts: Parts, table: Table) -> str:
    """How many requests are good at other limits of the gaps."""
    rows = []
    steps: dict[str, float] = {}
    for factor in factors(parts):
        for name, part in _served(parts).items():
            if (row := part.get(f"{LOAD}{factor:g}")) is None:
                continue
            steps |= {count: float(count) * row["load"]["step_ms"] for count in row["good_by_itl_steps"]}
            shares = [f"{100 * good / row['requests']:.0f} %" for good in row["good_by_itl_steps"].values()]
            rows.append([f"{LOAD}{factor:g}: {name}", *shares])
    return table(["good at p99 of gaps ≤", *(f"{count} steps, {limit:.1f} ms" for count, limit in steps.items())], rows)


def _ratios(parts: Parts, table: Table, number: Number) -> list[str]:
    """Split over the others at their best budget; over 1 favours the split."""
    keys = ("itl_p99", "itl_p99_over_least", "goodput", "ttft_p50", "output_tokens_per_s", "backlog_tokens_per_s")
    rows = [
        [f"{name}, {row['budget']:,}", *(number(row[key]) for key in keys)]
        for name, row in compared(parts).items()
        if "budget" in row
    ]
    header = ["times better", "ITL p99", "than the least of any budget", "goodput", "TTFT p50", "output tok/s"]
    return [table([*header, "backlog tok/s"], rows)] if rows else []


def transfers_table(parts: Parts, table: Table, number: Number) -> str:
    """One row a length and transport."""
    rows = []
    for row in transfer_rows(parts):
        hidden = f"below noise ± {row['noise_ms']:.2f}" if row["below_noise"] else f"{100 * row['hidden_share']:.1f} %"
        cells = [number(row[key]) for key in ("megabytes", "exposed_after_ms", "exposed_ms")]
        slower = row["prefill_ms"]["streamed"] / row["prefill_ms"]["empty"] - 1
        saved = row["prefill_ms"]["after"] + row["exposed_after_ms"] - row["prefill_ms"]["streamed"] - row["exposed_ms"]
        cells += [
            hidden,
            f"{100 * slower:+.1f} %",
            number(saved),
            number(row["after_gb_per_s"]),
            number(row["copy"].get("kernel_gb_per_s")),
        ]
        cells += [number(row["copy"]["gb_per_s"])]
        cells += [f"{100 * row['after_share_of_copy_rate']:.1f} %", "yes" if row["kv_bytes_equal"] else "**no**"]
        rows.append([f"{row['tokens']:,} tokens, {row['scheme']}", *cells])
    header = [
        "",
        "MB",
        "sent after it, ms",
        "streamed: exposed, ms",
        "hidden",
        "prefill slowed",
        "saved in all, ms",
        "GB/s",
        "frame kernel alone, GB/s",
    ]
    return table([*header, "plain copy, GB/s", "sent of it", "bytes equal"], rows)


def kills_table(parts: Parts, table: Table, number: Number) -> str:
    """One row a kill."""
    rows = []
    for name, (what, _) in KILLS.items():
        if (row := parts.get(name)) is None:
            continue
        again = row["recomputed_tokens"] / row["resumed"] if row["resumed"] else None
        cells = [f"{row['resumed']} of {row['streams']}", number(row["tokens_at_kill"]), number(again)]
        cells += [number(row["next_token_ms_of_disturbed"][share]) for share in ("p50", "p99")]
        rows.append([what, *cells, str(row["different_outputs"])])
    header = [
        "",
        "resumed",
        "tokens it had",
        "computed again, each",
        "next token p50, ms",
        "p99, ms",
        "outputs that differ",
    ]
    return table(header, rows)


def goals_table(parts: Parts, table: Table, number: Number) -> str:
    """What was asked, with what was measured."""
    rows = []

    def add(name: str, bound: str, measured: str, met: bool) -> None:
        rows.append([name, bound, f"{measured} {'met' if met else '**missed**'}"])

    for row in transfer_rows(parts):
        where = f"{row['tokens']:,} tokens, {row['scheme']}"
        if row["tokens"] in (2048, 8192):
            kept = row["below_noise"] or row["hidden_share"] >= 0.99
            shown = f"{100 * row['hidden_share']:.1f} %, {row['exposed_ms']:.2f} ms (noise ± {row['noise_ms']:.2f})"
            add(f"KV hidden, {where}", "≥ 99 % or below noise", shown, kept)
        if row not in parts.get("kv", {}).values():
            continue  # by way of host memory the copy rate between devices is out of reach
        share = row["after_share_of_copy_rate"]
        add(f"KV rate over copy rate, {where}", "≥ 80 %", f"{100 * share:.1f} %", share >= 0.8)
    for name, row in compared(parts).items():
        if name.startswith("split over colocated"):
            where, ratio, other = name.removeprefix("split over "), row["itl_p99"], row["other_goodput_per_s"]
            add(f"ITL p99, {where}", "≥ 3× better", f"{number(ratio)}×", ratio is not None and ratio >= 3)
            good = row["split_goodput_per_s"]
            add(f"goodput, {where}", "≥ 1.2×", f"{good:.2f} /s to {other:.2f}", good > 0 and good >= 1.2 * other)
    for name, (what, most) in KILLS.items():
        if row := parts.get(name, {}):
            value = row["next_token_ms_of_disturbed"]["p99"]
            add(
                f"{what}: next token p99",
                f"≤ {most:,.0f} ms",
                f"{number(value)} ms",
                value is not None and value <= most,
            )
            different = row["different_outputs"]
            add(f"{what}: outputs that differ", "0", f"{different} of {row['streams']}", different == 0)
    if exact := parts.get("exact-ranks"):
        count, identical = exact["compared"], exact["identical"]
        add("two ranks: sequences identical", "all", f"{identical} of {count}", identical == count > 0)
    if not rows:
        return "Nothing was measured."
    return table(["two GPUs", "limit", "measured"], rows)


def _remarks(document: Document) -> Iterator[str]:
    """Tokens compared, what was not measured and why, and what made each part."""
    parts = document["parts"]
    same = [
        f"{key}, {name}: {'all equal' if equal else '**not all equal**'}"
        for key, found in compared(parts)["same_tokens"].items()
        for name, equal in found.items()
        if equal is not None
    ]
    if same:
        yield f"Tokens of every request over all shapes of one numerics id: {'; '.join(same)}."
    for key, row in parts.get("split", {}).items():
        sent = row.get("transfers", {}) if isinstance(row, dict) else {}
        if "hidden_share" in sent:
            count, hidden, exposed = (
                sent[one] for one in ("kv_transfers_sent_total", "hidden_share", "exposed_ms_each")
            )
            shown = (
                f"{100 * hidden:.1f} % of the bytes left before the first token was drawn, {exposed:g} ms exposed each"
            )
            yield f"KV of the split, {key}: {count:,.0f} transfers, {shown}."
    shares = [
        row.get("client_cpu_share", 0.0)
        for part in _served(parts).values()
        for row in part.values()
        if isinstance(row, dict)
    ]
    if shares:
        yield f"The client took at most {100 * max(shares):.0f} % of one core."
    absent = [name for name in PARTS if name not in parts and not budgets(parts, name)]
    if absent:
        yield f"Parts without figures: {', '.join(absent)}."
    if problems := document["problems"]:
        void = document.get("void", {})
        reasons = "; ".join(
            f"`{name}`: {text.splitlines()[0 if name in void else -1][:200]}" for name, text in problems.items()
        )
        yield f"Not measured by the last call: {reasons}."
    if "note" in document["vllm"]:
        yield f"vLLM's column is empty: {document['vllm']['note']}."
    if topology := parts.get("topology"):
        yield f"The machine, as NVML tells: {'; '.join(topology)}."
    by_maker: dict[tuple[str, str, str], list[str]] = {}
    for name, made in document["made"].items():
        by_maker.setdefault((made["command"], made["commit"], made["date"]), []).append(name)
    for (command, commit, date), names in by_maker.items():
        yield f"<sub>{', '.join(names)}: `{command}` · commit {commit} · {date}</sub>"
