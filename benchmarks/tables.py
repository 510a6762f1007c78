"""Writes the figures of README.md and of pages under docs/ from the JSON files under benchmarks/results/.

    python -m benchmarks.tables            # rewrite what lies between the markers
    python -m benchmarks.tables --check    # exit 1 if a page is stale

What lies between ``<!-- table: NAME -->`` and ``<!-- /table -->`` (in README.md ``<!-- figures -->`` and ``<!-- /figures -->``)
belongs to this command. A result that is missing becomes a line with the command that makes it; nothing is left from before.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import chaos_tables, h200_tables, kv_tables, multi_gpu_charts, multi_gpu_tables
from benchmarks.goals import GOALS, SHAPES, Results

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GPU_FOLDER = "h200"  # all of it is shown by what the files hold, but for:
GPU_NAMED = ("multi_gpu",)

COMMANDS = {
    "serve": "python -m benchmarks.serve --json benchmarks/results/cpu/serve.json",
    "kernels": "python -m benchmarks.cpu_kernels --threads 1,2 --json benchmarks/results/cpu/kernels.json",
    "gateway": "python -m benchmarks.gateway --json benchmarks/results/gateway.json",
    "gateway_core": "python -m benchmarks.gateway_core --json benchmarks/results/gateway_core.json",
    "api_hot_path": "python -m benchmarks.api_hot_path --json benchmarks/results/api_hot_path.json",
    "chaos": "make chaos",
    "chaos_gateways": "make chaos-gateways",
    "chaos_netns": "make chaos-netns",
    "resume": "make resume",
    "kv_float32": "python -m benchmarks.kv float32",
    "kv_bfloat16": "python -m benchmarks.kv bfloat16",
    "scheduler": "python -m benchmarks.scheduler --json benchmarks/results/scheduler.json",
    "correctness": "python -m benchmarks.correctness --json benchmarks/results/correctness.json",
    "install": "python -m benchmarks.install --json benchmarks/results/cpu/install.json",
    "multi_gpu": "python -m benchmarks.multi_gpu --out benchmarks/results/h200/multi_gpu.json",
}
SERVERS = {
    "split": "relay, 1P + 1D",
    "colocated": "relay, colocated",
    "colocated-f32": "relay, colocated, fp32 weights",
    "transformers": "transformers serve, continuous batching, fp32",
}
KERNELS_SHOWN = ("whole step", "linears", "attention", "head")


def load(folder: Path = RESULTS) -> Results:
    """Every known result by name, wherever under ``folder`` its file lies. Raises ValueError if two files have one name."""
    results: Results = {}
    for path in sorted(folder.rglob("*.json")):
        if path.stem not in COMMANDS or (GPU_FOLDER in path.parts and path.stem not in GPU_NAMED):
            continue
        if path.stem in results:
            raise ValueError(f"two results are named {path.name} under {folder}")
        results[path.stem] = json.loads(path.read_text())
    return results


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with three significant digits (a whole number with all), thousands set apart; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - whole)}f}"


def provenance(result: dict[str, Any]) -> str:
    """Command, commit, date, machine and versions of a result in one line."""
    context = {**result, **result.get("environment", {})}
    machine = context.get("machine", context)
    if isinstance(machine, str):
        machine = {"processor": machine}
    processor = machine.get("processor") or machine.get("cpu")
    commit, dirty = re.match(r"([0-9a-f]*)(.*)", context["commit"]).groups()  # type: ignore[union-attr]
    parts = [f"`{context['command']}`", f"commit {commit[:7]}{dirty}"]
    parts += [context["date"]] if "date" in context else []
    where = [str(processor)]
    where += [f"{machine['cores']} cores"] if "cores" in machine else []
    where += [f"{machine['memory_gib']} GiB"] if "memory_gib" in machine else []
    where += [machine["isa"]] if "isa" in machine else []
    parts.append(", ".join(where))
    versions = {**context.get("versions", {})}
    if isinstance(context.get("python"), str):
        versions.setdefault("python", context["python"])
    parts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return f"<sub>{' · '.join(part for part in parts if part)}</sub>"


def missing(name: str) -> str:
    return f"No `{name}.json` yet: `{COMMANDS[name]}` makes it."


def serve_table(serve: dict[str, Any], *, short: bool) -> str:
    """One row a server. ``short``: the columns that decide."""
    medians = serve["medians"]
    columns = {
        "W1 TPOT, ms": lambda w: w["W1"]["tpot_ms"],
        "W1 TTFT, s": lambda w: w["W1"]["ttft_s"],
        "prompt tok/s": lambda w: w["W1"]["prompt_tok_s"],
        "W2 out tok/s": lambda w: w["W2"]["output_tok_s"],
        "W2 TTFT, s": lambda w: w["W2"]["ttft_s"],
        "W3 out tok/s": lambda w: w["W3"]["output_tok_s"],
        "W3 TTFT, s": lambda w: w["W3"]["ttft_s"],
        "W4 TTFT, s": lambda w: w["W4"]["ttft_s"],
    }
    if short:
        columns = {name: columns[name] for name in columns if name not in ("W1 TTFT, s", "W2 TTFT, s", "W3 TTFT, s")}
    rows = []
    for name in medians:
        row = [SERVERS.get(name, name), *(number(read(medians[name])) for read in columns.values())]
        row += [number(serve["pss_mb"].get(name)), number(serve["ready_s"].get(name))]
        rows.append(row)
    return table(["", *columns, "memory, MB", "ready, s"], rows)


def memory_table(serve: dict[str, Any]) -> str:
    """Where the memory of each server goes."""
    if "memory_mb" not in serve:
        return missing("serve").replace("No `serve.json` yet", "This `serve.json` holds no memory by kind")
    rows = [
        [
            SERVERS.get(name, name),
            *(number(memory[kind]) for kind in ("weights", "weights_rss", "anonymous", "total")),
            number(serve.get("restart_ready_s", {}).get(name)),
        ]
        for name, memory in serve["memory_mb"].items()
    ]
    header = ["", "weights, MB", "weights, were they copied, MB", "KV, buffers and heaps, MB", "all, MB"]
    return table([*header, "killed worker ready again, s"], rows)


def goals_table(results: Results) -> str:
    """Every goal with what was measured and whether that meets it."""
    rows = []
    for goal in GOALS:
        if goal.source not in results:
            cells = [f"`{goal.source}.json` is missing"] + ["–"] * (len(SHAPES) - 1)
        else:
            measured = goal.read(results[goal.source])
            verdicts = {
                row: f"{number(value)} {'met' if goal.meets(value) else '**missed**'}"
                for row, value in measured.items()
            }
            cells = [verdicts.get("", verdicts.get(shape, "–")) for shape in SHAPES[:1]]
            cells += [verdicts.get(shape, "" if "" in verdicts else "–") for shape in SHAPES[1:]]
        rows.append([goal.text, goal.bound, *cells])
    return table(["goal", "limit", *SHAPES], rows)


def kernels_table(kernels: dict[str, Any]) -> str:
    """Milliseconds and arithmetic rate by op and rows, a table an encoding and thread count."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in kernels["results"]:
        if "gflops" in row and row["op"] in KERNELS_SHOWN:
            groups.setdefault((row["encoding"], row["threads"]), []).append(row)
    parts = []
    for (encoding, threads), rows in groups.items():
        peak, bandwidth = rows[0]["peak_gflops"], rows[0]["memory_gbs"]
        parts.append(
            f"{encoding}, {threads} thread{'s' * (threads > 1)}, {rows[0]['isa']}; fma peak in this run {number(peak)} GFLOP/s, "
            f"memory {number(bandwidth)} GB/s\n"
        )
        cells = [
            [
                f"{r['op']}, {r['rows']} {'rows' if r['kind'] == 'decode' else 'prompt tokens'}",
                number(r["ms"]),
                number(r["gflops"]),
                f"{100 * r['gflops'] / r['peak_gflops']:.0f} %",
                number(r["gbs"]),
            ]
            for r in rows
        ]
        parts.append(table(["SmolLM2 shapes", "ms", "GFLOP/s", "of peak", "GB/s read"], cells) + "\n")
    return "\n".join(parts).rstrip()


