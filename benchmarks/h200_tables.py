"""Tables of the one-GPU results by what each file holds: steps, kernels, the whole server, kills, transfers, bits compared."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import chaos_tables

Result = dict[str, Any]
Table = Callable[..., str]
Number = Callable[..., str]
Reader = Callable[[Result, Table, Number], list[str]]
ELSEWHERE = ("multi_gpu",)  # shown in docs/several-gpus.md


def text(folder: Path, table: Table, number: Number) -> str:
    """Every file, by the readers below that know something of it."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        if path.stem in ELSEWHERE:
            continue
        result = json.loads(path.read_text())
        tables = [one for reader in READERS for one in reader(result, table, number)]
        if tables:
            parts.append(f"<sub>`{path.parent.name}/{path.name}` · {_made(result)}</sub>")
            parts += tables
    return "\n\n".join(parts) or "No GPU results are committed."


def headline(folder: Path, number: Number) -> str:
    """Decode steps and prefill of the 8B shape in one sentence; empty without their file."""
    path = folder / "model_time.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    steps_ms = {batch: result["decode/8b"][batch]["pipelined_ms"] for batch in ("1", "64", "256")}
    waits = ", ".join(f"{number(ms)} for {batch}" for batch, ms in steps_ms.items())
    rate = max(row["tokens_per_s"] for row in result["prefill/8b"].values())
    return (
        f"**One H200**, an 8B shape in bf16, random weights: a decode step takes, ms by sequences, {waits}; prompts are computed "
        f"at {number(rate)} tokens/s. ([what was measured](docs/kernels-gpu.md))"
    )


def _made(result: Result) -> str:
    context = {**result, **result.get("environment", {})}
    return " · ".join(
        f"{key} {context[key]}" for key in ("device", "driver", "commit", "date", "command") if key in context
    )


def _rows_of(result: Result, *starts: str) -> dict[str, dict[str, Any]]:
    """The entries named so whose values are rows."""
    return {
        name: value
        for name, value in result.items()
        if name.startswith(starts) and isinstance(value, dict) and all(isinstance(row, dict) for row in value.values())
    }


def steps(result: Result, table: Table, number: Number) -> list[str]:
    """Decode and prefill steps of the backend driven directly (``throughput`` of the engine includes compiling: not shown)."""
    found = []
    for name, rows in _rows_of(result, "decode/", "prefill/").items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        cells = [[key, *(number(row.get(column)) for column in columns)] for key, row in rows.items()]
        found.append(table([name, *columns], cells))
    return found


def host(result: Result, table: Table, number: Number) -> list[str]:
    """What a step with a prompt needs of the processor, from its graph and op by op (``benchmarks.gpu_host``)."""
    found = []
    for name, rows in result.items():
        if f"{name}: captured at start" not in result:
            continue
        cells = [
            [
                f"{chunk} tokens",
                number(row["device_ms"]),
                *(number(row[kind]) if row["graph"] else "–" for kind in ("wall_ms", "queue_ms")),
                number(row["eager_ms"]),
                number(row["cut_ms"]),
            ]
            for chunk, row in rows.items()
        ]
        header = ["on the GPU, ms", "from its graph: until drawn", "queued", "op by op: queued", "layer by layer"]
        at_start = result[f"{name}: captured at start"]
        found.append(table([f"{name}: prompt + decode rows", *header], cells))
        found.append(f"{at_start['graphs']} graphs captured at start in {number(at_start['seconds'])} s.")
    return found


def attention(result: Result, table: Table, number: Number) -> list[str]:
    """Prefill attention of each kernel, by prompt length; decode attention of each tile; what was compared."""
    kind = next((name.removeprefix("prefill_tflops") for name in result if name.startswith("prefill_tflops")), None)
    if kind is None:
        return []
    rows = result["prefill_tflops" + kind]
    decodes = result.get("decode", {})
    tiles = list(dict.fromkeys(tile for row in decodes.values() for tile in row["share"]))
    shares = [[name, *(f"{100 * row['share'][tile]:.1f} %" for tile in tiles)] for name, row in decodes.items()]
    found = [
        wrong
        for case in result.get("different_rows" + kind, {}).values()
        for what, wrong in case.items()
        if what.startswith(("prefill", "decode"))
    ]
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [
        [f"{int(tokens):,} tokens", *(number(row.get(column)) for column in columns)] for tokens, row in rows.items()
    ]
    return [
        table([f"prefill attention{kind.replace('_', ', ')}, TFLOP/s", *columns], cells),
        *([table(["decode attention, share of the copy rate by rows/warps/stages", *tiles], shares)] if shares else []),
        *([f"{len(found)} comparisons of every row, {sum(map(bool, found))} with rows that differ."] if found else []),
    ]


