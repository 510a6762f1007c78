"""Compile the kernels for GPUs that are not here: tensor-core instructions present, nothing spilled, shared memory in limits."""

import importlib.util
import re

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

from relay.kernels.cuda import (
    attention_hopper,
    linear_choice,
    linear_int8,
    logprobs,
    sampler,
    sampler_limits,
    sampler_wide,
)
from relay.kernels.cuda.int8_product import Int8Tile
from relay.kernels.cuda.launch import HOPPER_SHARED
from relay.kernels.cuda.linear import LinearTile
from tests.cuda.compile_kernels import ATTENTION, compile_int8, compile_linear
from tests.cuda.compile_only import SHARED_LIMIT, Compiled, compile_for

TILES = sorted(
    {
        tile
        for shape in ((6144, 4096), (4096, 4096), (4096, 14336), (960, 576))
        for tile in linear_choice.tiles_for(*shape, HOPPER_SHARED).values()
    },
    key=str,
)


@pytest.mark.parametrize(
    "tile", [*TILES, linear_choice.tall_tile(HOPPER_SHARED)], ids=lambda tile: str(tile)[10:].replace(" ", "")
)
def test_linear_on_hopper(tile: LinearTile) -> None:
    made = compile_linear(tile, 90)
    assert made.spills == 0
    assert made.shared <= SHARED_LIMIT[90]
    wide = tile.outputs >= 64 if tile.swap else tile.tokens >= 64
    assert made.counts.get("HGMMA" if wide else "HMMA", 0) > 0
    assert (made.counts.get("UTMALDG", 0) > 0) == tile.tma
    assert made.operand_widths <= {2}
    assert made.counts.get("FFMA", 0) == made.counts.get("FADD", 0) == 0, "a sum outside the tensor cores"