def gateway_table(results: Results) -> str:
    """CPU time of a token event, part by part."""
    rows = []
    for name, text, key in (
        ("gateway_core", "core alone", "core_us_per_token"),
        ("gateway_core", "frame decoded, core, sink called", "core_and_shell_us_per_token"),
        ("api_hot_path", "HTTP surface: text path, chunk, send", "median_cpu_us_per_event"),
        ("gateway", "whole process: sockets to engine and clients, text, core", "cpu_us_per_token"),
    ):
        rows.append([text, number(results[name][key]) if name in results else missing(name)])
    text = table(["256 streams", "µs of CPU a token"], rows)
    if "gateway" in results:
        asked, came = results["gateway"]["asked_tokens_per_s"], results["gateway"]["tokens_per_s"]
        text += (
            f"\n\nOf {asked:,.0f} tokens a second asked for, {came:,} arrived in that run: gateway, fake engine and client "
            "share the machine with each other and with whatever else ran."
        )
    return text


def scheduler_table(scheduler: dict[str, Any]) -> str:
    """Microseconds of a step of running sequences."""
    keys = ("plan", "plan_p99", "update", "execute")
    rows = [
        [text, *(number(scheduler[name][key]) for key in keys)]
        for name, text in (("decode", "decode step"), ("decode_plan_ahead", "planned ahead, one in flight"))
    ]
    return table([f"{scheduler['sequences']} sequences, µs", "plan", "plan, p99", "update", "runner's arrays"], rows)


