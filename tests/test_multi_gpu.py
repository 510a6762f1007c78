"""The two-GPU benchmark: its arithmetic, and the whole script on CPUs with a tiny model."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.gpu_serve import Stream
from benchmarks.multi_gpu import CPUS, GPUS, Run, compared, without_nan
from benchmarks.multi_gpu_load import Load, Planned, figures, is_good, plan

ROOT = Path(__file__).parent.parent
LOAD = Load(vocab=1000)


def test_arrivals_are_the_same_for_every_shape() -> None:
    first, second = plan(LOAD), plan(LOAD)
    assert first == second
    assert {one.kind for one in first} == {"chat", "document"}
    assert first == sorted(first, key=lambda one: one.at)
    assert 80 < sum(one.kind == "chat" for one in first) < 145  # 8 a second for 14 seconds
    assert {len(one.prompt) for one in first} == {256, 4096}
    assert len(plan(LOAD.times(2.0))) > 1.5 * len(first)


def stream(ttft: float, gaps: list[float]) -> Stream:
    times = [10.0 + ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Stream(started=10.0, times=times, tokens=list(range(len(times))))


def test_a_request_is_good_within_both_limits() -> None:
    assert is_good(LOAD, stream(0.4, [0.01] * 9))
    assert not is_good(LOAD, stream(0.6, [0.01] * 9))
    assert not is_good(LOAD, stream(0.4, [0.01] * 8 + [0.03]))
    assert is_good(LOAD, stream(0.4, []))


def test_figures_by_kind() -> None:
    done = [
        (Planned(0, "chat", [1], 3), stream(0.1, [0.01, 0.02])),
        (Planned(0, "document", [1], 3), stream(0.9, [0.04, 0.04])),
        (Planned(0, "chat", [1], 3), Stream(started=10.0, error="503")),
    ]
    row = figures(LOAD, done, took=2.0)
    assert (row["chat"]["requests"], row["document"]["requests"], row["requests"]) == (1, 1, 3)
    assert row["chat"]["ttft_ms"]["p50"] == 100.0
    assert row["itl_ms"]["max"] == 40.0
    assert (row["good_requests"], row["goodput_per_s"], row["output_tokens_per_s"]) == (1, 0.5, 3.0)
    assert row["errors"] == ["503"]
    assert row["digest"] == ""  # a missing answer equals nothing


def test_a_part_that_fails_or_finds_no_time_is_recorded_and_the_rest_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run = Run(out, limit_s=100)
    assert run.part("good", 0, lambda: 7) == 7
    assert run.part("bad", 0, lambda: 1 // 0) is None
    assert run.part("long", 1000, lambda: 8) is None
    found = json.loads(out.read_text())
    assert found["parts"] == {"good": 7}
    assert "ZeroDivisionError" in found["problems"]["bad"]
    assert found["problems"]["long"].startswith("skipped: ")
    assert "not run" in found["vllm"]["note"]


def test_the_file_is_json_although_some_percentiles_are_of_nothing(tmp_path: Path) -> None:
    assert without_nan({"a": [1.0, float("nan")], "b": "nan", "c": (float("inf"), 2)}) == {
        "a": [1.0, None],
        "b": "nan",
        "c": [None, 2],
    }
    run = Run(tmp_path / "out.json", limit_s=100)
    run.part("empty", 0, lambda: {"p50": float("nan")})
    assert '"p50": null' in (tmp_path / "out.json").read_text()


def test_ratios_need_both_sides() -> None:
    row = {"itl_ms": {"p99": 6.0}, "ttft_ms": {"p50": 100.0}, "goodput_per_s": 3.0, "output_tokens_per_s": 90.0}
    split, colocated = {**row, "digest": "a"}, {**row, "itl_ms": {"p99": 30.0}, "goodput_per_s": 2.0, "digest": "a"}
    parts = {"split": {"load x 1": split}, "colocated": {"load x 1": colocated}, "ranks": None}
    assert compared(parts, (1.0, 2.0)) == {
        "split over colocated, load x 1": {
            "itl_p99": 5.0,
            "goodput": 1.5,
            "ttft_p50": 1.0,
            "output_tokens_per_s": 1.0,
            "same_tokens": True,
        }
    }


def test_every_shape_uses_both_devices() -> None:
    for name in ("split", "split-other", "colocated", "ranks"):
        flags = " ".join(GPUS.shape(name))
        assert "cuda:0" in flags
        assert "cuda:1" in flags
        assert "cuda" not in " ".join(CPUS.shape(name))
    assert replace(GPUS, devices=("cuda:4", "cuda:7")).shape("split")[-1] == "cuda:7"


@pytest.mark.slow
def test_the_whole_script_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.multi_gpu", "--cpu", "--tiny", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}, check=True, timeout=280)
    found = json.loads(out.read_text())
    assert found["problems"] == {}
    for part in ("kv", "kv-other"):
        assert all(row["kv_bytes_equal"] for row in found["parts"][part].values())
    assert found["compared"]["split over colocated, load x 1"]["same_tokens"]
    assert found["parts"]["ranks"]["load x 1"]["errors"] == []
    exact = found["parts"]["exact-ranks"]
    assert exact["identical"] == exact["compared"] > 0
    assert found["parts"]["kill"]["different_outputs"] == found["parts"]["kill-replica"]["different_outputs"] == 0
