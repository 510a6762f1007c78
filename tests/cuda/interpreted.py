"""Checks of the kernels on the CPU through Triton's interpreter, at tiny shapes; ``python -m tests.cuda.interpreted CHECK``.

Needs TRITON_INTERPRET=1 in the environment: the interpreter is chosen at import. ``program`` runs a whole model through the
backend's launches and steps, without its streams and graphs.
"""

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor

from relay.errors import StartupError
from relay.kernels import packing
from relay.kernels.backend import Batch, SampledToken
from relay.kernels.cuda import softmax
from relay.kernels.cuda.attention_decode import decode_attention, decode_scratch, split_count
from relay.kernels.cuda.attention_prefill import prefill_attention, prefill_work
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.baseline import PlainModel, plain_linear
from relay.kernels.cuda.drawing import Mode
from relay.kernels.cuda.elementwise import silu_mul
from relay.kernels.cuda.kv_copy import KvTransfers
from relay.kernels.cuda.kv_move import FIELDS, Plan, move
from relay.kernels.cuda.launch import HOPPER_SHARED
from relay.kernels.cuda.linear import LinearTile, linear
from relay.kernels.cuda.linear_choice import LinearLayer
from relay.kernels.cuda.linear_int8 import linear_int8, pack_codes, quantize, unpack_codes
from relay.kernels.cuda.loading import shapes_of
from relay.kernels.cuda.norm import rms_norm
from relay.kernels.cuda.ops import Device, compile_ops
from relay.kernels.cuda.rope import rope_write_kv
from relay.kernels.cuda.sampler import SamplerScratch, sample_rows
from relay.kernels.cuda.sampler_check import _drawn as drawn_tokens
from relay.kernels.cuda.sampler_check import check_draws
from relay.kernels.cuda.sampler_tables import SamplerTables
from relay.kernels.cuda.step import Step, exact_layout, fill, shape_of
from relay.kernels.kv_frames import KvRange, Span, payload_digest, payload_sum
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from relay.kernels.program import Buffer, Embed, HeadNorm, Linear, RmsNorm
from relay.kernels.reference import quantized
from relay.kernels.reference.backend import ReferenceBackend
from relay.kernels.sampler import SlotState, draw
from relay.kernels.sampler_math import philox_words
from relay.models.config import ModelConfig, RopeConfig
from relay.models.llama import build_program
from relay.protocol.sampling import SamplingParams
from tests.cuda.batches import batch_of
from tests.cuda.padded_steps import check_padded_steps
from tests.cuda.paged_attention import check_tiles

BLOCK = 16
BLOCKS = 40
CAPACITY = 32


