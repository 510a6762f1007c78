"""Products with int8 weights: codes go from shared memory straight into tensor-core operands (Gluon).

Two kernels: one for any GPU (cp.async, mma.sync), the faster one for up to 8 rows of x; one for Hopper (bulk copies, wgmma).

The packed order of ``linear_int8.pack_codes`` is the order of a left operand's registers: a lane reads 16 bytes and holds its
share of 16 outputs by 32 k. Two words become four registers of two 16-bit floats by masks and one fused multiply-add each, exactly:
for bf16 (128 + low seven bits) - (128 or 256 by the top bit), for fp16 (1024 + code + 128) - 1152 (there the top bit is turned).
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relay.kernels.cuda.launch import pdl_enabled
from relay.kernels.cuda.launcher import Launcher, Options, Tiles


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """How the products are laid over programs; changes speed, never a bit."""

    tokens: int  # rows of x per program, from 8
    outputs: int  # rows of w per program: 16 for each warp
    depth: int  # k per step of the pipeline
    stages: int
    hopper: bool = False  # the kernel for Hopper: needs 64 outputs or 128

    @property
    def warps(self) -> int:
        return self.outputs // 16


def _unpack(head: str, word: str, pair: str) -> str:
    """Assembly of two words ($4, $5) into four pairs ($0 to $3): the low bytes of a word's halves, then the high ones."""
    lines = [head]
    for half in (0, 1):
        lines.append(f"mov.b32 v, ${4 + half};" + word)
        lines.append(pair.replace("OUT", f"${2 * half}"))
        lines.append("shr.u32 v, v, 8;" + pair.replace("OUT", f"${2 * half + 1}"))
    return "{" + " ".join(lines) + "}"


_BF16: tl.constexpr = tl.constexpr(
    _unpack(
        ".reg .b32 v, a, b, one; mov.b32 one, 0x3F803F80;",
        "",
        "lop3.b32 a, v, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, v, 0x00800080, 0xC300C300, 0xEA; fma.rn.bf16x2 OUT, a, one, b;",
    )
)
_FP16: tl.constexpr = tl.constexpr(
    _unpack(
        ".reg .b32 v, a, one, less; mov.b32 one, 0x3C003C00; mov.b32 less, 0xE480E480;",
        "xor.b32 v, v, 0x80808080;",
        "lop3.b32 a, v, 0x00FF00FF, 0x64006400, 0xEA; fma.rn.f16x2 OUT, a, one, less;",
    )
)
_PAIRS: tl.constexpr = tl.constexpr("=r,=r,=r,=r,r,r")
CHUNK: tl.constexpr = tl.constexpr(64)  # k per load from shared memory


