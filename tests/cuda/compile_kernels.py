"""The backend's kernels, compiled as they are launched: types of arguments, constants, options."""

from relay.kernels.cuda import int8_product
from relay.kernels.cuda.int8_product import Int8Tile
from relay.kernels.cuda.linear import LinearTile, linear_kernel
from tests.cuda.compile_only import Compiled, compile_for

LINEAR = {"x": "*bf16", "w": "*bf16", "w_pointer": "*bf16", "y": "*bf16", "M": "i32", "N": "i32", "K": "i32"}
LINEAR |= {"x_stride": "i32", "y_stride": "i32"}
ATTENTION = {
    "qkv": "*bf16",
    "k_cache": "*bf16",
    "v_cache": "*bf16",
    "block_tables": "*i32",
    "work": "*i32",
    "out": "*bf16",
}
ATTENTION |= {"positions": "*i32", "tokens": "*i32", "rows": "*i32", "partial": "*fp32", "stats": "*fp32"}
ATTENTION |= {"table_stride": "i32", "qkv_stride": "i32", "c": "fp32"}


def compile_linear(tile: LinearTile, capability: int, dtype: str = "bf16", even: bool = True) -> Compiled:
    types = {name: kind.replace("bf16", dtype) for name, kind in LINEAR.items()}
    if tile.tma:
        types["x"] = f"tensordesc<{dtype}[{tile.tokens}, {tile.depth}]>"
        types["w"] = f"tensordesc<{dtype}[{tile.outputs}, {tile.depth}]>"
    constants = {
        "TOKENS": tile.tokens,
        "OUTPUTS": tile.outputs,
        "DEPTH": tile.depth,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "TMA": tile.tma,
        "EVEN": even,
        "STAGES": tile.stages,
        "PREFETCH": 0,
        "PDL": capability >= 90,
    }
    return compile_for(linear_kernel, types, constants, capability, num_warps=tile.warps, enable_fp_fusion=False)


def compile_int8(tile: Int8Tile, capability: int, dtype: str, even: bool = True) -> Compiled:
    types = {**LINEAR, "x": f"*{dtype}", "y": f"*{dtype}", "w": "*i32", "scales": "*fp32"}
    constants = {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "DEPTH": tile.depth, "STAGES": tile.stages}
    constants["PDL"] = capability >= 90
    kernel = int8_product.int8_kernel
    if tile.hopper:
        kernel = int8_product.int8_hopper_kernel
        x_layout, w_layout = int8_product.layouts()
        types["x"] = f"tensordesc<{dtype}[{tile.tokens}, {tile.depth}],{x_layout!r}>"
        types["w"] = f"tensordesc<i32[{tile.outputs // 16}, {tile.depth // 32}, 128],{w_layout!r}>"
    else:
        constants["EVEN"] = even
    return compile_for(kernel, types, constants, capability, num_warps=tile.warps, enable_fp_fusion=False)


def attention_constants(**more: int) -> dict[str, int]:
    return {"GROUP": 4, "KV_HEADS": 8, "DIM": 128, "BLOCK": 64, "TILE": 64, "SPLIT": 512, **more}
