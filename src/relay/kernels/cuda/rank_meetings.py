"""Where ranks on several GPUs meet: one kernel a meeting, which reads what every rank has written into its own device's memory.

A rank's linear writes its partial (or its part of the logits) into an *area* of its own device that all ranks have mapped. The
meeting's kernel says so to every peer by a flag in the peer's memory (release, system scope), waits for theirs in its own
(acquire), and reads all areas in rank order. Sums: fp32 over the tree of neighbours, rounded to bf16 once, then bias, then
residual, as one linear that accumulates would (docs/decisions/0014-several-gpus.md). Only elementwise additions: no tile, grid or
number of rows changes a bit. With float16 every bf16 here is that.

Epochs count meetings; they lie in device memory and advance in the kernel, so a captured graph may be replayed. Areas alternate
by meeting: whoever writes an area again has been told that every peer came to the meeting in between, and so left the one that
read it.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import pdl_enabled, pdl_start
from relay.kernels.cuda.launcher import Launcher, Options
from relay.kernels.ranks.split import Gather, RankProgram, Sum

MAX_RANKS = 8
BLOCK = 1024
STATE_WORDS = 16  # int32: epoch, programs that are through; padded


@dataclass(slots=True)
class Links:
    """``areas[rank]`` (16-bit numbers) and ``flags[rank]`` (int32 [MAX_RANKS]) are on their ranks' devices, ``state`` on ours.

    Flags and state are zero at first.
    """

    rank: int
    ranks: int
    areas: list[torch.Tensor]
    flags: list[torch.Tensor]
    state: torch.Tensor

    everyones: tuple[torch.Tensor, ...] = field(init=False)
    """Areas, then flags, as many as the kernels have arguments; those beyond the ranks are never used."""

    def __post_init__(self) -> None:
        none = MAX_RANKS - self.ranks
        self.everyones = (*self.areas, *self.areas[:1] * none, *self.flags, *self.flags[:1] * none)


@triton.jit
def _arrive(f0, f1, f2, f3, f4, f5, f6, f7, state, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell every peer, wait for every peer; the epoch of this meeting. Differences, because epochs wrap."""
    flags = (f0, f1, f2, f3, f4, f5, f6, f7)
    epoch = tl.load(state) + 1
    if tl.program_id(0) == 0:
        for other in tl.static_range(RANKS):
            if other != RANK:
                tl.atomic_xchg(flags[other] + RANK, epoch, sem="release", scope="sys")
    for other in tl.static_range(RANKS):
        if other != RANK:
            seen = tl.atomic_add(flags[RANK] + other, 0, sem="acquire", scope="sys")
            while seen - epoch < 0:
                seen = tl.atomic_add(flags[RANK] + other, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return epoch


@triton.jit
def _leave(state, epoch):
    """The last program through makes the epoch the past; every other has read it by then."""
    through = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if through == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch)


@triton.jit
def _fold(areas, at, inside, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """fp32 sum of ``COUNT`` areas from ``FIRST``: the largest power of two below COUNT, plus the rest; as level by level."""
    if COUNT == 1:
        v = tl.load(areas[FIRST] + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    else:
        HALF: tl.constexpr = 4 if COUNT > 4 else (2 if COUNT > 2 else 1)
        v = _fold(areas, at, inside, FIRST, HALF) + _fold(areas, at, inside, FIRST + HALF, COUNT - HALF)
    return v


@triton.jit
def sum_kernel(
    x, bias, state,
    a0, a1, a2, a3, a4, a5, a6, a7, f0, f1, f2, f3, f4, f5, f6, f7,
    count, start,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x = bf16(x + bf16(bf16(sum) + bias)) over ``count`` elements; areas hold them from ``start``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    pdl_start(PDL)
    epoch = _arrive(f0, f1, f2, f3, f4, f5, f6, f7, state, RANK, RANKS)
    v = _fold((a0, a1, a2, a3, a4, a5, a6, a7), start + at, inside, 0, RANKS).to(x.dtype.element_ty)
    if BIAS:
        b = tl.load(bias + at % WIDTH, mask=inside, other=0.0)
        v = (v.to(tl.float32) + b).to(x.dtype.element_ty)
    r = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, (r + v.to(tl.float32)).to(x.dtype.element_ty), mask=inside)
    _leave(state, epoch)


@triton.jit
def gather_kernel(
    whole, state,
    a0, a1, a2, a3, a4, a5, a6, a7, f0, f1, f2, f3, f4, f5, f6, f7,
    firsts, count, start, stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of ``stride`` columns from every rank's: rank r has columns firsts[r] to firsts[r + 1], its rows without gaps."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pdl_start(PDL)
    epoch = _arrive(f0, f1, f2, f3, f4, f5, f6, f7, state, RANK, RANKS)
    areas = (a0, a1, a2, a3, a4, a5, a6, a7)
    row, column = at // stride, at % stride
    for other in tl.static_range(RANKS):
        first, last = tl.load(firsts + other), tl.load(firsts + other + 1)
        own = (at < count) & (column >= first) & (column < last)
        place = start + row * (last - first) + column - first
        v = tl.load(areas[other] + place, mask=own, other=0.0, cache_modifier=".cg")
        tl.store(whole + at, v, mask=own)
    _leave(state, epoch)


_sum, _gather = Launcher(sum_kernel), Launcher(gather_kernel)


def sum_ranks(links: Links, x: torch.Tensor, start: int, bias: torch.Tensor | None) -> None:
    """x (bf16 [rows, width], contiguous) takes the ranks' sum; their partials lie from element ``start`` of the areas."""
    count = x.numel()
    pdl = pdl_enabled()
    memory = (x, bias if bias is not None else links.state, links.state, *links.everyones)
    constants = (x.shape[1], bias is not None, links.rank, links.ranks, BLOCK, pdl)
    _sum((-(-count // BLOCK), 1, 1), memory, (count, start), constants, Options(pdl, 4))


def gather_ranks(links: Links, whole: torch.Tensor, start: int, firsts: torch.Tensor) -> None:
    """whole (bf16 [rows, columns], contiguous) takes every rank's columns; ``firsts`` int64 [ranks + 1] on our device."""
    count = whole.numel()
    pdl = pdl_enabled()
    memory = (whole, links.state, *links.everyones, firsts)
    integers = (count, start, whole.shape[1])
    _gather((-(-count // BLOCK), 1, 1), memory, integers, (links.rank, links.ranks, BLOCK, pdl), Options(pdl, 4))


@dataclass(frozen=True, slots=True)
class AreaPlan:
    """Where each meeting's values lie in every rank's area, in elements, by the index of the op before it."""

    starts: dict[int, int]
    elements: int


def plan_areas(part: RankProgram, rows: int, sampled: int) -> AreaPlan:
    """Sums take two places in turn (the last of an odd number a third), the logits one: sums lie between any two of them."""
    hidden = part.program.geometry.hidden
    sums = sorted(index for index, meeting in part.meetings.items() if isinstance(meeting, Sum))
    places = {index: order % 2 for order, index in enumerate(sums)}
    if len(sums) % 2:
        places[sums[-1]] = 2
    logits = [meeting for meeting in part.meetings.values() if isinstance(meeting, Gather)]
    starts = {index: place * rows * hidden for index, place in places.items()}
    end = 3 * rows * hidden
    starts |= {index: end for index, meeting in part.meetings.items() if isinstance(meeting, Gather)}
    widest = max((last - first for meeting in logits for first, last in meeting.parts), default=0)
    return AreaPlan(starts, end + sampled * widest)
