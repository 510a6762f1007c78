"""Compile exactly what a GPU's shared memory makes us choose: it fits there, nothing spills, every product is on tensor cores."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

from relay.kernels.cuda.attention_decode import decode_stages, split_kernel
from relay.kernels.cuda.attention_prefill import prefill_kernel, prefill_tile
from relay.kernels.cuda.linear import LinearTile
from relay.kernels.cuda.linear_choice import tall_tile, tiles_for
from tests.cuda.compile_kernels import ATTENTION, attention_constants, compile_linear
from tests.cuda.compile_only import SHARED_LIMIT, compile_for

ELSEWHERE = (80, 89, 120)
SHAPES = ((6144, 4096), (4096, 4096), (4096, 14336), (960, 576), (49152, 576), (128256, 4096), (5120, 13824))


def chosen_linears() -> list[tuple[int, LinearTile, bool, str]]:
    """Each tile once as (capability, tile, whether it divides K, type); sm_90's are in ``test_compile_only``."""
    found: dict[tuple[int, LinearTile, bool, str], None] = {}
    for capability in ELSEWHERE:
        shared = SHARED_LIMIT[capability]
        for outputs, depth in SHAPES:
            for tile in (*tiles_for(outputs, depth, shared).values(), tall_tile(shared)):
                found[capability, tile, True, "bf16"] = None
        for outputs in (960, 49152):
            tile = tiles_for(outputs, 576, shared)[16]
            found[capability, tile, 576 % tile.depth == 0, "fp16"] = None
    return list(found)


@pytest.mark.parametrize(("capability", "tile", "even", "dtype"), chosen_linears(), ids=str)
def test_linear(capability: int, tile: LinearTile, even: bool, dtype: str) -> None:
    made = compile_linear(tile, capability, dtype, even)
    assert made.spills == 0
    assert made.shared <= SHARED_LIMIT[capability]
    if tile.tokens < 128:
        assert made.shared <= SHARED_LIMIT[capability] // 2, "two programs a multiprocessor"
    assert made.counts.get("HMMA", 0) * tile.warps * 16 * 8 * 16 >= tile.tokens * tile.outputs * tile.depth
    assert made.operand_widths <= {2}
    assert made.counts.get("FFMA", 0) == made.counts.get("FADD", 0) == 0, "a sum outside the tensor cores"


@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), (128, "bf16"), (128, "fp16")])
@pytest.mark.parametrize("programs", [132, 133])
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_decode_attention(capability: int, programs: int, dim: int, dtype: str) -> None:
    stages = decode_stages(programs, dim, SHARED_LIMIT[capability])
    constants = attention_constants(ROWS=16, SPLITS=8, PDL=capability >= 90) | {"DIM": dim}
    types = {name: kind.replace("bf16", dtype) for name, kind in ATTENTION.items()}
    made = compile_for(
        split_kernel, types, constants, capability, num_warps=4, num_stages=stages, enable_fp_fusion=False
    )
    assert made.spills == 0
    assert made.shared <= SHARED_LIMIT[capability]
    # half of them for the scores and half for the values of a tile: nothing is computed twice
    assert made.counts.get("HMMA", 0) == dim // 4


def test_stages_on_hopper_are_those_that_were_measured() -> None:
    for dim in (32, 64, 128, 256):
        assert decode_stages(132, dim, 227 << 10) == 7
        assert decode_stages(133, dim, 227 << 10) == (7 if dim <= 64 else 3)


@pytest.mark.parametrize(("dim", "block", "dtype"), [(64, 64, "bf16"), (128, 64, "fp16"), (128, 16, "bf16")])
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_prefill_attention_without_hopper_features(capability: int, dim: int, block: int, dtype: str) -> None:
    rows, warps = prefill_tile(dim, SHARED_LIMIT[capability])
    constants = attention_constants(ROWS=rows, PDL=capability >= 90) | {"DIM": dim, "BLOCK": block}
    types = {name: kind.replace("bf16", dtype) for name, kind in ATTENTION.items()}
    made = compile_for(
        prefill_kernel, types, constants, capability, num_warps=warps, num_stages=2, enable_fp_fusion=False
    )
    assert made.spills <= 2  # sm_89 with blocks of 16: one word, once
    assert made.shared <= (SHARED_LIMIT[90] // 2 if capability == 90 else SHARED_LIMIT[capability])
    assert made.counts.get("HGMMA" if capability == 90 else "HMMA", 0) > 0
    assert made.operand_widths <= {2}