def correctness_text(result: dict[str, Any]) -> str:
    return (
        f"{result['prompts']} prompts, {result['rows']:,} greedy tokens: {result['equal_tokens']:,} equal, "
        f"{len(result['partings'])} partings; largest max abs(Δ) / max abs(logit) of a row {number(result['max_relative_error'])}."
    )


def kv_text(results: Results) -> str:
    """Everything about KV transfer that was measured."""
    names = [name for name in ("kv_float32", "kv_bfloat16") if name in results]
    documents = [results[name] for name in names]
    parts = [missing(name) for name in ("kv_float32", "kv_bfloat16") if name not in results]
    if documents:
        parts += [kv_tables.goals_table(documents, table), kv_tables.rows_table(documents, table, number)]
        parts += [kv_tables.ceilings_table(documents, table, number)]
        parts += [kv_tables.full_text(document, number) for document in documents if "backpressure" in document]
        parts += [kv_tables.pictures(results["kv_float32"])] if "kv_float32" in results else []
        parts += [provenance(document) for document in documents]
    return "\n\n".join(parts)


def sections(results: Results) -> dict[str, str]:
    """The text between each pair of markers."""

    def one(name: str, text: Any) -> str:
        return f"{text(results[name])}\n\n{provenance(results[name])}" if name in results else missing(name)

    lines = [provenance(results[name]) for name in ("gateway", "gateway_core", "api_hot_path") if name in results]
    return {
        "serve": one("serve", lambda serve: serve_table(serve, short=False)),
        "memory": one("serve", memory_table),
        "goals": goals_table(results),
        "gateway": "\n\n".join([gateway_table(results), *lines]),
        "scheduler": one("scheduler", scheduler_table),
        "kernels": one("kernels", kernels_table),
        "correctness": one("correctness", correctness_text),
        "gpu": h200_tables.text(RESULTS / GPU_FOLDER, table, number),
        "kv": kv_text(results),
    }


def multi_gpu_text(results: Results) -> str:
    """Everything that was measured on two GPUs."""
    if "multi_gpu" not in results:
        return missing("multi_gpu")
    found = results["multi_gpu"]
    return f"{multi_gpu_tables.text(found, table, number)}\n\n{provenance(found)}"


def chaos_sections(results: Results) -> dict[str, str]:
    """The text between the markers of docs/failure-model.md."""
    sections = {name: missing("chaos") for name in ("chaos", "chaos-moments", "chaos-resume")}
    if "chaos" in results:
        chaos = results["chaos"]
        sections["chaos-moments"] = chaos_tables.fault_table(chaos, table)
        sections["chaos-resume"] = chaos_tables.resume_table(chaos, table, number)
    for name in ("chaos", "chaos_gateways", "chaos_netns"):
        found = results.get(name)
        text = f"{chaos_tables.summary(found, number)}\n\n{provenance(found)}" if found else missing(name)
        sections[name.replace("_", "-")] = text
    resume = results.get("resume")
    sections["resume"] = (
        f"{chaos_tables.measured_table(resume, table, number)}\n\n{provenance(resume)}" if resume else missing("resume")
    )
    return sections


