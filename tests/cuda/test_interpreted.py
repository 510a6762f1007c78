"""Kernels under Triton's interpreter, each check in a process of its own: the interpreter is chosen when Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)
if tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
    pytest.skip("Triton 3.6's interpreter needs numpy < 2.4", allow_module_level=True)


@pytest.mark.parametrize(
    "check",
    [
        "linear",
        "int8",
        "attention",
        "first_of_block",
        "overflow",
        "softmax",
        "rows",
        "sampler",
        "limits",
        "warm",
        "definition",
        "kv_copy",
        "program",
        "backend",
        "padded",
        "float16",
        "quantized",
        "transfer",
        "threads",
        "baseline",
    ],
)
def test_interpreted(check: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.interpreted", check],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