class Interpreted:
    """The probe's program with its weights in bf16."""

    def __init__(self) -> None:
        self.program = probe_program()
        weights = ProbeWeights()
        device = self.device = Device("cpu", max_decodes=8)
        for op in self.program.ops:
            names: list[str] = []
            if isinstance(op, Embed | Linear):
                device.matrices[op.weight] = torch.from_numpy(
                    packing.unpack_matrix(weights.matrix(op.weight))
                ).bfloat16()
                if isinstance(op, Linear):
                    n, k = device.matrices[op.weight].shape
                    device.layers[n, k] = LinearLayer(n, k)
                    names = [op.bias] if op.bias else []
            elif isinstance(op, RmsNorm):
                names = [op.weight]
            elif isinstance(op, HeadNorm):
                names = [op.q_weight, op.k_weight]
            for name in names:
                device.vectors[name] = torch.from_numpy(weights.vector(name))
        for name in ("rope.cos", "rope.sin"):
            device.vectors[name] = torch.from_numpy(weights.vector(name).copy())
        for buffer in Buffer:
            width = GEOMETRY.width(buffer)
            device.buffers[buffer] = torch.full((CAPACITY, width), float("nan"), dtype=torch.bfloat16)
        device.product = torch.full((CAPACITY, GEOMETRY.hidden), float("nan"), dtype=torch.bfloat16)
        shape = (GEOMETRY.num_layers, 2, BLOCKS, GEOMETRY.num_kv_heads, BLOCK, GEOMETRY.head_dim)
        device.use_cache(torch.full(shape, float("nan"), dtype=torch.bfloat16))
        self.tables = SamplerTables(9, "cpu")
        device.last_tokens = self.tables.last_tokens
        self.launches = compile_ops(self.program, device)

    def run(self, batch: Batch) -> Step:
        """All ops on one batch."""
        shape = shape_of(batch, GEOMETRY.num_heads // GEOMETRY.num_kv_heads, 64)
        layout = exact_layout(batch, shape)
        packed = np.zeros(layout.words, np.int32)
        fill(layout, packed, batch, shape, 8)
        step = layout.views(torch.from_numpy(packed))
        for launch in self.launches:
            launch(step)
        return step

    def logits(self, step: Step) -> torch.Tensor:
        return self.device.buffers[Buffer.L][: step.sampled].float().clone()

    def draw(self, step: Step) -> list[int]:
        """Tokens drawn from the step's logits."""
        scratch = SamplerScratch(8, GEOMETRY.vocab, "cpu")
        drawn = torch.zeros(8, 2, dtype=torch.int32)
        logits = self.device.buffers[Buffer.L][: step.sampled]
        sample_rows(logits, step.positions, step.sampled_tokens, step.sampled_slots, self.tables, scratch, drawn, False)
        return drawn[: step.sampled, 0].tolist()


def check_linear() -> None:
    """P1, P2: every way of tiling, and a row alone, give the same accumulator."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 80, generator=generator).bfloat16()
    w = torch.randn(40, 80, generator=generator).bfloat16()
    reference = torch.zeros(5, 40)
    linear(x, w, reference, LinearTile(16, 16, 16))
    assert torch.allclose(reference, x.float() @ w.float().T, atol=1e-4)
    for tile in (LinearTile(16, 32, 64), LinearTile(16, 32, 32, swap=True), LinearTile(32, 16, 32, tma=True)):
        y = torch.zeros(5, 40)
        linear(x, w, y, tile)
        assert torch.equal(y, reference), tile
    alone = torch.zeros(1, 40)
    linear(x[3:4], w, alone, LinearTile(16, 16, 32))
    assert torch.equal(alone[0], reference[3])
    rounded = torch.zeros(5, 40, dtype=torch.bfloat16)
    linear(x, w, rounded, LinearTile(16, 32, 64))
    assert torch.allclose(rounded.float(), reference, rtol=2**-7)  # the interpreter truncates where the device rounds


def check_int8() -> None:
    """The codes are the definition's; the accumulator is the 16-bit kernel's for the same integers, whatever the tile."""
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(5, 208, generator=generator).to(dtype)
        w = torch.randn(40, 208, generator=generator).to(dtype)
        w[3] = 0
        codes, scales = quantize(w)
        want_codes, want_scales = quantized.quantize(w.float().numpy())
        assert np.array_equal(codes.numpy(), want_codes)
        assert np.array_equal(scales.numpy(), want_scales)
        sums = torch.zeros(5, 40)
        linear(x, codes.to(dtype), sums, LinearTile(16, 16, 16))
        want = quantized.scaled(sums.numpy(), want_scales)
        assert np.abs(want - x.float().numpy() @ w.float().numpy().T).max() < 0.5
        packed = pack_codes(codes)
        assert torch.equal(unpack_codes(packed)[:40, :208], codes)
        y = torch.full((5, 40), float("nan"))
        linear_int8(x, packed, scales, y)
        assert np.array_equal(y.numpy(), want)
        alone = torch.zeros(1, 40)
        linear_int8(x[3:4], packed, scales, alone)
        assert np.array_equal(alone.numpy()[0], want[3])


def check_attention() -> None:
    """P3 over the end of the second split: chunks and decode equal the whole, free memory full of NaN; near the exact result."""
    generator = torch.Generator().manual_seed(1)
    group, dim, block, length, start = 2, 16, 16, 1042, 1006
    blocks = -(-length // block) + 2
    nan = float("nan")
    order = torch.randperm(blocks, generator=generator)[: blocks - 2]
    caches = []
    qkv = torch.randn(length, (group + 2) * dim, generator=generator).bfloat16()
    looked_at = [1006, 1022, 1023, 1024, 1025, length - 1]
    for which in range(2):
        cache = torch.full((blocks, 1, block, dim), nan, dtype=torch.bfloat16)
        values = torch.randn(len(order) * block, dim, generator=generator).bfloat16()
        if which == 0:
            values[looked_at] = qkv[looked_at, :dim]  # a query's own key weighs much, so it is missed
        values[length:] = nan
        cache[order, 0] = values.view(-1, block, dim)
        caches.append((cache, values[:length].float()))
    (k_cache, keys), (v_cache, values) = caches
    table = order.to(torch.int32)[None]

    def prefill(first: int, stop: int, rows: int) -> torch.Tensor:
        out = torch.zeros(stop - first, group * dim)
        work = torch.tensor(prefill_work([(0, 0, stop - first, first)], group, rows), dtype=torch.int32)
        prefill_attention(qkv[first:stop], k_cache, v_cache, table, work, out, dim**-0.5, tile_rows=rows)
        return out

    whole = prefill(start, length, 16)
    assert torch.equal(torch.cat([prefill(start, 1025, 32), prefill(1025, length, 16)]), whole), "chunks differ"
    positions = torch.tensor(looked_at, dtype=torch.int32)
    entries = torch.arange(len(positions), dtype=torch.int32)
    splits = split_count(length)
    out = torch.zeros(len(positions), group * dim)
    decode_attention(
        qkv[positions.long()],
        k_cache,
        v_cache,
        table,
        positions,
        entries,
        torch.zeros_like(entries),
        decode_scratch(len(positions), group, dim, splits, "cpu"),
        out,
        dim**-0.5,
        splits,
    )
    assert torch.equal(out, whole[positions.long() - start]), "decode differs"
    for position in looked_at:
        q = qkv[position, : group * dim].float().view(group, dim)
        weights = (q @ keys[: position + 1].T * dim**-0.5).softmax(-1)
        assert torch.allclose((weights @ values[: position + 1]).view(-1), whole[position - start], atol=4e-3)


def check_first_of_block() -> None:
    """The last key that a decode or a program of a prompt sees is the first of a block, tile or split; every tile of a prompt."""
    check_tiles(16, (16, 64, 128, 512), torch.bfloat16, "cpu")
    for dim in (64, 128):
        check_tiles(dim, (64,), torch.float16, "cpu")


@triton.jit
def _lanes_kernel(p, sums, totals, ROWS: tl.constexpr):
    r = tl.arange(0, ROWS)
    lanes = softmax.lane_sums(tl.load(p + r[:, None] * 64 + tl.arange(0, 64)[None, :]), ROWS)
    tl.store(sums + r[:, None] * 4 + tl.arange(0, 4)[None, :], lanes)
    tl.store(totals + r, softmax.lane_total(lanes, ROWS))


def check_softmax() -> None:
    """The canon's order of a row's sum, written out in numpy: other checks compare kernels that share it. (Of the fold nothing is
    seen here: the interpreter rounds both products of a fused multiply-add.)"""
    p = torch.rand(16, 64, generator=torch.Generator().manual_seed(8))
    sums, totals = torch.zeros(16, 4), torch.zeros(16)
    _lanes_kernel[(1,)](p, sums, totals, ROWS=16)
    pairs = p.numpy().reshape(16, 8, 4, 2)
    g = [pairs[:, group, :, 0] + pairs[:, group, :, 1] for group in range(8)]
    lanes = ((g[0] + g[4]) + (g[1] + g[5])) + ((g[2] + g[6]) + (g[3] + g[7]))
    assert np.array_equal(sums.numpy(), lanes)
    assert np.array_equal(totals.numpy(), (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3]))


def check_norm() -> None:
    """The canon's formula in numpy, for rows so small that eps decides, and for none but zeros."""
    width, eps = 80, np.float32(1e-5)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(9)).bfloat16()
    x[1] *= 1e-3
    x[2] = 0
    weight, out = torch.linspace(-1.0, 2.0, width), torch.zeros(4, width)
    rms_norm(x, weight, out, float(eps))
    padded = np.zeros((4, 128), np.float32)
    padded[:, :width] = x.float().numpy()
    total = np.array([(row * row).sum() for row in padded])
    s = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
    assert np.array_equal(out.numpy(), (padded[:, :width] * s[:, None]) * weight.numpy())