def readme_figures(results: Results) -> str:
    """The figures section of README.md."""
    lines = ["## Figures", ""]
    if "chaos" in results:
        lines += [f"{chaos_tables.headline(results['chaos'])} ([failure model](docs/failure-model.md))", ""]
    if headline := kv_tables.headline([results[name] for name in ("kv_float32", "kv_bfloat16") if name in results]):
        lines += [f"{headline} ([measured](docs/benchmarks.md#kv-transfer))", ""]
    if "multi_gpu" in results:
        found, drawn = results["multi_gpu"], "multi-gpu-load.svg"
        shown = [h200_tables.headline(RESULTS / GPU_FOLDER, number), multi_gpu_tables.headline(found, number)]
        if drawn in multi_gpu_charts.pictures(found):
            shown.append(f"![{multi_gpu_tables.CAPTIONS[drawn]}](docs/images/{drawn})")
        lines += [one for text in shown if text for one in (text, "")]
    if "serve" in results:
        serve = results["serve"]
        machine = serve["machine"]
        lines += [
            f"SmolLM2-135M on {machine['cores']} cores ({machine['processor']}, {machine['isa']}), all servers in one run. W1: one "
            "stream, 512 tokens in, 128 out. W2: 16 streams, 256 / 64. W3: 16 streams, 1,024 shared + 32 / 32. W4: one prompt of "
            "2,048. Memory is PSS: shared pages count once.",
            "",
            serve_table(serve, short=True),
        ]
    else:
        lines.append(missing("serve"))
    known = [name for name in ("gateway", "scheduler", "correctness", "install") if name in results]
    facts = []
    if "gateway" in known:
        facts.append(f"a streamed token costs the gateway {number(results['gateway']['cpu_us_per_token'])} µs of CPU")
    if "scheduler" in known:
        plan = results["scheduler"]["decode"]["plan"]
        facts.append(f"a step of {results['scheduler']['sequences']} sequences is planned in {number(plan)} µs")
    if "correctness" in known:
        equal, rows = results["correctness"]["equal_tokens"], results["correctness"]["rows"]
        facts.append(f"{equal:,} of {rows:,} greedy tokens equal transformers fp32")
    if "install" in known:
        facts.append(f"the base install is {number(results['install']['base_install_mb'])} MB")
    if facts:
        text = "; ".join(facts)
        lines += ["", text[0].upper() + text[1:] + "."]
    lines += [
        "",
        "How each was measured, on what, and which goals are missed and why: [docs/benchmarks.md](docs/benchmarks.md).",
    ]
    return "\n".join(lines)


def splice(text: str, begin: str, end: str, body: str) -> str:
    """``text`` with ``body`` between the markers. Raises ValueError unless the pair stands there once."""
    pattern = re.compile(re.escape(begin) + r"\n.*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"{begin} … {end} stands there {len(pattern.findall(text))} times, not once")
    return pattern.sub(lambda _: f"{begin}\n{body}\n{end}", text)


def pages(results: Results, root: Path = ROOT) -> dict[Path, str]:
    """What each page, and each picture that comes with it, should hold."""
    readme, docs, model = root / "README.md", root / "docs" / "benchmarks.md", root / "docs" / "failure-model.md"
    several, images = root / "docs" / "several-gpus.md", root / "docs" / "images"
    drawn = multi_gpu_charts.pictures(results["multi_gpu"]) if "multi_gpu" in results else {}
    return {
        readme: splice(readme.read_text(), "<!-- figures -->", "<!-- /figures -->", readme_figures(results)),
        docs: fill(docs, sections(results)),
        model: fill(model, chaos_sections(results)),
        several: fill(several, {"multi-gpu": multi_gpu_text(results)}),
        **{images / name: text for name, text in drawn.items()},
    }


def fill(page: Path, bodies: dict[str, str]) -> str:
    """``page`` with every table of ``bodies``. Raises ValueError if it has another, or not each of them once."""
    text = page.read_text()
    unknown = set(re.findall(r"<!-- table: (\S+) -->", text)) - set(bodies)
    if unknown:
        raise ValueError(f"{page}: no table is named {', '.join(sorted(unknown))}")
    for name, body in bodies.items():
        text = splice(text, f"<!-- table: {name} -->", "<!-- /table -->", body)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    options = parser.parse_args()
    stale = [(path, text) for path, text in pages(load()).items() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(("stale: " if options.check else "wrote ") + str(path.relative_to(ROOT)))
        if not options.check:
            path.write_text(text)
    sys.exit(1 if options.check and stale else 0)


if __name__ == "__main__":
    main()