def linears(result: Result, table: Table, number: Number) -> list[str]:
    """All linear layers of an 8B decode step in one graph, beside the library as it comes."""
    shown = result.get("decode_step_linears")
    if not shown:
        return []
    rows = [(batch, row["us"]) for batch, row in shown.items() if isinstance(row, dict)]
    cells = [
        [batch, number(us["cublas"]), number(us["best exact"]), f"{us['best exact'] / us['cublas']:.2f}"]
        for batch, us in rows
    ]
    title = f"linears of a decode step, batch (limit {number(shown['limit_us'])} µs)"
    return [table([title, "cuBLAS, µs", "ours, µs", "ratio"], cells)]


def tall_linears(result: Result, table: Table, number: Number) -> list[str]:
    """The linears of 8B for prompts: the library as it comes, the library in the canon's order, the better of our tiles."""
    rates = result.get("linear_tflops")
    if not rates:
        return []
    rows, ratios = [], []
    for name, row in rates.items():
        ours = max(rate for kind, rate in row.items() if not kind.startswith("cublas"))
        shape, tokens = name.split("/")
        ratio = row["cublaslt-nosplit"] / row["cublas"]
        ratios += [ratio] if int(tokens) >= 2048 else []
        cells = [number(row["cublas"]), number(row["cublaslt-nosplit"]), number(ours), f"{ratio:.2f}"]
        rows.append([f"{shape}, {int(tokens):,} tokens", *cells])
    header = ["linears of 8B, TFLOP/s", "cuBLAS", "cuBLASLt, K not split", "ours", "second to first"]
    mean = f"Geometric mean of the last column, {len(ratios)} shapes of 2,048 tokens and more: {geometric_mean(ratios):.2f}."
    return [table(header, rows), mean]


def int8_linears(result: Result, table: Table, number: Number) -> list[str]:
    """The linears of a layer of 8B in 16 bits and with int8 weights, by rows."""
    layers = _rows_of(result, "layer_us").get("layer_us")
    if not layers:
        return []
    columns = [column for column in ("bf16", "best", "one_tile", "chosen") if column in next(iter(layers.values()))]
    titles = {"best": "int8, best tile of each", "one_tile": "int8, one tile for all", "chosen": "int8, tiles in use"}
    cells = [[rows, *(number(row[column]) for column in columns)] for rows, row in layers.items()]
    bits = result["bits"]
    return [
        table(["linears of a layer of 8B, µs, by rows", *(titles.get(column, column) for column in columns)], cells),
        f"{bits['checked']:,} products compared with the accumulators of 16 bits, {len(bits['wrong'])} differ.",
    ]


def served(result: Result, table: Table, number: Number) -> list[str]:
    """The whole server at each rate of requests."""
    rows = []
    for name, row in result.items():
        shape, _, rate = name.partition("/rate ")
        if not rate:
            continue
        latencies = [number(row[one][share]) for one in ("ttft_ms", "itl_ms") for share in ("p50", "p99", "max")]
        rows.append([f"{shape}, {rate}", str(row["requests"]), number(row["output_tokens_per_s"]), *latencies])
    if not rows:
        return []
    title = f"requests/s of {result['prompt']} + {result['new']} tokens"
    header = ["requests", "output tok/s", "TTFT p50, ms", "p99", "max", "ITL p50, ms", "p99", "max"]
    return [table([title, *header], rows)]


def kills(result: Result, table: Table, number: Number) -> list[str]:
    """A worker killed under load."""
    rows = []
    for name, row in result.items():
        if not isinstance(row, dict) or "next_token_ms_of_disturbed" not in row:
            continue
        waits = row["next_token_ms_of_disturbed"]
        cells = [f"{row['disturbed']} of {row['streams']}", number(waits["p50"]), number(waits["p99"])]
        rows.append([name, *cells, str(row["different_outputs"]), number(row["victim_ready_again_s"])])
    header = ["", "disturbed streams", "next token p50, ms", "p99, ms", "outputs that differ", "victim ready again, s"]
    return [table(header, rows)] if rows else []


def transfers(result: Result, table: Table, number: Number) -> list[str]:
    """KV between two processes on one GPU: streamed while the prompt is computed, and sent after it."""
    rows = []
    for row in result.get("rows", []):
        if "exposed_ms" not in row:
            continue
        waits = [number(row["exposed_ms"][kind]) for kind in ("after", "overlapped")]
        hidden = f"below noise ± {row['noise_ms']:.2f}" if row["below_noise"] else f"{100 * row['hidden_share']:.1f} %"
        slower = row["prefill_ms"]["overlapped"] / row["prefill_ms"]["nothing"] - 1
        after, streamed = (row["prefill_ms"][kind] + row["exposed_ms"][kind] for kind in ("after", "overlapped"))
        cells = [str(row["frames"]), *waits, hidden, f"{100 * slower:+.1f} %", number(after - streamed)]
        cells.append("yes" if row["kv_equal"] else "**no**")
        rows.append([f"{row['tokens']:,} tokens, {number(row['megabytes'])} MB, {row['transport']}", *cells])
    header = ["KV between two processes on one GPU", "frames", "sent after it, ms", "streamed: exposed, ms", "hidden"]
    return [table([*header, "prefill slowed", "saved in all, ms", "bytes equal"], rows)] if rows else []