def check_silu() -> None:
    """The canon's formula in numpy."""
    gates = torch.cat(
        [torch.randn(600, generator=torch.Generator().manual_seed(10)) * 9, torch.tensor([-200.0, 200.0, 0.0])]
    )
    gate, up = gates.bfloat16(), gates.flip(0).bfloat16()
    out = torch.zeros(1, len(gates))
    silu_mul(torch.cat([gate, up])[None], out)
    g = gate.float().numpy()
    with np.errstate(over="ignore"):
        e = np.exp2(g * np.float32(-1.4426950408889634))
    assert np.array_equal(out.numpy()[0], g / (np.float32(1) + e) * up.float().numpy())


def check_overflow() -> None:
    """A token that left the range of numbers spoils what sees it, never an earlier one, which others may find cached."""
    group, dim, length, spoilt = 2, 16, 70, 40
    table = torch.tensor([[4, 1, 5, 0, 2]], dtype=torch.int32)
    positions = torch.arange(length, dtype=torch.int32)
    cos, sin = torch.ones(length, dim // 2), torch.zeros(length, dim // 2)

    def outputs(qkv: torch.Tensor, block: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = (torch.full((6, 1, block, dim), float("nan"), dtype=qkv.dtype) for _ in range(2))
        rope_write_kv(qkv, positions, torch.zeros_like(positions), table, cos, sin, k_cache, v_cache, group)
        out, alone = (torch.zeros(rows, group * dim, dtype=qkv.dtype) for rows in (length, 2))
        work = torch.tensor(prefill_work([(0, 0, length, 0)], group, 64), dtype=torch.int32)
        prefill_attention(qkv, k_cache, v_cache, table, work, out, dim**-0.5, tile_rows=64)
        scratch = decode_scratch(2, group, dim, 1, "cpu")
        entries, picked = torch.arange(2, dtype=torch.int32), torch.tensor([spoilt - 1, spoilt])
        arguments = (positions[picked], entries, torch.zeros_like(entries), scratch, alone, dim**-0.5, 1)
        decode_attention(qkv[picked], k_cache, v_cache, table, *arguments)
        return out, alone

    generator = torch.Generator().manual_seed(8)
    numbers = torch.randn(length, (group + 2) * dim, generator=generator)
    for dtype in (torch.bfloat16, torch.float16):
        want, want_alone = outputs(numbers.to(dtype))
        for one, other in zip((want, want_alone), outputs(numbers.to(dtype), 64), strict=True):
            assert torch.equal(one, other), "blocks of another size, or the free memory in them, changed a bit"
        for column, bad in (
            (-3, float("inf")),  # v
            (-dim, float("-inf")),
            (-dim - 1, float("inf")),  # k
            (-2 * dim, float("-inf")),
            (slice(None), float("nan")),
        ):
            qkv = numbers.to(dtype)
            qkv[spoilt, column] = bad
            out, alone = outputs(qkv)
            assert torch.equal(out[:spoilt], want[:spoilt]), f"{bad} in column {column} reached earlier tokens"
            assert torch.equal(alone[0], want_alone[0])
            assert out[spoilt:].isnan().all(), f"{bad} in column {column} was not seen by later tokens"
            assert alone[1].isnan().all()


def check_sampler() -> None:
    """The device's draw is the numpy definition's, ties and NaN included."""
    generator = torch.Generator().manual_seed(2)
    rows, vocab = 8, 5000
    logits = (torch.randn(rows, vocab, generator=generator) * 3).bfloat16()
    logits[0, 100] = logits[0, 4000] = 20.0
    tables, scratch = SamplerTables(rows, "cpu"), SamplerScratch(rows, vocab, "cpu")
    want = []
    for row in range(rows):
        params = SamplingParams(
            max_tokens=1,
            temperature=(0.0, 0.7, 1.0, 1.3)[row % 4],
            min_p=(0.0, 0.05)[row // 4],
            seed=0x9123456789ABCDEF * (row + 1) % (1 << 64),
        )
        state = SlotState(params, row, [1] * (row + 3), [])
        tables.set(row, state, vocab)
        want.append(draw(logits[row].float().numpy(), state).token_id)
    tables.flush()
    index = torch.arange(rows, dtype=torch.int32)
    drawn = torch.zeros(rows, 2, dtype=torch.int32)
    sample_rows(logits, index + 2, index, index, tables, scratch, drawn, False)
    assert want[0] == 100, "ties go to the lowest id"
    assert drawn.tolist() == [[token, 0] for token in want]
    logits[1, 7] = float("nan")
    sample_rows(logits, index + 2, index, index, tables, scratch, drawn, False)
    assert drawn[:, 1].tolist() == [0, 1, *[0] * (rows - 2)]
    check_ties(vocab)


def check_ties(vocab: int) -> None:
    """Two ids with one random word: their scores are equal, in one chunk of the vocabulary and in two."""
    kinds = [SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in (3071, 416)]
    states = [SlotState(kind, 0, [1] * 4) for kind in kinds]
    logits = torch.full((2, vocab), float("-inf"), dtype=torch.bfloat16)
    for row, ids in enumerate([[12, 625], [167, 2214]]):
        words = philox_words(np.array(ids), 4, 0, kinds[row].seed)
        assert words[0] == words[1]
        logits[row, ids] = 1.0
        assert draw(logits[row].float().numpy(), states[row]).token_id == ids[0]
    for mode in (Mode(), Mode(limits=True), Mode(wide=True)):
        assert [one.token_id for one in drawn_tokens(logits, states, mode)] == [12, 167], mode


def check_kv_copy() -> None:
    """Frames of several layers, several in a launch, follow their tables both ways, with the digest that numpy gives them."""
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(4, 2, 6, 3, 16, 8, generator=generator).bfloat16()
    table = np.array([4, 1, 5], np.int32)
    ranges = [
        KvRange(1, 2, 11, 21, table), KvRange(0, 1, 0, 5, table[2:]), KvRange(3, 1, 17, 16, table),
        KvRange(3, 1, 11, 6, table),
    ]  # fmt: skip
    sizes = [one.layers * 2 * one.count * 24 * 2 for one in ranges]
    offsets = [64, 192 + sizes[0], 320 + sizes[0] + sizes[1], 448 + sum(sizes[:3])]
    flat = torch.zeros(offsets[3] + sizes[3], dtype=torch.uint8)
    plan = Plan(ranges, offsets, 16, 3)
    assert len(plan.words) == plan.start + 4 * FIELDS + 2 + 1 + 2, (
        "blocks of the first, which are the last's too, and the others"
    )
    sums = move(kv, flat, plan, torch.from_numpy(plan.words.copy()), store=False)
    for one, offset, size, total in zip(ranges, offsets, sizes, sums.tolist(), strict=True):
        rows = kv[one.layer : one.layer + one.layers, :, torch.from_numpy(one.block_table).long()]
        want = rows.transpose(3, 4).reshape(one.layers, 2, -1, 24)[:, :, one.first : one.first + one.count].contiguous()
        got = flat[offset : offset + size]
        assert torch.equal(got, want.view(torch.uint8).view(-1))
        assert total % 2**64 == payload_sum(got.numpy().tobytes())
    assert not flat[:64].any(), "written outside of the frames"
    other = torch.full_like(kv, float("nan"))
    moved = [replace(one, block_table=np.array([0, 2, 3], np.int32)[: len(one.block_table)]) for one in ranges]
    moved[1] = ranges[1]
    plan = Plan(moved, offsets, 16, 3)
    again = move(other, flat, plan, torch.from_numpy(plan.words.copy()), store=True)
    assert torch.equal(again, sums)
    back = torch.zeros_like(flat)
    move(other, back, plan, torch.from_numpy(plan.words.copy()), store=False)
    assert torch.equal(back, flat)
    written = sum(one.layers * 2 * one.count * 24 for one in ranges)
    assert int(torch.isfinite(other.float()).sum()) == written, "written outside of the blocks"
    check_kv_parts(kv, table)


def check_kv_parts(kv: torch.Tensor, table: np.ndarray) -> None:
    """The same frames when some of the heads lie in another cache, and frames with some of them: each cache is a launch."""
    caches = [(0, kv[:, :, :, :1].contiguous()), (1, kv[:, :, :, 1:].contiguous())]
    other = [(first, torch.full_like(part, float("nan"))) for first, part in caches]
    whole = KvRange(1, 2, 11, 21, table, (0, 3))
    for heads in ((0, 3), (1, 2), (2, 1), (0, 1), (0, 2)):
        one = replace(whole, heads=heads)
        rows = kv[1:3, :, torch.from_numpy(table).long(), heads[0] : sum(heads)]
        want = rows.transpose(3, 4).reshape(2, 2, -1, heads[1] * 8)[:, :, 11:32].contiguous().view(torch.uint8).view(-1)
        flat = torch.zeros(64 + want.numel(), dtype=torch.uint8)
        for places, store in ((caches, False), (other, True)):
            total = 0
            for first, part in places:
                if max(first, heads[0]) < min(first + part.shape[3], sum(heads)):
                    plan = Plan([one], [64], 16, part.shape[3], first)
                    total += move(part, flat, plan, torch.from_numpy(plan.words.copy()), store=store).item()
            assert total % 2**64 == payload_sum(want.numpy().tobytes())
            assert torch.equal(flat[64:], want)
            assert not flat[:64].any(), "written outside of the frame"
        for (first, part), (_, original) in zip(other, caches, strict=True):
            low, high = max(first, heads[0]) - first, min(first + part.shape[3], sum(heads)) - first
            moved = part[:, :, :, max(0, low) : max(0, high)]
            finite = torch.isfinite(part.float())
            assert int(finite.sum()) == 2 * 2 * 21 * 8 * max(0, high - low), "written outside of these heads"
            assert torch.equal(
                moved[torch.isfinite(moved.float())],
                original[:, :, :, max(0, low) : max(0, high)][torch.isfinite(moved.float())],
            )
            part.fill_(float("nan"))


def check_program() -> None:
    """P4 in small: whole, chunked, decoded, beside another."""
    model = Interpreted()
    tokens = [(7 * i) % GEOMETRY.vocab for i in range(20)]
    assert model.device.kv is not None
    whole = model.logits(model.run(batch_of([(tokens, 0, [3, 1], 0)])))
    kv = model.device.kv[:, :, [3, 1]].clone()
    assert torch.isfinite(whole).all()
    for chunk in (7, 19):
        for first in range(0, 20, chunk):
            step = model.run(batch_of([(tokens[first : first + chunk], first, [9, 4], 1)]))
        assert torch.equal(model.logits(step), whole), f"chunks of {chunk} differ"
        assert torch.equal(model.device.kv[:, :, [9, 4], :, :4], kv[:, :, :, :, :4]), f"KV of chunks of {chunk} differs"
    model.run(batch_of([(tokens[:19], 0, [20, 21], 2)]))
    step = model.run(batch_of([(tokens[19:], 19, [20, 21], 2), (tokens[:5], 0, [30], 3)]))
    assert torch.equal(model.logits(step)[:1], whole), "decode beside a prompt differs"
    params = SamplingParams(max_tokens=4, temperature=0.9, min_p=0.01, seed=0x123456789ABCDEF0)
    model.tables.set(2, SlotState(params, 1, [0]), GEOMETRY.vocab)
    model.tables.flush()
    want = draw(model.logits(step)[0].numpy(), SlotState(params, 1, tokens, [])).token_id
    assert model.draw(step)[0] == want, "the model's draw differs"
    assert int(model.tables.last_tokens[2]) == want


class _Waits:
    """Stands for a stream or an event: on the CPU everything has happened already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True


class _Area:
    """Memory of a device that frames lie in."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextmanager
def without_a_device() -> Iterator[None]:
    """torch.cuda as the backend sees it, with streams and events that never wait."""
    stand_ins = {
        "is_available": lambda: True,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "get_device_capability": lambda *_: (8, 0),
        "device_count": lambda: 1,
        "mem_get_info": lambda *_: (1 << 33, 1 << 34),
        "memory_reserved": lambda *_: 1 << 20,
        "empty_cache": lambda: None,
        "stream": lambda *_: nullcontext(),
        "Stream": _Waits,
        "Event": _Waits,
    }
    with (
        mock.patch.multiple(torch.cuda, **stand_ins),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch("relay.kernels.cuda.linear_choice.use_exact_library", return_value=None),
        mock.patch("relay.kernels.cuda.linear_choice.shared_limit", return_value=HOPPER_SHARED),
        mock.patch("relay.kernels.cuda.attention_prefill.shared_limit", return_value=HOPPER_SHARED),
        mock.patch("relay.kernels.cuda.kv_copy.pinned", lambda size: torch.empty(size, dtype=torch.uint8)),
        mock.patch("relay.kernels.cuda.backend.check_draws"),  # has a check of its own
    ):
        yield


def check_backend(dtype: str = "bfloat16", quantized: bool = False) -> None:
    """The backend's own code: loading, steps, draws, transfers; no graphs."""
    with without_a_device():
        backend = CudaBackend("cpu", max_rows=4, max_tokens=32, graphs=False, dtype=dtype, quantized=quantized)
        assert not quantized or not backend._device.layers
        backend.load(probe_program(), ProbeWeights())
        backend.allocate_kv(32, BLOCK, dtype)
        assert backend._device.kv.dtype == backend._device.matrices["embed"].dtype == getattr(torch, dtype)
        assert backend.kv_blocks_that_fit(BLOCK) > 0
        backend.warm_up(64)
        backend.bind_slot(0, SamplingParams(max_tokens=1), 0, [1], [])
        backend.release_slot(0)
        prompt = [(5 * i) % GEOMETRY.vocab for i in range(20)]
        kinds = [
            SamplingParams(max_tokens=9, temperature=0.9, seed=3),
            SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8, seed=4, logprobs=2),
            SamplingParams(max_tokens=9, temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.5, seed=5),
            SamplingParams(max_tokens=9, temperature=0.9, min_tokens=2, eos_token_ids=tuple(range(180)), seed=6),
        ]
        states = [SlotState(kind, 0, prompt) for kind in kinds]
        for slot, kind in enumerate(kinds):
            backend.bind_slot(slot, kind, 0, prompt, [])
        tables = [[7, 2], [11, 9], [12, 13], [14, 15]]
        batch = batch_of([(prompt, 0, table, slot) for slot, table in enumerate(tables)])
        batch.capture_logits = True
        ops = len(probe_program().ops)
        backend.run(0, 9, batch)
        backend.run(9, ops, batch)
        for step in range(4):
            drawn = backend.sample(batch)
            logits = backend.logits()
            want = [draw(logits[slot], state) for slot, state in enumerate(states)]
            assert drawn == want, f"step {step}: {drawn} {want}"
            for state, token in zip(states, want, strict=True):
                state.push(token.token_id)
            batch = batch_of([([-1], 20 + step, table, slot) for slot, table in enumerate(tables)])
            batch.capture_logits = True
            backend.run(0, ops, batch)
        ahead = backend.logits().copy()
        backend.sample(batch)
        assert not np.array_equal(ahead, backend.logits())
        raw = bytearray(21 * backend.kv_bytes_per_token_layer())
        again = bytearray(len(raw))
        for layer in range(GEOMETRY.num_layers):
            backend.read_kv(layer, np.array(tables[0], np.int32), 0, 21, memoryview(raw))
            backend.write_kv(layer, np.array([20, 21], np.int32), 0, 21, memoryview(raw))
            backend.copy_block(21, 22)
            backend.read_kv(layer, np.array([20, 22], np.int32), 0, 21, memoryview(again))
            assert any(raw)
            assert again == raw, f"layer {layer}"
        whole = bytearray(GEOMETRY.num_layers * len(raw))
        staged = bytearray(len(whole))
        here = KvRange(0, GEOMETRY.num_layers, 0, 21, np.array(tables[0], np.int32))
        there = replace(here, block_table=np.array([23, 24], np.int32))
        assert backend.stage([(here, memoryview(whole))]).wait() == [payload_digest(whole)]
        assert whole[-len(raw) :] == raw
        part = replace(there, layer=1, layers=1, first=3, count=2, block_table=np.array([25], np.int32))
        piece = memoryview(whole)[: 2 * backend.kv_bytes_per_token_layer()]
        found = backend.collect([(there, memoryview(whole)), (part, piece)]).wait()
        assert found == [payload_digest(whole), payload_digest(piece)]
        assert backend.stage([(there, memoryview(staged))]).wait() == [payload_digest(whole)]
        assert staged == whole
        area = _Area(torch.zeros(4096 + len(whole), dtype=torch.uint8))
        span = Span(area, 4096, len(whole))
        assert backend.stage([(there, span)]).wait() == [payload_digest(whole)]
        assert area.tensor[4096:].numpy().tobytes() == whole
        moved = replace(there, block_table=np.array([26, 27], np.int32))
        assert backend.collect([(moved, span), (part, piece)]).wait() == [payload_digest(whole), payload_digest(piece)]
        assert backend.stage([(moved, memoryview(staged))]).wait() == [payload_digest(whole)]
        assert all(layer.failed or layer.tested for layer in backend._device.layers.values())
        backend.close()


class OneProcess:
    """Device memory that both ends of a transfer see; handles are numbers."""

    areas: ClassVar[list[_Area]] = []

    def __init__(self, device: str) -> None: ...

    def total_bytes(self) -> int:
        return 1 << 20

    def allocate(self, size: int) -> _Area:
        self.areas.append(_Area(torch.zeros(size, dtype=torch.uint8)))
        return self.areas[-1]

    def handle(self, area: _Area) -> bytes:
        return self.areas.index(area).to_bytes(64, "little")

    def open(self, handle: bytes, size: int) -> _Area:
        area = self.areas[int.from_bytes(handle, "little")]
        assert area.tensor.numel() == size
        return area

    def close(self, area: _Area) -> None: ...


def one_at_a_time(launch: Callable[..., None]) -> Callable[..., None]:
    """The interpreter puts its own functions into triton.language while a kernel runs."""
    lock = threading.Lock()

    def locked(*arguments: object, **named: object) -> None:
        with lock:
            launch(*arguments, **named)

    return locked


def check_transfer() -> None:
    """The benchmark of transfers, both ends in one process: backends, wires and kernels as they are, KV equal at the end."""
    from benchmarks import gpu_transfer

    from relay.transfer.contract import TransferLimits
    from relay.worker.device import Flow

    config = ModelConfig(
        architecture="llama", vocab=50, hidden=64, intermediate=96, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=32, rms_eps=1e-5, max_positions=64, rope=RopeConfig(theta=1e4), tied_embeddings=False,
    )  # fmt: skip
    minute = 60_000_000_000
    patient = TransferLimits(
        512, 8192, 1 << 16, lease_ns=minute, open_lease_ns=minute, stall_ns=minute, join_bytes=4096
    )
    with ExitStack() as stack:
        stack.enter_context(without_a_device())
        stack.enter_context(mock.patch.multiple(gpu_transfer, LLAMA_8B=config, BLOCK=16, CHUNK=16))
        stack.enter_context(mock.patch("relay.kernels.cuda.ipc.DeviceMemory", OneProcess))
        stack.enter_context(mock.patch.object(gpu_transfer.End, "warm"))
        stack.enter_context(mock.patch.object(KvTransfers, "register"))
        stack.enter_context(mock.patch.object(LinearLayer, "test"))
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", one_at_a_time(GridExecutor.__call__)))
        stack.enter_context(mock.patch("relay.worker.device.flow_of", return_value=Flow(8 << 20, patient)))
        ours, theirs = multiprocessing.Pipe()
        target = threading.Thread(target=gpu_transfer.decode_side, args=(2, 24, "cpu", theirs, True), daemon=True)
        target.start()
        end = gpu_transfer.End("p", 2, 24, "cpu", timeline=True)
        assert ours.recv() == "loaded"
        end.backend.bind_slot(0, SamplingParams(max_tokens=9, temperature=0.0), 0, [1], [])
        for scheme in ("ipc", "shm"):
            found = gpu_transfer.row(end, ours, scheme, 24, 1)
            assert found["kv_equal"]
            assert found["scheme_used"] == scheme
            check_timeline(found["timeline_us"])
        ours.send(None)
        target.join(60)


def check_timeline(rows: list[list[Any]]) -> None:
    """Every step of a frame's way is there, in the order in which it must have happened."""

    def when(end: str, what: str, layers: str, tokens: str) -> float:
        """Of the launch, or the header, of these layers."""
        for us, at, name, detail in rows:
            which, _, others = detail.partition(", tokens ")
            if (at, name, others) == (end, what, tokens) and layers in which.split("layers ")[-1].split(", "):
                return float(us)
        raise AssertionError(f"{end} {what} of layers {layers}, tokens {tokens} is missing")

    frames = [
        detail.removeprefix("KV layers ").split(", tokens ")
        for _, _, what, detail in rows
        if what == "header committed" and detail.startswith("KV")
    ]
    assert frames
    for layers, tokens in frames:
        at_p = [
            when("P", what, layers, tokens)
            for what in ("stage called", "stage returned", "stage: wait returned", "header committed")
        ]
        at_d = [
            when("D", what, layers, tokens)
            for what in ("header read", "collect called", "collect returned", "collect: wait returned")
        ]
        assert at_p == sorted(at_p)
        assert at_d == sorted(at_d)
        assert at_p[2] < at_d[0], "a header leaves behind its payload"
    steps = [tuple(step) for _, *step in rows]
    assert steps.index(("D", "completed", "")) > steps.index(("P", "handoff given", ""))
    for end, what in (("P", "header committed"), ("D", "header read")):
        assert (end, what, "HANDOFF") in steps
    for end, what in (("D", "header committed"), ("P", "header read")):
        assert (end, what, "COMPLETE") in steps


def check_threads() -> None:
    """Whatever a thread does first, it has said before on which device."""
    log: list[tuple[int, str]] = []

    def seen(what: str) -> Callable[..., object]:
        def call(*_: object) -> object:
            log.append((threading.get_ident(), what))
            return nullcontext()

        return call

    def pinned(size: int) -> torch.Tensor:
        seen("pinned memory")()
        return torch.empty(size, dtype=torch.uint8)

    with (
        without_a_device(),
        mock.patch.object(torch.cuda, "set_device", seen("device")),
        mock.patch.object(torch.cuda, "stream", seen("stream")),
        mock.patch("relay.kernels.cuda.kv_copy.pinned", pinned),
        mock.patch.object(LinearLayer, "test"),
    ):
        backend = CudaBackend("cpu", max_rows=4, max_tokens=32, graphs=False)
        backend.load(probe_program(), ProbeWeights())
        backend.allocate_kv(8, 16, "bfloat16")
        batch = batch_of([([1, 2, 3], 0, [3], 0)])
        size = 3 * backend.kv_bytes_per_token_layer()
        backend.bind_slot(0, SamplingParams(max_tokens=9), 0, [1, 2, 3], [])
        table = np.array([3], np.int32)
        for work in (
            lambda: backend.bind_slot(1, SamplingParams(max_tokens=9), 0, [1], []),
            lambda: backend.run(0, len(probe_program().ops), batch),
            lambda: backend.sample(batch),
            lambda: backend.copy_block(3, 4),
            lambda: backend.allocate(64),
            lambda: backend.read_kv(0, table, 0, 3, memoryview(bytearray(size))),
            lambda: backend.write_kv(0, table, 0, 3, memoryview(bytearray(size))),
        ):
            log.clear()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert log
            assert log[0] == (log[0][0], "device"), log
            assert threading.get_ident() not in dict(log)


def check_definition() -> None:
    """The model that kernels compute is numpy's, as near as 16 bits come: a prompt, then tokens that only the device knows."""
    kinds = [SamplingParams(max_tokens=9, temperature=0.9, seed=seed) for seed in range(2)]
    prompts = [[(5 * i + 3 * slot) % GEOMETRY.vocab for i in range(20)] for slot in range(2)]
    ops = len(probe_program().ops)
    with without_a_device():
        backend = CudaBackend("cpu", max_rows=4, max_tokens=64, graphs=False)
        definition = ReferenceBackend()
        for one, dtype in ((backend, "bfloat16"), (definition, "float32")):
            one.load(probe_program(), ProbeWeights())
            one.allocate_kv(32, BLOCK, dtype)
            for slot, kind in enumerate(kinds):
                one.bind_slot(slot, kind, 0, prompts[slot], [])
        tables = [[7, 2], [11, 9]]
        batch = batch_of([(prompts[slot], 0, tables[slot], slot) for slot in range(2)])
        drawn: list[list[int]] = [[], []]
        for step in range(4):
            batch.capture_logits = True
            backend.run(0, ops, batch)
            for slot, token in enumerate(backend.sample(batch)):
                drawn[slot].append(token.token_id)
            known = batch
            if step:
                known = batch_of([([drawn[slot][-2]], 19 + step, tables[slot], slot) for slot in range(2)])
                known.capture_logits = True
            definition.run(0, ops, known)
            definition.sample(known)
            error = np.square(backend.logits() - definition.logits()).mean() ** 0.5 / definition.logits().std()
            assert error < 0.05, f"step {step}: off by {error:.4f} of a logit"
            batch = batch_of([([-1], 20 + step, tables[slot], slot) for slot in range(2)])


def check_warm() -> None:
    """What a request may ask of the sampler is launched by ``warm_up`` already, so nothing is compiled while it waits."""
    launched: set[tuple[object, ...]] = set()
    original = GridExecutor.__call__

    def noting(self: GridExecutor, *values: object, **named: object) -> None:
        """As Triton tells compiled kernels apart: by constants, and by integers that are 1 or multiples of 16."""
        if "sampler" in self.fn.__module__ or "logprobs" in self.fn.__module__:
            numbers = [(v == 1, v % 16 == 0) for v, name in zip(values, self.arg_names, strict=False)
                       if isinstance(v, int) and name not in ("width", "most")]  # fmt: skip
            launched.add((self.fn.__name__, *map(str, numbers), str(sorted(named.items()))))
        original(self, *values, **named)

    kinds = [
        SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8, seed=4),
        SamplingParams(max_tokens=9, temperature=0.9, min_tokens=2, eos_token_ids=(3,), seed=6),
        SamplingParams(max_tokens=9, temperature=0.9, logit_bias=dict.fromkeys(range(20), 1.0), logprobs=1),
        SamplingParams(max_tokens=9, temperature=0.9, repetition_penalty=1.4, top_k=5, logprobs=16),
    ]
    with without_a_device(), mock.patch.object(GridExecutor, "__call__", noting):
        backend = CudaBackend("cpu", max_rows=4, max_tokens=32, graphs=False)
        backend.load(probe_program(), ProbeWeights())
        backend.allocate_kv(32, BLOCK, "bfloat16")
        with mock.patch("relay.kernels.cuda.backend.check_draws", check_draws):
            backend.warm_up(64)
        warm = set(launched)
        assert warm
        for kind in kinds:
            backend.bind_slot(0, kind, 0, [1, 2, 3], [])
            batch = batch_of([([1, 2, 3], 0, [1], 0)])
            backend.run(0, len(probe_program().ops), batch)
            backend.sample(batch)
            assert launched <= warm, f"compiled for {kind}: {launched - warm}"


def check_limits() -> None:
    """top-k, top-p and min-p together, with ties at every limit: the start-up test itself, and its power to fail."""
    check_draws("cpu", rounds=1)
    check_draws("cpu", rounds=2, dtype=torch.float16)
    with mock.patch("relay.kernels.cuda.sampler_check.draw", return_value=SampledToken(1)):
        try:
            check_draws("cpu", rounds=1)
        except StartupError:
            return
    raise AssertionError("a wrong draw passed the start-up test")


def check_baseline() -> None:
    """The plain kernels: a product near torch's, a prompt in one step near the same prompt in two."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (9, 33))
    assert torch.allclose(plain_linear(x, w).float(), x.float() @ w.float().T, rtol=2**-6, atol=2**-6)
    config = ModelConfig(
        architecture="llama", vocab=50, hidden=64, intermediate=96, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=32, rms_eps=1e-5, max_positions=64, rope=RopeConfig(theta=1e4), tied_embeddings=True,
    )  # fmt: skip
    program = build_program(config)
    matrices, vectors = shapes_of(program)
    plain = PlainModel(
        program,
        {n: (torch.randn(*shape, generator=generator) * shape[1] ** -0.5).bfloat16() for n, shape in matrices.items()},
        {n: torch.rand(*shape, generator=generator) for n, shape in vectors.items()},
        1,
        40,
    )
    ids = torch.tensor([[3, 8, 1, 44, 20, 9]])
    whole = plain.step(ids, 0).float()
    plain.step(ids[:, :5], 0)
    assert torch.allclose(plain.step(ids[:, 5:], 5).float(), whole, rtol=2**-4, atol=2**-4)


CHECKS = {
    "baseline": check_baseline,
    "limits": check_limits,
    "warm": check_warm,
    "definition": check_definition,
    "backend": check_backend,
    "padded": check_padded_steps,
    "quantized": lambda: check_backend(quantized=True),
    "transfer": check_transfer,
    "threads": check_threads,
    "float16": lambda: check_backend("float16"),
    "linear": check_linear,
    "int8": check_int8,
    "attention": check_attention,
    "first_of_block": check_first_of_block,
    "overflow": check_overflow,
    "softmax": check_softmax,
    "rows": lambda: (check_norm(), check_silu()),
    "sampler": check_sampler,
    "kv_copy": check_kv_copy,
    "program": check_program,
}

if __name__ == "__main__":
    from tests.cuda import tensor_core_model

    tensor_core_model.install()
    CHECKS[sys.argv[1]]()