@gluon.jit
def _floats(words, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Packed words [outputs / 16, 4 k] as 16-bit floats [outputs, k] in LAYOUT; no value leaves its thread."""
    TILES: gl.constexpr = words.shape[0]
    STEPS: gl.constexpr = words.shape[1] // 128
    if gl.bfloat16 == TYPE:
        a, b, c, d = gl.inline_asm_elementwise(
            _BF16, _PAIRS, [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            _FP16, _PAIRS, [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2
        )
    joined = gl.join(gl.join(a, b), gl.join(c, d))  # [.., .., row + 8, k + 8]: join puts its new dimension last
    split = gl.reshape(joined, (TILES, STEPS, 8, 4, 2, 2, 2, 2))  # tile, 32 k, row, k pair, 16 k, k, row + 8, k + 8
    ordered = gl.permute(split, (0, 6, 2, 1, 4, 7, 3, 5))
    return gl.convert_layout(gl.reshape(ordered, (TILES * 16, STEPS * 32)), LAYOUT, assert_trivial=True)


@gluon.jit
def _wait_for_predecessor(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _copy_weights(ring, slot, w_at, step, k_words, EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for step ``step`` of the program's weights; what lies past K comes as zeros."""
    WIDTH: gl.constexpr = ring.shape[2]
    if EVEN:
        async_copy.async_copy_global_to_shared(ring.index(slot), w_at + step * WIDTH)
    else:
        word = step * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        mask = gl.expand_dims(word < k_words, 0)
        async_copy.async_copy_global_to_shared(ring.index(slot), w_at + step * WIDTH, mask=mask)


@gluon.jit
def _copy_rows(ring, slot, x_at, step, rows, K, EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for step ``step`` of x; rows that are not there and what lies past K come as zeros."""
    DEPTH: gl.constexpr = ring.shape[2]
    mask = rows
    if not EVEN:
        mask = mask & (step * DEPTH + gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT)) < K)[None, :]
    async_copy.async_copy_global_to_shared(ring.index(slot), x_at + step * DEPTH, mask=mask)


@gluon.jit
def _scale_and_store(acc, scales, y, M, N, y_stride):
    OUTPUTS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    SUMS: gl.constexpr = acc.type.layout
    n = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
    t = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
    s = gl.load(scales + n, mask=n < N, other=0.0)
    out = y + (t.to(gl.int64) * y_stride)[None, :] + n[:, None]
    gl.store(out, (acc * s[:, None]).to(y.dtype.element_ty), mask=(t < M)[None, :] & (n < N)[:, None])


@gluon.jit(do_not_specialize=["M"])
def int8_kernel(
    x, w, scales, y, M, N, K, x_stride, y_stride,
    TOKENS: gl.constexpr, OUTPUTS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[M, N] of x[M, K] (row stride x_stride) and packed w [cdiv(N, 16), cdiv(K, 32) * 128]; weights are the left operand."""
    WARPS: gl.constexpr = gl.num_warps()
    TILES: gl.constexpr = OUTPUTS // 16
    WIDTH: gl.constexpr = DEPTH * 4
    TYPE: gl.constexpr = x.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILES, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    x_ring = gl.allocate_shared_memory(TYPE, [STAGES, TOKENS, DEPTH], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

    k_words = (K + 31) // 32 * 128
    tile = gl.program_id(0) * TILES + gl.arange(0, TILES, gl.SliceLayout(1, WORDS))
    tile = gl.minimum(tile, (N + 15) // 16 - 1).to(gl.int64)
    w_at = w + (tile * k_words)[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, WORDS))[None, :]
    m = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, ROWS))
    x_at = x + (m.to(gl.int64) * x_stride)[:, None] + gl.arange(0, DEPTH, gl.SliceLayout(0, ROWS))[None, :]
    rows = (m < M)[:, None]

    steps = (K + DEPTH - 1) // DEPTH
    for step in gl.static_range(STAGES - 1):  # weights do not come from the kernel before
        if step < steps:
            _copy_weights(w_ring, step, w_at, step, k_words, EVEN, WORDS)
    _wait_for_predecessor(PDL)
    for step in gl.static_range(STAGES - 1):
        if step < steps:
            _copy_rows(x_ring, step, x_at, step, rows, K, EVEN, ROWS)
        async_copy.commit_group()
    acc = gl.zeros([OUTPUTS, TOKENS], gl.float32, SUMS)
    slot = 0
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)
        words = w_ring.index(slot)
        right = x_ring.index(slot).permute((1, 0))
        for part in gl.static_range(DEPTH // CHUNK):
            left = _floats(words.slice(part * CHUNK * 4, CHUNK * 4, 1).load(WORDS), TYPE, LEFT)
            acc = mma_v2(left, right.slice(part * CHUNK, CHUNK, 0).load(RIGHT), acc)
        ahead = step + STAGES - 1
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        if ahead < steps:
            _copy_weights(w_ring, free, w_at, ahead, k_words, EVEN, WORDS)
            _copy_rows(x_ring, free, x_at, ahead, rows, K, EVEN, ROWS)
        async_copy.commit_group()
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    _scale_and_store(acc, scales, y, M, N, y_stride)


@gluon.jit(do_not_specialize=["M"])
def int8_hopper_kernel(
    x, w, scales, y, M, N, K, y_stride,
    TOKENS: gl.constexpr, OUTPUTS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``int8_kernel`` with descriptors x [M, K] and w [cdiv(N, 16), cdiv(K, 32), 128]."""
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = OUTPUTS * DEPTH + TOKENS * DEPTH * 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS // 16, DEPTH // 32, 128], w.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    tile = gl.program_id(0) * (OUTPUTS // 16)
    m = gl.program_id(1) * TOKENS
    steps = (K + DEPTH - 1) // DEPTH
    for step in gl.static_range(STAGES):  # weights do not come from the kernel before
        mbarrier.expect(bars.index(step), BYTES, pred=step < steps)
        tma.async_copy_global_to_shared(
            w, [tile, step * (DEPTH // 32), 0], bars.index(step), w_ring.index(step), pred=step < steps
        )
    _wait_for_predecessor(PDL)
    for step in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [m, step * DEPTH], bars.index(step), x_ring.index(step), pred=step < steps)
    acc = gl.zeros([OUTPUTS, TOKENS], gl.float32, SUMS)
    slot = 0
    phase = 0
    for step in range(steps):
        bar = bars.index(slot)
        mbarrier.wait(bar, phase)
        words = w_ring.index(slot).reshape((OUTPUTS // 16, DEPTH * 4))
        right = x_ring.index(slot).permute((1, 0))
        sums = acc
        for part in gl.static_range(DEPTH // CHUNK):
            left = _floats(words.slice(part * CHUNK * 4, CHUNK * 4, 1).load(WORDS), x.dtype, LEFT)
            sums = warpgroup_mma(left, right.slice(part * CHUNK, CHUNK, 0), sums, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        ahead = step + STAGES
        mbarrier.expect(bar, BYTES, pred=ahead < steps)
        tma.async_copy_global_to_shared(
            w, [tile, ahead * (DEPTH // 32), 0], bar, w_ring.index(slot), pred=ahead < steps
        )
        tma.async_copy_global_to_shared(x, [m, ahead * DEPTH], bar, x_ring.index(slot), pred=ahead < steps)
        last = slot == STAGES - 1
        slot = gl.where(last, 0, slot + 1)
        phase = gl.where(last, phase ^ 1, phase)
    _scale_and_store(acc, scales, y, M, N, y_stride)


_plain, _hopper = Launcher(int8_kernel), Launcher(int8_hopper_kernel)


@cache
def layouts() -> tuple[gl.NVMMASharedLayout, gl.NVMMASharedLayout]:
    """Shared memory of x (128-byte swizzle of 16-bit rows) and of packed words (as they lie)."""
    return (
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3),
    )


def product(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, tile: Int8Tile) -> None:
    """As ``linear_int8.linear_int8``."""
    rows, depth = x.shape
    outputs = scales.shape[0]
    pdl = pdl_enabled()
    grid = (-(-outputs // tile.outputs), -(-rows // tile.tokens), 1)
    sizes = (tile.tokens, tile.outputs, tile.depth, tile.stages)
    options = Options(pdl, tile.warps)
    if tile.hopper:
        x_layout, w_layout = layouts()
        box = (tile.outputs // 16, tile.depth // 32, 128)
        operands = (Tiles(x, (tile.tokens, tile.depth), x_layout), Tiles(w.view(w.shape[0], -1, 128), box, w_layout))
        _hopper(grid, (*operands, scales, y), (rows,), (outputs, depth, y.stride(0), *sizes, pdl), options)
        return
    strides = (outputs, depth, x.stride(0), y.stride(0))
    _plain(grid, (x, w, scales, y), (rows,), (*strides, *sizes, depth % tile.depth == 0, pdl), options)
