"""README.md and docs/benchmarks.md hold exactly what ``python -m benchmarks.tables`` writes from the committed results."""

import json
from pathlib import Path

import pytest
from benchmarks import goals, tables


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


def test_a_missing_result_names_its_command() -> None:
    bodies = tables.sections({})
    for name in ("serve", "kernels", "scheduler", "correctness"):
        assert tables.COMMANDS[name] in bodies[name]
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
