"""The two-GPU benchmark as plain SVG: shapes side by side at each load, KV transfers beside the copy rate.

    python -m benchmarks.multi_gpu_charts FILE FOLDER

``python -m benchmarks.tables`` writes the same of the committed FILE. What FILE lacks is left out, and the caption says so.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu_report import LOAD, Parts, best_budget, factors, shapes
from relay.bench.charts import Drawing

COLOURS = {
    "1P + 1D": "#2f7ed8",
    "1P + 1D over host memory": "#8fb8e6",
    "2 colocated": "#f28f43",
    "2 ranks": "#3a9d5d",
    "vLLM": "#8e6bbf",
}
STREAMED, AFTER, COPY, LIMIT = "#2f7ed8", "#f28f43", "#dfe4e8", "#c0392b"
METRICS = ("gap of tokens p50, ms", "gap p99, ms", "first token p50, ms", "good requests/s", "output tokens/s")
LEFT, BAR, COLUMN = 250, 18, 170


def pictures(document: dict[str, Any]) -> dict[str, str]:
    """Every picture by file name; one whose parts are all missing is not among them."""
    parts = document["parts"]
    found = {}
    if factors(parts):
        found["multi-gpu-load.svg"] = load_chart(parts)
    if any(transfer_rows(parts)):
        found["multi-gpu-kv.svg"] = transfer_chart(parts)
    return found


def values(row: dict[str, Any]) -> tuple[float | None, ...]:
    """The figures of ``METRICS``; None where nothing came."""
    gaps, first = row["itl_ms"], row["ttft_ms"]
    return gaps["p50"], gaps["p99"], first["p50"], row["goodput_per_s"], row["output_tokens_per_s"]


def missing_shapes(parts: Parts) -> list[str]:
    """What the picture of the loads lacks, in words."""
    found = []
    for factor in factors(parts):
        key = f"{LOAD}{factor:g}"
        there = {
            "1P + 1D": key in parts.get("split", {}),
            "2 colocated": best_budget(parts, "colocated", key) is not None,
            "2 ranks": best_budget(parts, "ranks", key) is not None,
        }
        found += [f"{text} at {key}" for text, is_there in there.items() if not is_there]
    return found


def load_chart(parts: Parts) -> str:
    """A block a load, a line a shape, a column a figure; every column has one scale over all loads."""
    blocks = {f"{LOAD}{factor:g}": shapes(parts, f"{LOAD}{factor:g}") for factor in factors(parts)}
    rows = [row for block in blocks.values() for row in block.values()]
    most = [max((values(row)[index] or 0.0 for row in rows), default=0.0) or 1.0 for index in range(len(METRICS))]
    absent = missing_shapes(parts)
    height = 70 + sum(34 + BAR * len(block) for block in blocks.values()) + 40 + 14 * bool(absent)
    drawing = Drawing(
        LEFT + COLUMN * len(METRICS) + 20, height, "Two GPUs under the same arrivals: 8B shape, chats beside documents"
    )
    for index, text in enumerate(METRICS):
        drawing.text(LEFT + index * COLUMN, 50, text)
    y = 62.0
    for key, block in blocks.items():
        y += 16
        load, expected = (next(iter(block.values()))[name] for name in ("load", "expected"))
        rates = f"{load['chats_per_s']:g} chats/s, {load['documents_per_s']:g} documents/s"
        drawing.text(16, y, f"{key}: {rates}, one P busy for {100 * expected['prefill_share']:.0f} %", size=12)
        y += 6
        for name, row in block.items():
            _line(drawing, y, name, row, most)
            y += BAR
        y += 12
    limit = rows[0]["load"]
    note = f"Good: the second token within {limit['slo_start_ms']:g} ms, 99 % of a request's gaps within {limit['slo_itl_ms']:g}"
    drawing.text(16, y + 10, f"{note} ms (red). Colocated and ranks at the best of their budgets by good requests.")
    if absent:
        drawing.text(16, y + 26, f"Not measured: {', '.join(absent)}.")
    return drawing.render()


def _line(drawing: Drawing, y: float, name: str, row: dict[str, Any], most: list[float]) -> None:
    drawing.text(LEFT - 8, y + 12, name, anchor="end")
    colour = next(colour for text, colour in reversed(COLOURS.items()) if name.startswith(text))
    for index, (value, top) in enumerate(zip(values(row), most, strict=True)):
        x, scale = LEFT + index * COLUMN, (COLUMN - 60) / top
        drawing.rectangle(x, y + 2, (value or 0.0) * scale, BAR - 5, colour, f"{name}: {METRICS[index]} {value}")
        drawing.text(x + (value or 0.0) * scale + 4, y + 12, "–" if value is None else f"{value:,.4g}")
        limit = row["load"]["slo_itl_ms"]
        if index == 1 and limit <= top:
            drawing.line(x + limit * scale, y, x + limit * scale, y + BAR, LIMIT)


def transfer_rows(parts: Parts) -> list[dict[str, Any]]:
    """Every measured transfer; a length that was skipped is a string."""
    return [row for name in ("kv", "kv-other") for row in parts.get(name, {}).values() if isinstance(row, dict)]


def transfer_chart(parts: Parts) -> str:
    """A line a length and transport: what is exposed, streamed and sent after; the rate of the latter beside a plain copy."""
    rows = transfer_rows(parts)
    left, wide, step, second = 210, 300, 40, 620
    skipped = [
        f"{tokens} tokens by {name}"
        for name in ("kv", "kv-other")
        for tokens, row in parts.get(name, {}).items()
        if isinstance(row, str)
    ]
    skipped += [f"part {name}" for name in ("kv", "kv-other") if name not in parts]
    drawing = Drawing(1100, 74 + step * len(rows) + 34, "KV of one prompt from one GPU to another, 8B shape")
    for x, colour, text in (
        (left, AFTER, "sent after the prompt: exposed, ms"),
        (left + 230, STREAMED, "streamed during it"),
        (second, COPY, "plain copy of that size, GB/s"),
        (second + 190, AFTER, "KV sent after the prompt"),
    ):
        drawing.rectangle(x, 36, 11, 11, colour)
        drawing.text(x + 16, 46, text)
    longest = max(max(row["exposed_after_ms"], row["exposed_ms"], 1e-9) for row in rows)
    fastest = max(max(row["copy"]["gb_per_s"], row["after_gb_per_s"]) for row in rows)
    for index, row in enumerate(rows):
        y = 62 + index * step
        drawing.text(left - 8, y + 15, f"{row['tokens']:,} tokens, {row['scheme']}", anchor="end")
        drawing.text(
            left - 8,
            y + 28,
            f"{row['megabytes']:,.1f} MB, prompt {row['prefill_ms']['streamed']:,.0f} ms",
            size=9,
            anchor="end",
        )
        share = (
            f"below noise ± {row['noise_ms']:.2f}"
            if row["below_noise"]
            else f"{100 * row['hidden_share']:.1f} % hidden"
        )
        for at, colour, value, more in (
            (4, AFTER, row["exposed_after_ms"], ""),
            (19, STREAMED, row["exposed_ms"], f" ({share})"),
        ):
            span = max(value, 0.0) / longest * (wide - 20)
            drawing.rectangle(left, y + at, span, 13, colour)
            drawing.text(left + span + 4, y + at + 10, f"{value:,.2f}{more}")
        copy, rate = row["copy"]["gb_per_s"], row["after_gb_per_s"]
        drawing.rectangle(second, y + 4, copy / fastest * wide, 28, COPY)
        drawing.rectangle(second, y + 10, rate / fastest * wide, 16, AFTER)
        drawing.text(
            second + max(copy, rate) / fastest * wide + 4,
            y + 22,
            f"{rate:,.4g} of {copy:,.4g}: {100 * rate / copy:.1f} %",
        )
    if skipped:
        drawing.text(16, 62 + step * len(rows) + 24, f"Not measured: {', '.join(skipped)}.")
    return drawing.render()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures(json.loads(arguments.file.read_text())).items():
        (arguments.folder / name).write_text(picture)
        print("wrote", arguments.folder / name)


if __name__ == "__main__":
    main()
