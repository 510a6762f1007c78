"""From op records to launches: each op of a program becomes one function of a step, residual additions fused into the norms.

A linear that accumulates leaves its product in a buffer of its own; the norm (or row selection) that reads the residual stream
next adds it, one rounding either way. Ranges of ops may be cut anywhere, since every op keeps its own launches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from relay.errors import CorruptModelError
from relay.kernels.cuda import attention_decode, attention_prefill
from relay.kernels.cuda.elementwise import embed, select_rows, silu_mul
from relay.kernels.cuda.linear_choice import LinearLayer
from relay.kernels.cuda.linear_int8 import linear_int8
from relay.kernels.cuda.norm import add_bias, add_residual, rms_norm
from relay.kernels.cuda.rank_meetings import AreaPlan, Links, gather_ranks, sum_ranks
from relay.kernels.cuda.rope import rope_write_kv
from relay.kernels.cuda.step import Step
from relay.kernels.program import (
    Attend,
    Buffer,
    Embed,
    Geometry,
    HeadNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeWriteKv,
    SelectRows,
    SiluMul,
)
from relay.kernels.ranks.split import Gather, Meeting, Sum

Launch = Callable[[Step], None]
SAMPLED = (Buffer.S, Buffer.L)  # a row for each draw, not for each token


@dataclass(slots=True)
class Device:
    """What launches read and write besides the step: weights, buffers, cache, slots. Buffers may grow between steps."""

    name: str
    matrices: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # 16-bit [n, k], or packed int8 where there are scales
    scales: dict[str, torch.Tensor] = field(default_factory=dict)  # fp32 [n] of the int8 ones
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)  # fp32
    layers: dict[tuple[int, int], LinearLayer] = field(default_factory=dict)  # by (outputs, depth)
    buffers: dict[Buffer, torch.Tensor] = field(default_factory=dict)  # bf16 [capacity, width]
    product: torch.Tensor | None = None  # bf16 [capacity, hidden]; product of a linear that accumulates
    kv: torch.Tensor | None = None  # [layers, 2, blocks, kv_heads, block_size, dim]
    last_tokens: torch.Tensor | None = None  # int32 [slots + 1]
    scratch: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # decode partials by splits
    max_decodes: int = 256
    links: Links | None = None  # to the other ranks of this worker
    areas: AreaPlan | None = None
    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # K and V of each layer

    def make_buffers(self, geometry: Geometry, rows: int, sampled: int, dtype: torch.dtype) -> None:
        """For steps of at most ``rows`` tokens, ``sampled`` of which are drawn from. One row more, for attention's padding."""
        for layer in self.layers.values():
            layer.forget()
        for buffer in Buffer:
            height = sampled if buffer in SAMPLED else rows + 1
            self.buffers[buffer] = torch.zeros(height, geometry.width(buffer), dtype=dtype, device=self.name)
        self.product = torch.zeros(rows + 1, geometry.hidden, dtype=dtype, device=self.name)

    def use_cache(self, kv: torch.Tensor | None) -> None:
        self.kv = kv
        self.caches = [] if kv is None else [(layer[0], layer[1]) for layer in kv]

    def decode_scratch(self, heads: int, dim: int, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Partials for the most decode entries a step may have; one pair for each number of splits, so that graphs may keep it."""
        if splits not in self.scratch:
            self.scratch[splits] = attention_decode.decode_scratch(self.max_decodes, heads, dim, splits, self.name)
        return self.scratch[splits]


def compile_ops(program: Program, device: Device, meetings: Mapping[int, Meeting] | None = None) -> list[Launch]:
    """One launch function an op, with the meetings that follow it. Raises CorruptModelError for an order of ops that this backend
    does not know."""
    met = meetings or {}
    return [
        _meeting(program.ops[index], index, met[index], device) if index in met else _compile(program, index, device)
        for index in range(len(program.ops))
    ]


def _meeting(op: Op, index: int, meeting: Meeting, device: Device) -> Launch:
    """A linear into our area, then the ranks' sum into the residual stream, or their columns into the logits."""
    if not isinstance(op, Linear) or op.bias is not None:
        raise CorruptModelError("ranks meet after linears without a bias of their own")
    firsts = None
    if isinstance(meeting, Gather):
        edges = [first for first, _ in meeting.parts] + [meeting.parts[-1][1]]
        firsts = torch.tensor(edges, dtype=torch.int64, device=device.name)

    def launch(step: Step) -> None:
        assert device.links is not None
        assert device.areas is not None
        rows = _rows(step, Buffer.L if isinstance(meeting, Gather) else Buffer.X)
        area, start = device.links.areas[device.links.rank], device.areas.starts[index]
        height, outputs = device.buffers[Buffer.L if isinstance(meeting, Gather) else Buffer.X].shape
        height -= isinstance(meeting, Sum)  # attention's padding meets nobody
        if isinstance(meeting, Gather):
            first, last = meeting.parts[device.links.rank]
            outputs = last - first
        _product(op, device, area[start : start + height * outputs].view(height, outputs), rows)
        if isinstance(meeting, Gather):
            if rows == 0:  # nothing is sampled, on any rank: there is nobody to meet
                return
            gather_ranks(device.links, _view(step, device, Buffer.L), start, firsts)
        else:
            bias = None if meeting.bias is None else device.vectors[meeting.bias]
            sum_ranks(device.links, _view(step, device, Buffer.X), start, bias)

    return launch


def _compile(program: Program, index: int, device: Device) -> Launch:
    op = program.ops[index]
    before: Op | None = program.ops[index - 1] if index else None
    after: Op | None = program.ops[index + 1] if index + 1 < len(program.ops) else None
    match op:
        case Embed(weight, dst):
            return lambda step: embed(
                device.matrices[weight],
                step.token_ids,
                step.token_slots,
                _last(device),
                _view(step, device, dst),
            )
        case RmsNorm(src, dst, weight, eps):
            pending = src is Buffer.X and _accumulates(before)
            return lambda step: rms_norm(
                _view(step, device, src),
                device.vectors[weight],
                _view(step, device, dst),
                eps,
                residual=device.product if pending else None,
            )
        case Linear():
            return _linear(op, after, device)
        case HeadNorm():
            if not isinstance(after, RopeWriteKv):
                raise CorruptModelError("a head norm must stand right before the rotary embedding it is fused with")
            return lambda step: None
        case RopeWriteKv(layer):
            return _rope(program, layer, before, device)
        case Attend(layer, scale):
            return _attend(program, layer, scale, device)
        case SiluMul():
            return lambda step: silu_mul(_view(step, device, Buffer.G), _view(step, device, Buffer.U))
        case SelectRows(src, dst):
            pending = src is Buffer.X and _accumulates(before)
            return lambda step: select_rows(
                device.buffers[src],
                step.sampled_tokens,
                _view(step, device, dst),
                device.product if pending else None,
            )


def _product(op: Linear, device: Device, target: torch.Tensor, rows: int) -> None:
    """target[:rows] of a linear without what its record says besides; what follows in ``target`` may be overwritten."""
    x, w, scales = device.buffers[op.src], device.matrices[op.weight], device.scales.get(op.weight)
    if scales is None:
        device.layers[w.shape[0], w.shape[1]](x, w, target, rows)
    elif rows:
        linear_int8(x[:rows], w, scales, target[:rows])


def _linear(op: Linear, after: Op | None, device: Device) -> Launch:
    fused = op.accumulate and isinstance(after, RmsNorm | SelectRows) and after.src is op.dst
    if op.accumulate and op.dst is not Buffer.X:
        raise CorruptModelError(f"a linear accumulates into {op.dst}, not the residual stream")

    def launch(step: Step) -> None:
        rows = _rows(step, op.dst)
        target = device.product if op.accumulate else device.buffers[op.dst]
        assert target is not None
        _product(op, device, target, rows)
        if op.bias is not None:
            add_bias(target[:rows], device.vectors[op.bias])
        if op.accumulate and not fused:
            add_residual(device.buffers[op.dst][:rows], target[:rows])

    return launch


def _rope(program: Program, layer: int, before: Op | None, device: Device) -> Launch:
    heads = program.geometry.num_heads

    def launch(step: Step) -> None:
        k_cache, v_cache = device.caches[layer]
        norm = None
        if isinstance(before, HeadNorm):
            norm = (device.vectors[before.q_weight], device.vectors[before.k_weight], before.eps)
        rope_write_kv(
            _view(step, device, Buffer.QKV),
            step.positions,
            step.token_rows,
            step.block_tables,
            device.vectors["rope.cos"],
            device.vectors["rope.sin"],
            k_cache,
            v_cache,
            heads,
            norm=norm,
        )

    return launch


def _attend(program: Program, layer: int, scale: float, device: Device) -> Launch:
    heads, dim = program.geometry.num_heads, program.geometry.head_dim

    def launch(step: Step) -> None:
        k_cache, v_cache = device.caches[layer]
        qkv, out = device.buffers[Buffer.QKV], device.buffers[Buffer.A]
        if len(step.decode_tokens):
            attention_decode.decode_attention(
                qkv,
                k_cache,
                v_cache,
                step.block_tables,
                step.positions,
                step.decode_tokens,
                step.decode_rows,
                device.decode_scratch(heads, dim, step.splits) if step.splits > 1 else device.decode_scratch(1, dim, 1),
                out,
                scale,
                step.splits,
            )
        if len(step.work):
            attention_prefill.prefill(qkv, k_cache, v_cache, step.block_tables, step.work, out, scale, step.keys)

    return launch


def _accumulates(op: Op | None) -> bool:
    return isinstance(op, Linear) and op.accumulate


def _rows(step: Step, buffer: Buffer) -> int:
    return step.sampled if buffer in SAMPLED else step.rows


def _view(step: Step, device: Device, buffer: Buffer) -> torch.Tensor:
    """The rows of ``buffer`` that the step has."""
    view = step.views.get(buffer)
    if view is None:
        view = step.views[buffer] = device.buffers[buffer][: _rows(step, buffer)]
    return view


def _last(device: Device) -> torch.Tensor:
    assert device.last_tokens is not None
    return device.last_tokens
