"""The kernel that moves KV frames, compiled for GPUs that are not here: wide accesses, nothing spilled."""

import importlib.util
import re

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import triton

from relay.kernels.cuda.kv_move import FIELDS, TOKENS, Plan, move_kernel
from relay.kernels.kv_frames import KvRange
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


def test_a_plan_holds_each_block_table_once_and_no_frame_reads_another_s() -> None:
    tables = [np.array([3, 1, 4, 1, 5], np.int64), np.array([9, 2, 6, 5, 3], np.int32)]
    asked = [(0, 0, 40), (1, 0, 40), (0, 16, 24), (0, 0, 40)]  # table, first, count
    ranges = [KvRange(layer, 1, first, count, tables[table]) for layer, (table, first, count) in enumerate(asked)]
    plan = Plan(ranges, [0] * len(ranges), 16, 2)
    words = plan.words[plan.start :]
    for number, (table, first, count) in enumerate(asked):
        at = words[number * FIELDS + 1]
        blocks = tables[table][first // 16 : (first + count - 1) // 16 + 1]
        assert words[at : at + len(blocks)].tolist() == blocks.tolist(), number
    assert len(words) == len(ranges) * FIELDS + 3 + 3 + 2