def plain(result: Result, table: Table, number: Number) -> list[str]:
    """Our kernels beside plain ones."""
    rows = [
        [name, number(row["ours_ms"]), number(row["plain_ms"]), number(row["speed_up"])]
        for name, row in result.items()
        if isinstance(row, dict) and "plain_ms" in row
    ]
    return [table(["", "ours, ms", "plain kernels, ms", "times faster"], rows)] if rows else []


def compared(result: Result, table: Table, number: Number) -> list[str]:
    """What was compared bit by bit. Sequences with an injected fault are to differ."""
    paths = result.get("paths", {})
    if "wrong" in paths:
        return [f"{paths['compared']} paths of the engine compared bit by bit, {len(paths['wrong'])} differ."]
    injected = result.get("injected", {"paths": {}})
    rows = [
        [name, f"{row['identical']} of {row['compared']}", number(row["logit_rows"]), number(row["kv_blocks"])]
        for name, row in [*paths.items(), *injected["paths"].items()]
    ]
    more = [f"Injected faults: commit {injected['commit']}, {injected['date']}."] if injected["paths"] else []
    return [table(["path", "sequences identical", "logits rows", "KV blocks"], rows), *more] if rows else []


def models(result: Result, table: Table, number: Number) -> list[str]:
    """Every path of whole models, and draws beside their definition (``benchmarks.gpu_model --part check``)."""
    rows = [
        [f"{name.removeprefix('p4/')}, {row['checks']} paths", f"{len(row['wrong'])} differ"]
        for name, row in result.items()
        if name.startswith("p4/")
    ]
    if not rows:
        return []
    draws = result["sampler"]
    rows.append([f"draws beside their definition, {draws['rows']}", f"{len(draws['wrong'])} differ"])
    return [table(["bits compared", "found"], rows)]


def checked(result: Result, table: Table, number: Number) -> list[str]:
    """The parts of ``benchmarks.gpu_parts``: bits of frames, the frame kernels alone, every path in float16."""
    parts = result.get("parts", {})
    rows = []
    if bits := parts.get("kv_bits"):
        rows.append([f"frames equal to plain indexing, {bits['frames']} compared", f"{len(bits['wrong'])} differ"])
    for name, row in parts.get("float16", {}).get("results", {}).items():
        rows.append([f"{name}, {row['checks']} paths", f"{len(row['wrong'])} differ"])
    if speed := parts.get("kv_speed"):
        for kind in ("gather", "scatter"):
            share = f"{number(speed[f'{kind}_us'])} µs, {100 * speed[f'{kind}_share']:.0f} %"
            rows.append([f"{kind} of a frame of 8 MiB inside the GPU: time, share of the copy rate", share])
    return [table(["part", "found"], rows)] if rows else []


def loaded(result: Result, table: Table, number: Number) -> list[str]:
    """Safetensors straight to the device beside a pack: reading alone, and the whole start."""
    rows = [
        [name.split(" (")[0], number(row.get("seconds", row.get("ready_s"))), number(row.get("gb_per_s"))]
        for name, row in result.items()
        if name.startswith(("load ", "serve ", "index")) and isinstance(row, dict)
    ]
    if "bits" not in result or not rows:
        return []
    bits = result["bits"]
    said = f"{bits['compared']} tensors compared on the device, direct beside packed: {len(bits['wrong'])} differ."
    return [table(["8B shape, bf16", "seconds (serve: start to ready)", "GB/s"], rows), said]


def struck(result: Result, table: Table, number: Number) -> list[str]:
    """`relay chaos` on a GPU."""
    if "by_kind" not in result:
        return []
    sent = ", ".join(f"{count} over {scheme}" for scheme, count in result["kv_transfers"].items())
    return [
        chaos_tables.summary(result, number),
        chaos_tables.resume_table(result, table, number),
        f"KV transfers that a D acknowledged: {sent}.",
    ]


def suite(result: Result, table: Table, number: Number) -> list[str]:
    """The tests that need a GPU, by file."""
    files = result.get("files", {})
    kinds = ("passed", "failed", "skipped")
    rows = [[f"`{name}`", *(str(row[kind]) for kind in kinds)] for name, row in files.items()]
    rows.append(["all", *(str(sum(row[kind] for row in files.values())) for kind in kinds)])
    return [table(["tests by marker `gpu`", *kinds], rows)] if files else []


READERS: tuple[Reader, ...] = (
    steps,
    host,
    attention,
    linears,
    tall_linears,
    int8_linears,
    served,
    kills,
    transfers,
    plain,
    compared,
    models,
    checked,
    loaded,
    struck,
    suite,
)
