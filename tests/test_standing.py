"""What makes figures of a served part void: workers that end, prompts that do not move, victims without their streams."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks.multi_gpu_run import Run
from benchmarks.standing import Void, ended, ending, matters, missed_victim, moved_too_little, standings, unready

LOG = """2026-01-02 03:04:05,385 INFO relay.gateway: starting decode-0 (incarnation 1)
[decode-0.1] 13719 KV blocks; ready in 14.7 s (loading from 0.0 s, compiling from 8.0 s)
2026-01-02 03:04:06,000 INFO relay.api.access: 0168 completions status=200 prompt_tokens=512
[prefill-0.1] KV goes through host memory: no peer
[decode-0.1] CUDA error: an illegal memory access
2026-01-02 03:04:07,000 WARNING relay.gateway: restarting decode-0 (incarnation 2): no step ended for 10 s
[decode-0.2] Traceback (most recent call last):
"""


def status(**workers: tuple[str, int]) -> dict[str, Any]:
    rows = [
        {"id": name.replace("_", "-"), "state": state, "incarnation": count, "last_loss": "hung" if count > 1 else None}
        for name, (state, count) in workers.items()
    ]
    return {"workers": rows}


BEFORE = standings(status(prefill_0=("ready", 1), decode_0=("ready", 1)))


def test_a_worker_that_was_replaced_or_is_not_ready_has_ended() -> None:
    assert ended(BEFORE, BEFORE) == []
    again = standings(status(prefill_0=("ready", 1), decode_0=("ready", 2)))
    lost = standings(status(prefill_0=("ready", 1), decode_0=("lost", 1)))
    gone = standings(status(prefill_0=("ready", 1)))
    for after in (again, lost, gone):
        assert ended(BEFORE, after) == ["decode-0"]
        assert ended(BEFORE, after, but="decode-0") == []
        assert ended(BEFORE, after, but="prefill-0") == ["decode-0"]


def test_who_is_not_ready_is_named_with_the_cause() -> None:
    assert unready(BEFORE) == ""
    found = unready(standings(status(prefill_0=("ready", 1), decode_0=("starting", 2))))
    assert found == "decode-0, incarnation 2, is starting: hung"


def test_the_reason_is_what_the_gateway_knows_and_the_last_lines_of_that_worker() -> None:
    text = ending(["decode-0"], standings(status(prefill_0=("ready", 1), decode_0=("ready", 2))), LOG)
    first, *rest = text.splitlines()
    assert first == "worker decode-0 ended during this part: hung"
    assert [line.partition("] ")[2] or line[-21:] for line in rest] == [
        "CUDA error: an illegal memory access",
        "no step ended for 10 s"[-21:],
        "Traceback (most recent call last):",
    ]


def test_access_lines_and_good_starts_do_not_matter() -> None:
    assert [line.split()[0] for line in matters(LOG)] == ["[prefill-0.1]", "[decode-0.1]", "2026-01-02", "[decode-0.2]"]


def test_a_split_moves_its_prompts_and_a_victim_has_its_streams() -> None:
    assert moved_too_little(120, 120) == moved_too_little(120, 114) == moved_too_little(0, 0) == ""
    assert "only 1 of 120 prompts" in moved_too_little(120, 1)
    assert missed_victim(32, 32) == missed_victim(30, 32) == ""
    assert "64 streams were on the victim when it was killed, 32" in missed_victim(64, 32)
    assert missed_victim(0, 4)


def test_void_figures_are_kept_apart_from_the_parts(tmp_path: Path) -> None:
    run = Run(tmp_path / "out.json", 100, "cpu")

    def measure() -> None:
        raise Void("worker decode-0 ended during this part: hung", {"load x 1": 7})

    assert run.part("split", 0, measure) is None
    assert run.found["parts"] == run.found["made"] == {}
    assert run.found["void"] == {"split": {"load x 1": 7}}
    assert run.found["problems"]["split"].startswith("worker decode-0 ended")
    assert run.failed("split")
    run.part("long", 1000, lambda: 1)
    assert not run.failed("long")
    again = Run(tmp_path / "again.json", 100, "cpu", {**run.found, "commit": "", "date": "", "command": ""})
    assert again.found["void"] == {}
    with pytest.raises(KeyError):
        again.found["parts"]["split"]
