"""The two-GPU benchmark: its load, its arithmetic, its parts and files, and the whole script on CPUs with a tiny model."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks import multi_gpu
from benchmarks.gpu_pack import write
from benchmarks.gpu_server import Server, Stream
from benchmarks.multi_gpu import Bench, Part, transferred
from benchmarks.multi_gpu_load import Load, Planned, figures, is_good, plan
from benchmarks.multi_gpu_report import best_budget, compared, same_tokens, shapes
from benchmarks.multi_gpu_run import Run, without_nan
from benchmarks.multi_gpu_setup import CPUS, GPUS, TINY

from relay.control_config import ControlConfig
from relay.models.checked import remember

ROOT = Path(__file__).parent.parent
LOAD = Load(vocab=1000, seconds=14.0, step_ms=10.0)
UNIT = 16  # tokens of a prefix that a cache could find


def test_arrivals_are_the_same_for_every_shape() -> None:
    first, second = plan(LOAD), plan(LOAD)
    assert first == second
    assert {one.kind for one in first} == {"chat", "document"}
    assert first == sorted(first, key=lambda one: one.at)
    assert sum(one.kind == "chat" for one in first) == 8 * 14
    assert sum(one.kind == "document" for one in first) == 3 * 14
    assert {len(one.prompt) for one in first} == {256, 4096}
    assert len(plan(LOAD.times(2.0))) == 2 * len(first)
    waits = [after.at - before.at for before, after in itertools.pairwise(first)]
    assert max(waits) > 4 * sum(waits) / len(waits)  # as far apart as chance has it


def test_no_prompt_begins_like_another_of_the_same_server() -> None:
    load = GPUS.load
    runs = [load.times(0.5, 2.0), *(load.times(factor) for factor in GPUS.factors), load.at_once()]
    heads = [tuple(one.prompt[:UNIT]) for run in runs for one in plan(run)]
    assert len(set(heads)) == len(heads) > 400


def test_a_backlog_is_there_at_once() -> None:
    assert {one.at for one in plan(LOAD.at_once())} == {0.0}
    assert len(plan(LOAD.at_once())) == len(plan(LOAD))


def test_the_loads_keep_one_prefill_worker_as_busy_as_the_docstring_says() -> None:
    calm, busy = (GPUS.load.times(factor).expected() for factor in GPUS.factors)
    assert round(calm["prefill_share"], 2) == 0.41
    assert round(busy["prefill_share"], 2) == 0.75
    assert (round(calm["decode_rows"]), round(busy["decode_rows"])) == (16, 29)
    assert GPUS.load.slo_itl_ms == 2 * GPUS.load.step_ms == 10.9
    assert min(GPUS.load.chat_new, GPUS.load.document_new) > 101  # so that p99 of a request's gaps is not its largest
    assert {256, 512, 1024, 2048} == {*GPUS.budgets, *GPUS.extra_budgets}


def stream(ttft: float, gaps: list[float]) -> Stream:
    times = list(itertools.accumulate(gaps, initial=10.0 + ttft))
    return Stream(started=10.0, times=times, tokens=list(range(len(times))))


def good(answer: Stream, steps: float = 2.0, new: int | None = None) -> bool:
    return is_good(LOAD, Planned(0, "chat", [1], len(answer.tokens) if new is None else new), answer, steps)


def test_a_request_is_good_within_both_limits() -> None:
    assert good(stream(0.4, [0.01] * 9))
    assert not good(stream(0.6, [0.01] * 9))
    assert not good(stream(0.4, [0.01] * 8 + [0.03]))
    assert good(stream(0.4, [0.01] * 8 + [0.03]), steps=3.0)
    assert good(stream(0.4, []))


def test_a_request_starts_with_its_second_token() -> None:
    gaps = [0.15, *[0.01] * 150]  # one gap of 151 is above the 99th percentile
    assert good(stream(0.3, gaps))
    assert not good(stream(0.4, gaps))


def test_a_request_without_all_its_tokens_is_not_good() -> None:
    answer = stream(0.4, [0.01] * 9)
    assert not good(answer, new=11)
    answer.error = "503"
    assert not good(answer)


def test_figures_by_kind() -> None:
    load = replace(LOAD, seconds=2.0)
    answers = [
        (Planned(0, "chat", [1, 2], 3), stream(0.1, [0.01, 0.02])),
        (Planned(0, "document", [1], 3), stream(1.95, [0.04, 0.04])),
        (Planned(0, "chat", [1], 3), Stream(started=10.0, error="503")),
        (Planned(0, "chat", [1], 5), stream(0.1, [0.01])),
    ]
    row = figures(load, answers, begin=10.0, took=4.0)
    assert (row["chat"]["whole"], row["document"]["whole"], row["requests"], row["whole"]) == (1, 1, 4, 2)
    assert row["chat"]["ttft_ms"]["p50"] == 100.0
    assert row["document"]["second_ms"]["p50"] == 40.0
    assert row["itl_ms"]["max"] == 40.0
    assert (row["good_requests"], row["goodput_per_s"]) == (1, 0.5)
    assert row["output_tokens_per_s"] == 3.5  # 3 + 2 + 2 within the two seconds of arrivals, one later
    assert row["good_by_itl_steps"] == {"1.5": 0, "2": 1, "3": 1, "5": 1}
    assert row["errors"] == ["503", "2 of 5 tokens"]
    assert row["digest"] == ""  # a missing answer equals nothing
    assert figures(load, answers[:2], begin=10.0, took=4.0)["digest"]


def test_a_part_that_fails_or_finds_no_time_is_recorded_and_the_rest_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run = Run(out, 100, "cpu")
    assert run.part("good", 0, lambda: 7) == 7
    assert run.part("bad", 0, lambda: 1 // 0) is None
    assert run.part("long", 1000, lambda: 8) is None
    found = json.loads(out.read_text())
    assert found["parts"] == {"good": 7}
    assert set(found["made"]) == {"good"}
    assert "ZeroDivisionError" in found["problems"]["bad"]
    assert found["problems"]["long"].startswith("skipped: ")
    assert "not run" in found["vllm"]["note"]


def test_without_gpus_nothing_is_written_but_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("16 GB of weights for nothing")

    monkeypatch.setattr(multi_gpu, "write", never)
    monkeypatch.setattr(multi_gpu, "gpus", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["multi_gpu", "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="NVML shows 1 GPUs, this needs 2"):
        multi_gpu.main()


def test_a_server_that_is_not_there_is_a_problem_and_no_row_of_zeros(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = Run(tmp_path / "out.json", 100, "cpu")
    bench = multi_gpu.Bench(CPUS, tmp_path / "pack", tmp_path, run)
    assert run.part("vllm", 0, lambda: bench.external(port, "m")) is None
    assert run.failed("vllm")
    assert "note" in run.found["vllm"]


def test_the_file_is_json_although_some_percentiles_are_of_nothing(tmp_path: Path) -> None:
    assert without_nan({"a": [1.0, float("nan")], "b": "nan", "c": (float("inf"), 2)}) == {
        "a": [1.0, None],
        "b": "nan",
        "c": [None, 2],
    }
    run = Run(tmp_path / "out.json", 100, "cpu")
    run.part("empty", 0, lambda: {"p50": float("nan")})
    assert '"p50": null' in (tmp_path / "out.json").read_text()


EARLIER: dict[str, Any] = {"commit": "0123abc", "date": "2026-01-02", "command": "python -m benchmarks.multi_gpu"}


def test_parts_of_an_earlier_file_stay_with_the_commit_that_made_them(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    parts = {"kv": {"2048": {}}, "exact-ranks": {"identical": 51}, "split": {"load x 1": {}}, "topology": ["two"]}
    first.write_text(json.dumps({**EARLIER, "parts": parts, "part_seconds": {"kv": 72.2}}))
    run = Run(tmp_path / "second.json", 100, "cuda", json.loads(first.read_text()))
    run.part("split", 0, lambda: {"load x 1.2": {}})
    run.part("exact-ranks", 0, lambda: {"identical": 52})
    run.part("kv-other", 0, lambda: 1 // 0)
    found = json.loads((tmp_path / "second.json").read_text())
    assert set(found["parts"]) == {
        "kv",
        "exact-ranks",
        "split",
    }  # NVML is asked anew, and an old split meant something else
    assert found["parts"]["exact-ranks"] == {"identical": 52}
    assert found["made"]["kv"] == {**EARLIER, "seconds": 72.2, "form": 1}
    assert found["made"]["split"]["commit"] == found["commit"]
    third = Run(tmp_path / "third.json", 100, "cuda", found)
    assert third.found["made"]["kv"]["commit"] == "0123abc"
    assert third.found["parts"]["split"] == {"load x 1.2": {}}


def test_parts_of_another_backend_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of cpu, not of cuda"):
        Run(tmp_path / "out.json", 100, "cuda", {**EARLIER, "backend": "cpu", "parts": {}})


def row(p99: float, goodput: float, digest: str = "a") -> dict[str, Any]:
    both = {"p50": 5.0, "p99": p99}
    return {
        "itl_ms": both,
        "ttft_ms": {"p50": 100.0, "p99": 300.0},
        "goodput_per_s": goodput,
        "digest": digest,
        "output_tokens_per_s": 90.0,
        "all_tokens_per_s": 900.0,
    }


def parts() -> dict[str, Any]:
    backlog = {"backlog": row(40.0, 1.0)}
    return {
        "split": {"load x 1.2": row(6.0, 3.0), **backlog},
        "colocated-256": {"load x 1.2": row(12.0, 2.0), "backlog": {**row(40.0, 1.0), "all_tokens_per_s": 1200.0}},
        "colocated-512": {"load x 1.2": row(30.0, 2.5), "load x 2.2": row(40.0, 1.0), **backlog},
        "ranks-512": {"load x 1.2": row(9.0, 3.0, digest="b")},
    }


def test_ratios_are_against_the_best_budget_and_need_both_sides() -> None:
    found = compared(parts())
    assert found["split over colocated, load x 1.2"] == {
        "budget": 512,
        "itl_p99": 5.0,
        "itl_p99_over_least": 2.0,
        "split_goodput_per_s": 3.0,
        "other_goodput_per_s": 2.5,
        "goodput": 1.2,
        "ttft_p50": 1.0,
        "output_tokens_per_s": 1.0,
        "backlog_tokens_per_s": 1.0,
    }
    assert found["split over ranks, load x 1.2"]["backlog_tokens_per_s"] is None
    assert not any("load x 2.2" in name for name in found if name.startswith("split over"))
    assert best_budget(parts(), "colocated", "load x 2.2") == 512
    assert compared({}) == {"same_tokens": {"backlog": {"one rank": None, "two ranks": None}}}


def test_equal_goodput_is_decided_by_gaps() -> None:
    tied = {"colocated-256": {"load x 1": row(9.0, 2.0)}, "colocated-512": {"load x 1": row(8.0, 2.0)}}
    assert best_budget(tied, "colocated", "load x 1") == 512


def test_tokens_are_compared_over_all_shapes_of_one_numerics() -> None:
    found = parts()
    assert same_tokens(found, "load x 1.2") == {"one rank": True, "two ranks": None}
    found["colocated-256"]["load x 1.2"]["digest"] = ""
    assert same_tokens(found, "load x 1.2")["one rank"] is False
    assert list(shapes(found, "load x 1.2")) == [
        "1P + 1D",
        "2 colocated, 512 tokens a step",
        "2 ranks, 512 tokens a step",
    ]


def test_transfers_are_those_between_two_looks() -> None:
    before = {
        "kv_bytes_sent_total": 100.0,
        "kv_transfers_sent_total": 1.0,
        "kv_exposed_us_total": 9e6,
        "hidden_share": 0.0,
    }
    late = {"kv_late_bytes_sent_total": 20.0, "kv_exposed_us_total": 9e6 + 4000}
    found = transferred(before, {"kv_bytes_sent_total": 500.0, "kv_transfers_sent_total": 3.0, **late})
    assert (found["kv_bytes_sent_total"], found["hidden_share"], found["exposed_ms_each"]) == (400.0, 0.95, 2.0)
    assert "hidden_share" not in transferred(before, before)


def test_every_shape_uses_both_devices() -> None:
    for name in ("split", "split-other", "colocated", "ranks"):
        flags = " ".join(GPUS.shape(name))
        assert "cuda:0" in flags
        assert "cuda:1" in flags
        assert "cuda" not in " ".join(CPUS.shape(name))
    assert replace(GPUS, devices=("cuda:4", "cuda:7")).shape("split")[-1] == "cuda:7"


def test_parts_of_a_server_share_its_start_and_the_main_ones_fit_the_time(tmp_path: Path) -> None:
    bench = Bench(GPUS, tmp_path / "pack", tmp_path, Run(tmp_path / "out.json", 450, "cuda"))
    assert bench.named("kill,kv,split,colocated")[:3] == ["kill", "split", "kv"]
    assert [name for name in bench.named("colocated") if name not in bench.parts] == []
    assert len(bench.named("colocated")) == 4
    with pytest.raises(ValueError, match="no part is named colo;"):
        bench.named("colo")
    assert bench.named("main") == bench.named(
        "split,kill,colocated-512,colocated-2048,colocated-1024,kill-replica,ranks-512"
    )
    assert sum(bench.expected_s(bench.named("main")).values()) <= 330
    assert set(bench.named("all")) == set(bench.parts)
    assert bench.expected_s(["split", "kill"])["kill"] < bench.expected_s(["kill"])["kill"]


def test_a_server_that_does_not_start_is_named_by_its_parts_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[str, ...]] = []

    told: list[Path] = []

    @dataclass
    class Fake:
        log: Path

        def tell(self) -> None:
            told.append(self.log)

    @contextlib.contextmanager
    def serving(model: str, *flags: str, log: Path, **rest: Any) -> Iterator[Fake]:
        starts.append(flags)
        if "--tensor-parallel-size" in flags:
            raise RuntimeError("not ready")
        yield Fake(log)

    monkeypatch.setattr("benchmarks.multi_gpu.serving", serving)
    run = Run(tmp_path / "out.json", 100, "cpu")
    bench = Bench(CPUS, tmp_path / "pack", tmp_path, run)
    bench.parts = {
        "ranks-64": Part(0, lambda server, flags: 1, ("ranks",)),
        "split": Part(0, lambda server, flags: list(flags), ("split",)),
        "kv": Part(0, lambda: 3),
        "kill": Part(0, lambda server, flags: 1 // 0, ("split",)),
    }
    bench.measure(bench.named("ranks,split,kv,kill"))
    assert run.found["parts"] == {"split": list(CPUS.shape("split")), "kv": 3}
    assert told == [tmp_path / "split.log"]  # for the kill that failed
    assert run.found["problems"]["ranks-64"] == "not ready"
    assert "ZeroDivisionError" in run.found["problems"]["kill"]
    assert len(starts) == 2


def test_a_worker_that_is_killed_from_outside_makes_the_part_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    victims: list[int] = []

    def drive(server: Server, load: Load) -> Any:
        victims.append(server.worker("decode-0")["pid"])
        killer = threading.Timer(0.3, os.kill, (victims[-1], signal.SIGKILL))
        killer.start()
        return whole_drive(server, load)

    whole_drive = multi_gpu.drive
    monkeypatch.setattr(multi_gpu, "drive", drive)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    pack, cache = tmp_path / "tiny.pack", tmp_path / "cache"
    write(pack, TINY)
    remember(pack, cache)
    setup = replace(CPUS, flags=(*CPUS.flags, "--cache-dir", str(cache)))
    run = Run(tmp_path / "out.json", 100, "cpu")
    Bench(setup, pack, cache, run).measure(["split"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["parts"] == {}
    assert found["problems"]["split"].startswith("worker decode-0 ended during this part: ")
    assert found["void"]["split"]["workers_before"]["decode-0"] == {"state": "ready", "incarnation": 1, "last_loss": ""}
    assert len(victims) == 1  # nothing more is measured of a part that is void
    assert "decode-0" in (tmp_path / "split.log").read_text()
    assert "restarting decode-0 (incarnation 2)" in capfd.readouterr().out


def test_no_prompt_is_so_short_that_a_split_would_not_move_it() -> None:
    for setup in (GPUS, CPUS):
        shortest = min(setup.load.chat_prompt, setup.load.document_prompt, setup.kill_prompt)
        assert shortest >= ControlConfig().short_prompt_tokens


@pytest.mark.slow
def test_the_whole_script_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.multi_gpu", "--cpu", "--tiny", "--parts", "all", "--out", str(out)]
    environment = {"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=280)
    found = json.loads(out.read_text())
    assert found["problems"] == {}
    for part in ("kv", "kv-other"):
        assert all(row["kv_bytes_equal"] for row in found["parts"][part].values())
    assert found["compared"]["same_tokens"]["load x 1"]["one rank"] is True
    assert found["compared"]["same_tokens"]["backlog"]["one rank"] is True
    assert found["parts"]["ranks-64"]["load x 1"]["errors"] == []
    exact = found["parts"]["exact-ranks"]
    assert exact["identical"] == exact["compared"] > 0
    split = found["parts"]["split"]
    for row in (split["load x 1"], split["backlog"]):
        assert row["transfers"]["kv_transfers_sent_total"] == row["requests"]
    assert split["workers_before"].keys() == split["workers_after"].keys() == {"prefill-0", "decode-0"}
    assert found["void"] == {}
    assert (out.with_name("split.log")).stat().st_size > 0
    kill, replica = found["parts"]["kill"], found["parts"]["kill-replica"]
    assert kill["different_outputs"] == replica["different_outputs"] == 0
    for row in (kill, replica):
        assert 0 < row["resumed"] <= CPUS.kill_streams
        assert row["on_victim"] == row["meant_for_victim"] == CPUS.kill_streams
        assert 0 < row["next_token_ms_of_disturbed"]["p50"] <= row["next_token_ms_of_disturbed"]["p99"]
    assert kill["recomputed_tokens"] > 0
    pictures = [sys.executable, "-m", "benchmarks.multi_gpu_charts", str(out), str(tmp_path)]
    subprocess.run(pictures, cwd=ROOT, env=environment, check=True, timeout=60)
    for name in ("multi-gpu-load.svg", "multi-gpu-kv.svg"):
        assert ElementTree.fromstring((tmp_path / name).read_text()).tag.endswith("svg")
