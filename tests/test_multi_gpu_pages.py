"""Tables and pictures of GPU results: what was measured is shown with its goal, what was not is said."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks import h200_tables, tables
from benchmarks.gpu_server import Stream, ms
from benchmarks.multi_gpu_charts import pictures
from benchmarks.multi_gpu_load import Load, Planned, figures
from benchmarks.multi_gpu_run import NO_VLLM
from benchmarks.multi_gpu_tables import headline, text


def loads(gap_ms: float, *, burst: bool = False) -> dict[str, Any]:
    """Figures of a chat and a document whose tokens come every ``gap_ms``."""
    load = Load(seconds=2.0, burst=burst)
    times = [10.1 + index * gap_ms / 1e3 for index in range(128)]
    streams = [Stream(started=10.0, times=times, tokens=[7] * 128) for _ in range(2)]
    planned = [Planned(0.0, kind, [1] * 9, 128) for kind in ("chat", "document")]
    return figures(load, list(zip(planned, streams, strict=True)), begin=10.0, took=4.0)


def served(gap_ms: float) -> dict[str, Any]:
    return {"flags": [], "ready_s": 14.0, "load x 1.2": loads(gap_ms), "backlog": loads(gap_ms, burst=True)}


def transfer(exposed_ms: float, rate: float, tokens: int = 2048) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "megabytes": 268.44,
        "scheme": "ipc",
        "prefill_ms": {"streamed": 51.0, "after": 50.0, "empty": 50.0},
        "exposed_ms": exposed_ms,
        "exposed_after_ms": 20.0,
        "noise_ms": 0.1,
        "below_noise": abs(exposed_ms) <= 0.1,
        "hidden_share": 1 - exposed_ms / 20.0,
        "after_gb_per_s": rate,
        "copy": {"gb_per_s": 400.0},
        "after_share_of_copy_rate": rate / 400.0,
        "kv_bytes_equal": True,
    }


def kill(wait_s: float) -> dict[str, Any]:
    return {
        "streams": 32,
        "resumed": 32,
        "recomputed_tokens": 6400,
        "tokens_at_kill": 198,
        "next_token_ms_of_disturbed": ms([wait_s] * 32),
        "different_outputs": 0,
        "victim_ready_again_s": 16.2,
    }


def document(**parts: Any) -> dict[str, Any]:
    made = {
        "commit": "0123abc",
        "date": "2026-01-02",
        "command": "python -m benchmarks.multi_gpu",
        "seconds": 1.0,
        "form": 1,
    }
    return {
        "command": "python -m benchmarks.multi_gpu",
        "commit": "4567def",
        "machine": {"processor": "a processor", "cores": 32},
        "parts": parts,
        "made": dict.fromkeys(parts, made),
        "problems": {},
        "vllm": {"note": NO_VLLM},
    }


def shown(found: dict[str, Any]) -> str:
    return text(found, tables.table, tables.number)


def words(picture: str) -> str:
    """Every text of an SVG."""
    return "\n".join(ElementTree.fromstring(picture).itertext())


def test_shapes_are_compared_with_their_goals() -> None:
    parts = {
        "split": served(5.0),
        "colocated-256": served(16.0),
        "colocated-512": served(11.0),
        "ranks-512": served(8.0),
    }
    page = shown(document(**parts))
    for line in (
        "| ITL p99, colocated, load x 1.2 | ≥ 3× better | 2.20× **missed** |",
        "| goodput, colocated, load x 1.2 | ≥ 1.2× | 1.00 /s to 0.00 met |",
        "| load x 1.2: 1P + 1D | 100 % | 100 % | 100 % | 100 % |",
        "| load x 1.2: 2 colocated, 256 | 0 % | 0 % | 100 % | 100 % |",
        "load x 1.2, one rank: all equal",
        "vLLM's column is empty: not run",
        "commit 0123abc · 2026-01-02",
    ):
        assert line in page
    rows = [
        line for line in page.splitlines() if line.startswith(("| load x 1.2: 2", "| backlog: 2")) and " of 2 " in line
    ]
    assert len(rows) == 3
    assert "multi-gpu-load.svg" in page
    assert "multi-gpu-kv.svg" not in page


def test_other_tokens_in_one_shape_are_said() -> None:
    parts = {"split": served(5.0), "colocated-256": served(16.0)}
    parts["colocated-256"]["load x 1.2"]["digest"] = "other"
    page = shown(document(**parts))
    assert "load x 1.2, one rank: **not all equal**" in page
    assert "backlog, one rank: all equal" in page


def test_transfers_and_kills_are_shown_with_their_goals() -> None:
    kv = {"2048": transfer(0.1, 360.0), "8192": transfer(2.0, 120.0, 8192), "16384": "skipped: no time was left"}
    parts = {"kv": kv, "kv-other": {"2048": transfer(5.0, 6.0)}, "kill": kill(0.25), "kill-replica": kill(1.2)}
    page = shown(document(**parts, topology=["2 GPUs", "peers"], **{"exact-ranks": {"compared": 51, "identical": 51}}))
    for line in (
        "| KV hidden, 2,048 tokens, ipc | ≥ 99 % or below noise | 99.5 %, 0.10 ms (noise ± 0.10) met |",
        "| KV rate over copy rate, 2,048 tokens, ipc | ≥ 80 % | 90.0 % met |",
        "| KV hidden, 8,192 tokens, ipc | ≥ 99 % or below noise | 90.0 %, 2.00 ms (noise ± 0.10) **missed** |",
        "| the only D killed, P has the prompts' KV: next token p99 | ≤ 300 ms | 250 ms met |",
        "| one of two replicas killed, whole re-prefill: next token p99 | ≤ 1,000 ms | 1,200 ms **missed** |",
        "| two ranks: sequences identical | all | 51 of 51 met |",
        "The machine, as NVML tells: 2 GPUs; peers.",
        "| 32 of 32 | 198 | 200 | 250 | 250 | 0 |",
    ):
        assert line in page
    assert page.count("KV rate over copy rate") == 2  # not of the way by host memory


def test_the_readme_says_what_the_split_gains_costs_and_misses() -> None:
    slow = served(20.0)
    slow["backlog"]["all_tokens_per_s"] = 4 * served(5.0)["backlog"]["all_tokens_per_s"]
    parts = {"split": served(5.0), "colocated-512": slow, "kv": {"2048": transfer(0.1, 120.0)}, "kill": kill(0.4)}
    said = headline(document(**parts), tables.number)
    for words in (
        "is 5.00 against 20.0 ms, 4.00 times better",
        "(100 against 100 ms at the median)",
        "a backlog is worked off at 0.25 of their rate",
        "Missed: a burst of KV at 80 % of the copy rate (it is 30 to 30); the next token within 300 ms",
    ):
        assert words in said
    parts |= {"kv": {"2048": transfer(0.1, 360.0)}, "kill": kill(0.2)}
    assert "Missed" not in headline(document(**parts), tables.number)
    assert headline(document(split=served(5.0)), tables.number) == ""


def test_a_part_without_figures_is_named_with_its_reason() -> None:
    found = document(kv={"2048": transfer(1.0, 100.0)})
    found["problems"] = {
        "split": "Traceback\nRuntimeError: not ready",
        "ranks-512": "skipped: 9 s were left, it may take 72",
    }
    page = shown(found)
    assert "`split`: RuntimeError: not ready; `ranks-512`: skipped: 9 s were left" in page
    assert (
        "Parts without figures: split, kill, colocated, kill-replica, ranks, kv-other, split-other, exact-ranks."
        in page
    )
    assert shown(document()).startswith("Nothing was measured.")


def test_pictures_leave_out_what_is_missing_and_say_so() -> None:
    assert pictures(document()) == {}
    whole = pictures(document(**{"split": served(5.0), "colocated-512": served(20.0), "ranks-512": served(9.0)}))
    assert set(whole) == {"multi-gpu-load.svg"}
    said = words(whole["multi-gpu-load.svg"])
    assert "Not measured" not in said
    assert "2 colocated, 512 tokens a step" in said
    assert "within 10.9 ms (red)" in said.replace("\n", " ")
    partly = pictures(
        document(split=served(5.0), kv={"2048": transfer(1.0, 100.0), "8192": "skipped: no time was left"})
    )
    assert "Not measured: 2 colocated at load x 1.2, 2 ranks at load x 1.2." in words(partly["multi-gpu-load.svg"])
    said = words(partly["multi-gpu-kv.svg"])
    assert "Not measured: 8192 tokens by kv, part kv-other." in said
    assert "100 of 400: 25.0 %" in said


def test_bars_are_as_long_as_their_figures() -> None:
    picture = pictures(document(**{"split": served(5.0), "colocated-512": served(20.0)}))["multi-gpu-load.svg"]
    widths = {}
    for shape in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect"):
        for tip in shape:
            widths[tip.text] = float(shape.attrib["width"])
    assert widths["2 colocated, 512 tokens a step: gap p99, ms 20.0"] == pytest.approx(
        4 * widths["1P + 1D: gap p99, ms 5.0"]
    )


def test_a_percentile_of_nothing_is_a_dash() -> None:
    part = served(5.0)
    part["load x 1.2"]["itl_ms"] = {"p50": None, "p99": None, "max": None}
    found = document(split=part)
    assert "–" in words(pictures(found)["multi-gpu-load.svg"])
    assert "| load x 1.2: 1P + 1D | – | – |" in shown(found)


def test_the_page_of_several_gpus_comes_with_its_pictures(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for path in tables.pages({}):
        (tmp_path / path.relative_to(tables.ROOT)).write_text(path.read_text())
    results = {"multi_gpu": document(split=served(5.0), kv={"2048": transfer(1.0, 100.0)})}
    found = tables.pages(results, tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in found}
    assert {"docs/images/multi-gpu-load.svg", "docs/images/multi-gpu-kv.svg"} < names
    assert "a processor, 32 cores" in found[tmp_path / "docs" / "several-gpus.md"]
    without = tables.pages({}, tmp_path)
    assert tables.COMMANDS["multi_gpu"] in without[tmp_path / "docs" / "several-gpus.md"]


def test_the_result_lies_among_those_of_gpus(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    (folder / "multi_gpu.json").write_text(json.dumps(document()))
    (folder / "serve.json").write_text("{}")  # a name that a CPU result has
    assert set(tables.load(tmp_path / "results")) == {"multi_gpu"}


def one_gpu(folder: Path, **result: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps({"commit": "0123abc", "device": "a GPU", **result}))
    return h200_tables.text(folder, tables.table, tables.number)


def sent(transport: str, exposed_ms: float = -0.12) -> dict[str, Any]:
    return {
        "transport": transport,
        "frames": 32,
        "tokens": 2048,
        "megabytes": 268.4,
        "kv_equal": True,
        "prefill_ms": {"overlapped": 56.25, "after": 46.0, "nothing": 45.0},
        "noise_ms": 0.2,
        "exposed_ms": {"overlapped": exposed_ms, "after": 19.4},
        "below_noise": exposed_ms <= 0.2,
        "hidden_share": round(1 - exposed_ms / 19.4, 4),
    }


READ = {"bits": {"compared": 20, "wrong": ["one"]}}
FAULTS = {
    "requests": 96,
    "identical": 95,
    "different": 0,
    "failed": 0,
    "leaked": 0,
    "faults": {"kill_engine": 1},
    "signals": {"SIGKILL": 1},
    "by_kind": {
        "kill_engine": {
            "resume_ms": {"n": 1, "p50": 80.94, "p99": 80.94},
            "detect_ms": {"n": 1, "p50": 13.05, "p99": 13.05},
        }
    },
    "calm": {"resumed_tokens_p50": 118.0, "reprefill_and_step_ms_p50": 8.92},
    "cells": [{"shape": "1P+2D", "seed": 1}],
    "kv_transfers": {"ipc": 4},
}


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ({"decode/8b": {"64": {"graph_ms": 6.21, "wall_ms": 6.76}}}, "| 64 | 6.21 | 6.76 |"),
        ({"prefill_tflops": {"8192": {"ours": 540.5}}}, "| 8,192 tokens | 540 |"),
        (
            {
                "prefill_tflops": {"2048": {"ours": 1.0}},
                "decode": {"64x4096": {"us": {"16/4/3": 9.0}, "share": {"16/4/3": 0.968}}},
                "different_rows": {"a case": {"relative_error": 0.1, "prefill chunk 7": 2, "decode (16, 4, 3)": 0}},
            },
            "| 64x4096 | 96.8 % |\n\n2 comparisons of every row, 1 with rows that differ.",
        ),
        (
            {
                "linear_tflops": {
                    "o/512": {"cublas": 500.0, "cublaslt-nosplit": 100.0, "(a tile)": 400.0, "(another)": 450.0},
                    "o/2048": {"cublas": 500.0, "cublaslt-nosplit": 450.0, "(a tile)": 400.0, "(another)": 350.0},
                }
            },
            "| o, 2,048 tokens | 500 | 450 | 400 | 0.90 |\n\n"
            "Geometric mean of the last column, 1 shapes of 2,048 tokens and more: 0.90.",
        ),
        ({"p4/8B": {"checks": 89, "wrong": ["x"]}, "sampler": {"rows": 9, "wrong": []}}, "| 8B, 89 paths | 1 differ |"),
        (
            {"decode_step_linears": {"limit_us": 3297.2, "1": {"us": {"cublas": 3840.0, "best exact": 3648.0}}}},
            "| 1 | 3,840 | 3,648 | 0.95 |",
        ),
        (
            {
                "prompt": 512,
                "new": 128,
                "split/rate 4": {
                    "requests": 30,
                    "output_tokens_per_s": 434.1,
                    "ttft_ms": {"p50": 29.25, "p99": 60.45, "max": 60.45},
                    "itl_ms": {"p50": 5.04, "p99": 10.98, "max": None},
                },
            },
            "| split, 4 | 30 | 434 | 29.2 | 60.5 | 60.5 | 5.04 | 11.0 | – |",
        ),
        ({"kill D": {**kill(0.1448), "disturbed": 32}}, "| kill D | 32 of 32 | 145 | 145 | 0 | 16.2 |"),
        (
            {"rows": [sent("shm")]},
            "| 2,048 tokens, 268 MB, shm | 32 | 19.4 | -0.12 | below noise ± 0.20 | +25.0 % | 9.27 | yes |",
        ),
        (
            {"rows": [sent("tcp", exposed_ms=36.0)]},
            "| 2,048 tokens, 268 MB, tcp | 32 | 19.4 | 36.0 | -85.6 % | +25.0 % | -26.8 | yes |",
        ),
        ({"rows": [sent("ipc") | {"kv_equal": False}]}, "+25.0 % | 9.27 | **no** |"),
        ({"prefill": {"ours_ms": 29.64, "plain_ms": 5945.5, "speed_up": 200.6}}, "| prefill | 29.6 | 5,946 | 201 |"),
        (
            {"paths": {"split": {"compared": 17, "identical": 16, "logit_rows": 398, "kv_blocks": 267}}},
            "| split | 16 of 17 | 398 | 267 |",
        ),
        ({"paths": {"compared": 144, "wrong": ["one"]}}, "144 paths of the engine compared bit by bit, 1 differ."),
        (
            {"parts": {"kv_bits": {"frames": 256, "wrong": ["one"]}}},
            "| frames equal to plain indexing, 256 compared | 1 differ |",
        ),
        (
            {"parts": {"float16": {"results": {"8b float16": {"checks": 89, "wrong": []}}}}},
            "| 8b float16, 89 paths | 0 differ |",
        ),
        (
            {
                "parts": {
                    "kv_speed": {"gather_us": 12.8, "gather_share": 0.306, "scatter_us": 13.1, "scatter_share": 0.3}
                }
            },
            "time, share of the copy rate | 12.8 µs, 31 % |",
        ),
        ({**READ, "load direct": {"seconds": 0.58, "gb_per_s": 27.48}}, "| load direct | 0.58 | 27.5 |"),
        ({**READ, "serve direct, first start (cold)": {"ready_s": 13.23}}, "| serve direct, first start | 13.2 | – |"),
        ({**READ, "index": {"seconds": 2.0}}, "20 tensors compared on the device, direct beside packed: 1 differ."),
        ({**FAULTS, "failed": 1}, "**95 answers identical to the calm run, 0 different, 1 failed, 0 leaks.**"),
        (FAULTS, "| kill engine | 13.1 | 13.1 | 80.9 | 80.9 | 1 |"),
        (FAULTS, "KV transfers that a D acknowledged: 4 over ipc."),
        (
            {
                "files": {
                    "a.py": {"passed": 3, "failed": 0, "skipped": 1},
                    "b.py": {"passed": 2, "failed": 1, "skipped": 0},
                }
            },
            "| all | 5 | 1 | 1 |",
        ),
    ],
)
def test_a_result_of_one_gpu_is_shown_by_what_it_holds(tmp_path: Path, result: dict[str, Any], line: str) -> None:
    shown = one_gpu(tmp_path / "h200", **result)
    assert line in shown
    assert "`h200/result.json` · device a GPU · commit 0123abc" in shown


def test_a_file_that_no_reader_knows_is_left_out(tmp_path: Path) -> None:
    assert one_gpu(tmp_path / "h200", seconds=3) == "No GPU results are committed."
