"""README.md and docs/benchmarks.md hold exactly what ``python -m benchmarks.tables`` writes from the committed results."""

import json
from pathlib import Path

import pytest
from benchmarks import goals, pages, tables


def test_the_pages_are_what_the_results_say() -> None:
    stale = [path.name for path, text in tables.pages(tables.load()).items() if path.read_text() != text]
    assert not stale, f"{stale}: run python -m benchmarks.tables"


def copy_of_pages(root: Path) -> None:
    (root / "docs").mkdir()
    for path in tables.pages({}):
        target = root / path.relative_to(tables.ROOT)
        target.write_text(path.read_text())


def serve_result(prompt_tok_s: float) -> dict[str, object]:
    single = {"tpot_ms": 7.0, "ttft_s": 0.6, "output_tok_s": 90.0, "prompt_tok_s": prompt_tok_s}
    medians = {"colocated": dict.fromkeys(("W1", "W2", "W3", "W4"), single)}
    return {
        "command": "python -m benchmarks.serve",
        "commit": "0123abc",
        "machine": {"processor": "a processor", "cores": 2, "memory_gib": 8.0, "isa": "avx2"},
        "versions": {"python": "3.11"},
        "medians": medians,
        "pss_mb": {"colocated": 170.0},
        "ready_s": {"colocated": 0.61},
    }


def test_another_result_makes_both_pages_stale(tmp_path: Path) -> None:
    copy_of_pages(tmp_path)
    before = tables.pages({"serve": serve_result(801.0)}, tmp_path)
    after = tables.pages({"serve": serve_result(802.0)}, tmp_path)
    for name in ("README.md", "docs/benchmarks.md"):
        text = before[tmp_path / name]
        assert "801" in text
        assert text != after[tmp_path / name]


def chaos_result(different: int) -> dict[str, object]:
    waits = {"n": 2, "p50": 640.25, "p99": 911.5}
    cell = {"shape": "1P+2D", "seed": 1, "requests": 20, "identical": 20 - different, "failed": 0, "leaked": 0}
    return {
        "requests": 20,
        "identical": 20 - different,
        "different": different,
        "failed": 0,
        "leaked": 0,
        "faults": {"kill_both": 3},
        "signals": {"SIGKILL": 6},
        "moments": {"kill_both": {"decoding": 4, "streaming": 1}},
        "by_kind": {"kill_both": {"faults": 3, "resume_ms": waits, "detect_ms": waits}},
        "calm": {"resumed_tokens_p50": 170.0, "reprefill_and_step_ms_p50": 212.0},
        "cells": [cell],
        "command": "relay chaos",
        "commit": "0123abc",
        "machine": "a processor, 2 cores",
    }


def test_the_failure_model_shows_what_chaos_reported(tmp_path: Path) -> None:
    copy_of_pages(tmp_path)
    page = tmp_path / "docs" / "failure-model.md"
    text = tables.pages({"chaos": chaos_result(0)}, tmp_path)[page]
    assert "20 answers identical to the calm run, 0 different" in text
    assert "| kill both | 3 | – | – | – | 1 | – | 4 | – | – | – |" in text
    assert "| kill both | 640 | 912 | 640 | 912 | 2 |" in text
    assert text != tables.pages({"chaos": chaos_result(1)}, tmp_path)[page]


def kv_result(*, hidden_share: float, slowdown: float) -> dict[str, object]:
    row = {
        "transport": "shm",
        "kv_cache_dtype": "float32",
        "tokens": 2048,
        "bytes": 94_371_840,
        "prefill_s": 2.5,
        "baseline_exposed_s": 0.0125,
        "exposed_s": 0.0001,
        "exposed_p90_s": 0.0004,
        "noise_s": 0.00002,
        "below_noise": False,
        "hidden_share": hidden_share,
        "prefill_slowdown": slowdown,
        "send_cpu_s": 0.0121,
        "receive_cpu_s": 0.0114,
        "burst_gb_s": 7.25,
        "burst_of_ceiling": 0.84,
    }
    full = {"probes": 60, "refused_full": 12, "parked": 11, "failed_requests": 0}
    full |= {"ttft_p99_full_s": 0.3, "ttft_p99_free_s": 0.25, "ttft_p99_ratio": 1.2}
    return {
        "command": "python -m benchmarks.kv float32",
        "commit": "0123abc",
        "machine": {"processor": "a processor", "cores": 2},
        "rows": [row],
        "ceilings": [
            {"ceiling": "two memcpys", "checksum": checked, "gb_s": 9.5 - checked} for checked in (False, True)
        ],
        "backpressure": full,
    }