INT8 = sorted(
    {linear_int8.tile_on_hopper(rows, outputs) for rows in (8, 16, 32, 64, 129) for outputs in (4096, 28672)}, key=str
)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tile", INT8, ids=lambda tile: str(tile)[9:-1].replace(" ", ""))
def test_int8_linear_on_hopper(tile: Int8Tile, dtype: str) -> None:
    made = compile_int8(tile, 90, dtype)
    check_int8(made, 90)
    steps = tile.depth // 16
    assert made.counts.get("HGMMA", 0) == (steps if tile.hopper else 0)
    assert made.counts.get("HMMA", 0) == (0 if tile.hopper else steps * tile.tokens // 8)
    assert (made.counts.get("UTMALDG", 0) > 0) == tile.hopper
    assert "ld.shared.v4" in made.ptx
    assert "st.shared" not in made.ptx, "codes change threads on their way"


@pytest.mark.parametrize("capability", [80, 89, 120])
@pytest.mark.parametrize(
    ("rows", "even", "dtype"), [(1, True, "bf16"), (16, False, "bf16"), (32, True, "fp16"), (64, True, "bf16")]
)
def test_int8_linear_elsewhere(rows: int, even: bool, dtype: str, capability: int) -> None:
    made = compile_int8(linear_int8.tile_elsewhere(rows), capability, dtype, even)
    check_int8(made, capability)
    assert "st.shared" not in made.ptx


def check_int8(made: Compiled, capability: int) -> None:
    assert made.spills == 0
    assert made.shared <= SHARED_LIMIT[capability]
    assert made.counts.get("HMMA", 0) + made.counts.get("HGMMA", 0) > 0
    assert made.operand_widths <= {2}
    assert made.counts.get("I2F", 0) == 0
    assert made.counts.get("FFMA", 0) == made.counts.get("FADD", 0) == 0, "a sum outside the tensor cores"


@pytest.mark.parametrize(
    ("dtype", "dim", "shared_out"), [("bf16", 128, True), ("fp16", 128, False), ("fp16", 64, True)]
)
def test_hopper_prefill_overlaps_softmax_with_products(dtype: str, dim: int, shared_out: bool) -> None:
    layout = attention_hopper.shared_layout()
    descriptor = f"tensordesc<{dtype}[64, {dim}],{layout!r}>"
    types = {name: kind.replace("*bf16", f"*{dtype}") for name, kind in ATTENTION.items()}
    types |= {"k_desc": descriptor, "v_desc": descriptor, "items": "i32"}
    constants = {"GROUP": 4, "KV_HEADS": 8, "DIM": dim, "BLOCK": 64, "RING": attention_hopper.STAGES, "SHARED": layout}
    constants["SHARED_OUT"] = shared_out
    made = compile_for(attention_hopper.hopper_kernel, types, constants, 90, num_warps=4, enable_fp_fusion=False)
    assert made.shared <= SHARED_LIMIT[90]
    assert made.spills <= 16  # a few at entry, none in a loop
    assert made.counts.get("UTMALDG", 0) > 0
    kinds = set(re.findall(r"wgmma\.mma_async\.\S+k16\.(\S+)", made.ptx))
    assert kinds == {{"bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[dtype]}
    # between the products of a step and the wait for them stand the exponentials of the next tile (32 a thread, and the factors)
    assert max(made.exponentials_before_waits) >= 30


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_sampler_divides_and_never_contracts(capability: int) -> None:
    types = {
        "logits": "*bf16",
        "tops": "*fp32",
        "scores": "*fp64",
        "score_ids": "*i32",
        "positions": "*i32",
        "tokens": "*i32",
    }
    types |= {"slots": "*i32", "temperatures": "*fp64", "log_min_ps": "*fp64", "seeds": "*i32", "choices": "*i32"}
    types |= {"vocab": "i32", "CHUNKS": "i32", "limits": "*i32", "counts": "*i32", "top_ks": "*i32", "top_ps": "*fp64"}
    constants: dict[str, int] = {"CHUNK": sampler.CHUNK, "COUNT": 64, "LIMITS": True, "PDL": capability >= 90}
    made = compile_for(sampler.noise_kernel, types, constants, capability, num_warps=4, enable_fp_fusion=False)
    assert "fma.rn.f64" not in made.ptx
    assert "div.rn.f64" in made.ptx
    assert made.shared <= SHARED_LIMIT[capability]
    constants = {"STRIDE": sampler_limits._STRIDE, "COUNT": 64, "PDL": capability >= 90}
    made = compile_for(sampler_limits.limit_kernel, types, constants, capability, num_warps=16, enable_fp_fusion=False)
    assert "fma.rn.f64" not in made.ptx
    assert made.spills == 0
    assert made.shared <= SHARED_LIMIT[capability]


WIDE = {
    "logits": "*bf16", "wide": "*fp64", "tops": "*fp64", "ids": "*i32", "flags": "*i32", "scores": "*fp64", "score_ids": "*i32",
    "positions": "*i32", "tokens": "*i32", "slots": "*i32", "temperatures": "*fp64", "log_min_ps": "*fp64", "seeds": "*i32",
    "choices": "*i32", "limits": "*i64", "counts": "*i32", "top_ks": "*i32", "top_ps": "*fp64", "penalised": "*i32",
    "repetitions": "*fp64", "frequencies": "*fp64", "presences": "*fp64", "vocab": "i32", "CHUNKS": "i32", "drawn": "*i32",
    "num_logprobs": "*i32", "masses": "*i64", "details": "*i32", "most": "i32", "width": "i32",
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_adjusted_draws_never_contract(capability: int) -> None:
    pdl = capability >= 90
    options = {"enable_fp_fusion": False}
    chunk = {"CHUNK": sampler.CHUNK, "PDL": pdl}
    for kernel, constants, warps in (
        (sampler_wide.adjust_kernel, {**chunk, "COUNTS": True}, 4),
        (sampler_wide.wide_top_kernel, chunk, 4),
        (sampler_wide.wide_limit_kernel, {"COUNT": 64, "STRIDE": sampler_wide._STRIDE, "PDL": pdl}, 16),
        (sampler_wide.wide_noise_kernel, {**chunk, "COUNT": 64}, 4),
        (logprobs.mass_kernel, {**chunk, "COUNT": 64}, 4),
        (logprobs.best_kernel, {**chunk, "COUNT": 64, "HEAD": logprobs.HEAD}, 4),
    ):
        types = {**WIDE, "tops": "*fp32"} if kernel in (logprobs.mass_kernel, logprobs.best_kernel) else WIDE
        made = compile_for(kernel, types, constants, capability, num_warps=warps, **options)
        assert "fma.rn.f64" not in made.ptx, kernel
        # sm_120: ptxas holds 16 warps to 40 registers there
        assert made.spills <= (10 if (kernel, capability) == (sampler_wide.wide_limit_kernel, 120) else 0), kernel
        assert made.shared <= SHARED_LIMIT[capability], kernel
