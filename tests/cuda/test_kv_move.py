"""The kernel that moves KV frames, compiled for GPUs that are not here: wide accesses, nothing spilled."""

import importlib.util
import re

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import triton

from relay.kernels.cuda.kv_move import TOKENS, move_kernel
from tests.cuda.compile_only import compile_for

TYPES = {"cache": "*i32", "flat": "*i32", "plan": "*i32", "sums": "*i64", "layer_units": "i64", "part_units": "i64"}


@pytest.mark.parametrize(
    ("capability", "heads", "dim", "block"),
    [(80, 8, 128, 64), (89, 8, 128, 64), (90, 8, 128, 64), (120, 8, 128, 64), (90, 3, 64, 16)],
)
@pytest.mark.parametrize("store", [False, True])
def test_frames_move_in_16_bytes_a_thread(capability: int, heads: int, dim: int, block: int, store: bool) -> None:
    words = dim // 2
    constants = {"HEADS": heads, "WORDS": words, "BLOCK": block, "TILE": TOKENS, "STORE": store}
    constants["ROW"] = triton.next_power_of_2(heads * words)
    made = compile_for(move_kernel, TYPES, constants, capability, num_warps=4, enable_fp_fusion=False)
    assert made.spills == made.stack == 0
    assert len(re.findall(r"ld\.global\.v4\.b32", made.ptx)) >= 2
    assert len(re.findall(r"st\.global\.v4\.b32", made.ptx)) >= 2
    assert "atom" in made.ptx or "red" in made.ptx