def test_kv_transfer_is_shown_with_its_goals_and_pictures(tmp_path: Path) -> None:
    copy_of_pages(tmp_path)
    results = {"kv_float32": kv_result(hidden_share=0.992, slowdown=0.04)}
    text = tables.pages(results, tmp_path)[tmp_path / "docs" / "benchmarks.md"]
    for line in (
        "| hidden, shm, float32 | ≥ 99 % or below noise | 99.2 % met |",
        "| prefill slowed, shm, float32 | ≤ 3 % | +4.0 % **missed** |",
        "| D full: first tokens of others, p99, to D free | ≤ 1.1 | 1.20 **missed** |",
        "| two memcpys | 9.50 | 8.50 |",
        "](images/kv-timeline-shm.svg)",
    ):
        assert line in text
    assert "12.50 | 0.10 | 0.40 | 99.2 % | +4.0 % | 12.1 + 11.4 | 7.25 | 0.84 |" in text
    assert tables.COMMANDS["kv_bfloat16"] in text  # its result is missing


def test_a_missing_result_names_its_command() -> None:
    bodies = tables.sections({})
    for name in ("serve", "kernels", "scheduler", "correctness"):
        assert tables.COMMANDS[name] in bodies[name]
    assert tables.COMMANDS["kv_float32"] in bodies["kv"]
    assert tables.COMMANDS["serve"] in tables.readme_figures({})


def test_goals_say_met_and_missed() -> None:
    rows = tables.goals_table({"serve": serve_result(801.0)}).splitlines()
    assert next(row for row in rows if row.startswith("| prompt tok/s (W1: 512")).count("**missed**") == 1
    assert next(row for row in rows if row.startswith("| TPOT of one stream (W1), ms")).count("met") == 1
    assert any("`gateway.json` is missing" in row for row in rows)


@pytest.mark.parametrize(("measured", "met"), [(0.99, True), (1.0, True), (1.01, False)])
def test_a_goal_of_at_most(measured: float, met: bool) -> None:
    goal = goals.Goal("x", "serve", 1.0, True, lambda result: {})
    assert goal.meets(measured) is met


def test_every_goal_reads_a_known_result() -> None:
    assert {goal.source for goal in goals.GOALS} <= set(tables.COMMANDS)


def test_two_results_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("cpu", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "serve.json").write_text(json.dumps(serve_result(1.0)))
    with pytest.raises(ValueError, match="two results"):
        tables.load(tmp_path)


def test_every_committed_result_is_shown_or_named() -> None:
    shown = [tables.ROOT / "README.md", *(tables.ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in shown)
    files = {path.relative_to(tables.RESULTS) for path in tables.RESULTS.rglob("*") if path.is_file()}
    read = {tables.RESULTS / name for name in files if name.stem in tables.load()} | {pages.FOUND}
    assert {str(name) for name in files if tables.RESULTS / name not in read and name.name not in text} == set()


def test_splice_needs_its_markers_once() -> None:
    assert tables.splice("a\n<b>\nold\n</b>\nz", "<b>", "</b>", "new") == "a\n<b>\nnew\n</b>\nz"
    for text in ("no markers", "<b>\n</b>\n<b>\n</b>"):
        with pytest.raises(ValueError, match="not once"):
            tables.splice(text, "<b>", "</b>", "new")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0.00"),
        (7.2e-6, "7.2e-06"),
        (0.61, "0.61"),
        (6.94, "6.94"),
        (1234.5, "1,234"),
        (12345, "12,345"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert tables.number(value) == text
