"""The meetings of ranks on GPUs, as far as no GPU is needed: compiled for Hopper, and run by the interpreter in processes."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

from relay.kernels.cuda import rank_meetings
from relay.kernels.program import Geometry, Program
from relay.kernels.ranks.split import split_program
from tests.cuda.compile_only import compile_for

ROOT = Path(__file__).parent.parent.parent
POINTERS = {f"a{i}": "*bf16" for i in range(8)} | {f"f{i}": "*i32" for i in range(8)} | {"state": "*i32"}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kernel", ["sum_kernel", "gather_kernel"])
def test_flags_are_released_and_acquired_across_the_system(ranks: int, kernel: str) -> None:
    types = {"x": "*bf16", "bias": "*fp32", "whole": "*bf16", "firsts": "*i64", "count": "i32", "start": "i64"}
    constants = {"RANK": 1, "RANKS": ranks, "BLOCK": rank_meetings.BLOCK, "PDL": True}
    if kernel == "sum_kernel":
        constants |= {"WIDTH": 4096, "BIAS": True}
    made = compile_for(
        getattr(rank_meetings, kernel),
        {**types, **POINTERS, "stride": "i32"},
        constants,
        90,
        num_warps=4,
        enable_fp_fusion=False,
    )
    assert made.spills == 0
    assert made.ptx.count("atom.global.sys.release.exch.b32") == ranks - 1
    assert waits_in_loops(made.ptx) == ranks - 1
    assert "ld.global.cg.b16" in made.ptx  # areas of peers, past the first-level cache
    assert made.counts.get("FFMA", 0) == 0


def waits_in_loops(ptx: str) -> int:
    """Acquiring loads between a label and a branch back to it."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0].strip(): at for at, line in enumerate(lines) if re.match(r"\$L\w+:", line.strip())}
    loops = [
        (labels[target], at)
        for at, line in enumerate(lines)
        for target in re.findall(r"bra[.\w]*\s+(\$L\w+);", line)
        if labels.get(target, at) < at
    ]
    loads = [at for at, line in enumerate(lines) if "ld.global.sys.acquire.b32" in line]
    return sum(any(first < load < last for first, last in loops) for load in loads)


def test_no_two_meetings_in_a_row_share_a_place() -> None:
    from tests.kernels.tiny_programs import build_program

    for layers in (1, 2, 3):
        whole = build_program(Geometry(layers, 64, 96, 4, 2, 32, 150, 400))
        part = split_program(whole, 2, 1)
        plan = rank_meetings.plan_areas(part, 16, 8)
        order = [plan.starts[index] for index in sorted(part.meetings)]
        around = [*order, order[0]]  # the next step begins where this one ended
        assert all(a != b for a, b in itertools.pairwise(around))
        assert max(order) + 8 * 86 <= plan.elements
        sums = [start for start in order if start != max(order)]
        assert sums[-1] != sums[0], "only the logits lie between these two"
    odd = Program(whole.ops, whole.geometry)
    assert len(split_program(odd, 2, 0).meetings) == 7


@pytest.mark.skipif(
    tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4),
    reason="Triton 3.6's interpreter needs numpy < 2.4",
)
@pytest.mark.parametrize("what", ["2", "4", "worker", "worker int8", "ipc", "shm"])
def test_processes_meet(what: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.interpreted_ranks", *what.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
