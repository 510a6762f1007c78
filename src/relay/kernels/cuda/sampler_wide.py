"""Draws of steps in which some row has penalties, biases or masked ids: the definition in fp64 from the start.

Raw logits are widened and adjusted into a row of fp64 each (penalties, then bias, then mask, as ``relay.kernels.sampler``
does), and everything after works on those. Limits are found by building the boundary bit by bit: an fp64 number has an
order-preserving 64-bit key, and the count or the integer weight of all keys from a candidate on says whether a bit stays. No
sort, no atomics; sums are of integers.
"""

import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import INTERPRETED, launch_options, pdl_enabled, pdl_start
from relay.kernels.cuda.sampler import CHUNK, SamplerScratch, gumbel_noise
from relay.kernels.cuda.sampler_limits import weight_of
from relay.kernels.cuda.sampler_tables import SamplerTables

_STRIDE = 1024  # with 16 warps nothing spills
_LIST = 256  # entries of a bias list at a time
LOWEST_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def key_of_double(x):
    """Signed 64-bit key of fp64 numbers that orders as they do, both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def adjust_kernel(
    logits, wide, slots, penalised, repetitions, frequencies, presences, counts, vocab,
    CHUNK: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """wide[row] = fp64 of the logits with penalties applied."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = v < vocab
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    x = tl.load(logits + row * vocab + v, mask=inside, other=0.0).to(tl.float64)
    if COUNTS:
        if tl.load(penalised + slot) != 0:
            count = tl.load(counts + slot * vocab + v, mask=inside, other=0)
            generated = (count & 0x3FFFFFFF).to(tl.float64)
            repetition = tl.load(repetitions + slot)
            value = tl.where(x > 0.0, x / repetition, x * repetition)
            value = value - tl.load(frequencies + slot) * generated
            value = tl.where(generated > 0.0, value - tl.load(presences + slot), value)
            x = tl.where(count != 0, value, x)
    tl.store(wide + row * vocab + v, x, mask=inside)


@triton.jit(do_not_specialize=["width"])
def list_kernel(
    wide, slots, positions, tokens, num_biases, num_masked, masked_before, list_ids, list_values, width, vocab,
    MASK: tl.constexpr, LIST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the biases of a row, or (MASK) forbid its masked ids while their time has not come. Ids of a list are distinct."""
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(num_biases + slot)
    count = first
    if MASK:
        count = tl.load(num_masked + slot)
        drawn_at = tl.load(positions + tl.load(tokens + row).to(tl.int64)) + 1
        count = tl.where(drawn_at < tl.load(masked_before + slot), count, 0)
    for start in range(0, count, LIST):
        e = start + tl.arange(0, LIST)
        inside = e < count
        at = slot * width + e
        if MASK:
            at += first
        token = tl.load(list_ids + at, mask=inside, other=-1)
        inside = inside & (token >= 0) & (token < vocab)
        place = wide + row * vocab + token
        if MASK:
            tl.store(place, tl.full([LIST], float("-inf"), tl.float64), mask=inside)
        else:
            value = tl.load(place, mask=inside, other=0.0) + tl.load(list_values + at, mask=inside, other=0.0)
            tl.store(place, value, mask=inside)


@triton.jit
def wide_top_kernel(wide, tops, ids, flags, slots, temperatures, vocab, CHUNKS, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Largest adjusted logit of a chunk and its lowest id; flag 4: one overflowed. Then the row is divided by its temperature."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    pdl_start(PDL)
    x = tl.load(wide + row * vocab + v, mask=v < vocab, other=float("-inf"))
    bad = tl.max((~(x < float("inf"))).to(tl.int32), 0)
    top = tl.max(tl.where(x < float("inf"), x, float("-inf")), 0)
    at = row * CHUNKS + chunk
    tl.store(tops + at, top)
    tl.store(ids + at, tl.min(tl.where(x == top, v, vocab), 0))
    tl.store(flags + at, tl.load(flags + at) | (bad * 4))
    temperature = tl.load(temperatures + tl.load(slots + row).to(tl.int64))
    if temperature >= 1e-5:
        tl.store(wide + row * vocab + v, x / temperature, mask=v < vocab)


@triton.jit
def _measure(wide, row, candidate, floor, top, vocab, WEIGH: tl.constexpr, STRIDE: tl.constexpr):
    """How many tokens that min-p leaves have a key of at least ``candidate``, or (WEIGH) their integer weight together."""
    total = tl.zeros([STRIDE], tl.int64)
    for start in range(0, vocab, STRIDE):
        v = start + tl.arange(0, STRIDE)
        x = tl.load(wide + row * vocab + v, mask=v < vocab, other=float("-inf"))
        kept = (x >= floor) & (x > float("-inf")) & (key_of_double(x) >= candidate)
        if WEIGH:
            total += tl.where(kept, weight_of(tl.where(kept, x - top, 0.0)), 0)
        else:
            total += kept.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _boundary(wide, row, wanted, floor, top, vocab, WEIGH: tl.constexpr, STRIDE: tl.constexpr):
    """The largest key from which on the measure reaches ``wanted``; the lowest key where nothing does."""
    low = tl.full([], LOWEST_KEY, tl.int64)
    if _measure(wide, row, tl.zeros([], tl.int64), floor, top, vocab, WEIGH, STRIDE) >= wanted:
        low = tl.zeros([], tl.int64)
    step = tl.full([], 1 << 62, tl.int64)
    for _ in range(63):
        if _measure(wide, row, low + step, floor, top, vocab, WEIGH, STRIDE) >= wanted:
            low += step
        step = step >> 1
    return low


@triton.jit
def wide_limit_kernel(
    wide, tops, slots, temperatures, log_min_ps, top_ks, top_ps, limits, vocab, CHUNKS,
    COUNT: tl.constexpr, STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """limits[row] = (key, highest id among tokens of that key), int64; (lowest key, vocab) where the row has no limit."""
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot).to(tl.int64)
    top_p = tl.load(top_ps + slot)
    tl.store(limits + row * 2, tl.full([], LOWEST_KEY, tl.int64))
    tl.store(limits + row * 2 + 1, tl.zeros([], tl.int64) + vocab)
    if (temperature >= 1e-5) & ((top_k > 0) | (top_p < 1.0)):
        c = tl.arange(0, COUNT)
        top = tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0) / temperature
        floor = top + tl.load(log_min_ps + slot)
        key = tl.full([], LOWEST_KEY, tl.int64)
        left = _measure(wide, row, key, floor, top, vocab, False, STRIDE)
        admitted = left
        limited = (top_k > 0) & (top_k < left)
        if limited:
            key = _boundary(wide, row, top_k, floor, top, vocab, False, STRIDE)
            admitted = top_k - _measure(wide, row, key + 1, floor, top, vocab, False, STRIDE)
        if top_p < 1.0:
            total = tl.zeros([], tl.int64)
            if limited:
                above = _measure(wide, row, key + 1, floor, top, vocab, True, STRIDE)
                here = _measure(wide, row, key, floor, top, vocab, True, STRIDE) - above
                equals = _measure(wide, row, key, floor, top, vocab, False, STRIDE) - (top_k - admitted)
                total = above + here // tl.maximum(equals, 1) * admitted
            else:
                total = _measure(wide, row, key, floor, top, vocab, True, STRIDE)
            wished = top_p * total.to(tl.float64)
            needed = wished.to(tl.int64)
            needed = tl.where(needed.to(tl.float64) < wished, needed + 1, needed)
            needed = tl.minimum(tl.maximum(needed, 1), total)
            key = _boundary(wide, row, needed, floor, top, vocab, True, STRIDE)
            above = _measure(wide, row, key + 1, floor, top, vocab, True, STRIDE)
            here = _measure(wide, row, key, floor, top, vocab, True, STRIDE) - above
            greater = _measure(wide, row, key + 1, floor, top, vocab, False, STRIDE)
            equals = _measure(wide, row, key, floor, top, vocab, False, STRIDE) - greater
            weight = tl.maximum(here // tl.maximum(equals, 1), 1)
            admitted = (needed - above + weight - 1) // weight
        if limited | (top_p < 1.0):
            tl.store(limits + row * 2, key)
            met = tl.zeros([], tl.int64)
            for start in range(0, vocab, STRIDE):
                v = start + tl.arange(0, STRIDE)
                x = tl.load(wide + row * vocab + v, mask=v < vocab, other=float("-inf"))
                equal = ((x >= floor) & (x > float("-inf")) & (key_of_double(x) == key)).to(tl.int64)
                rank = met + tl.cumsum(equal, 0)
                cut = tl.max(tl.where((equal > 0) & (rank == admitted), v, -1), 0)
                if cut >= 0:
                    tl.store(limits + row * 2 + 1, cut.to(tl.int64))
                met += tl.sum(equal, 0)


@triton.jit
def wide_noise_kernel(
    wide, tops, scores, score_ids, positions, tokens, slots, temperatures, log_min_ps, seeds, choices, limits,
    vocab, CHUNKS, CHUNK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Best scaled value + noise of a chunk and its lowest id; nothing for greedy rows."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    if temperature >= 1e-5:
        c = tl.arange(0, COUNT)
        top = tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
        floor = top / temperature + tl.load(log_min_ps + slot)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        scaled = tl.load(wide + row * vocab + v, mask=v < vocab, other=float("-inf"))
        noise = gumbel_noise(v, positions, tokens, choices, seeds, row, slot)
        key = key_of_double(scaled)
        lowest = tl.load(limits + row * 2)
        keep = (scaled >= floor) & (scaled > float("-inf")) & (v < vocab)
        keep = keep & ((key > lowest) | ((key == lowest) & (v <= tl.load(limits + row * 2 + 1))))
        score = tl.where(keep, scaled + noise, float("-inf"))
        best = tl.max(score, 0)
        tl.store(scores + row * CHUNKS + chunk, best)
        tl.store(score_ids + row * CHUNKS + chunk, tl.min(tl.where(keep & (score == best), v, vocab), 0))


@triton.jit
def count_drawn_kernel(
    drawn, slots, positions, tokens, penalised, counted, counts, vocab, SEEN: tl.constexpr, PDL: tl.constexpr
):
    """Count the row's token, once: a step that runs again draws the same token at the same position."""
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    drawn_at = tl.load(positions + tl.load(tokens + row).to(tl.int64)) + 1
    fresh = (tl.load(penalised + slot) != 0) & (tl.load(drawn + row * 2 + 1) == 0)
    if fresh & (tl.load(counted + slot) == drawn_at):
        place = counts + slot * vocab + tl.load(drawn + row * 2)
        tl.store(place, (tl.load(place) | SEEN) + 1)
        tl.store(counted + slot, drawn_at + 1)


class WideScratch:
    """fp64 rows, made for the most rows that were ever adjusted at once."""

    def __init__(self, rows: int, vocab: int, chunks: int, device: str) -> None:
        self.rows = rows
        self.logits = torch.empty(rows, vocab, dtype=torch.float64, device=device)
        self.tops = torch.empty(rows, chunks, dtype=torch.float64, device=device)
        self.ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
        self.limits = torch.zeros(rows, 2, dtype=torch.int64, device=device)


def adjust_rows(
    logits: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    tables: SamplerTables,
    scratch: SamplerScratch,
    wide: WideScratch,
    limits: bool,
) -> None:
    """From raw logits (whose flags are in ``scratch`` already) to scores by chunk; ``limits``: some row has top-k or top-p."""
    rows, vocab = logits.shape
    pdl = pdl_enabled()
    options = launch_options(pdl)
    chunks, count = scratch.chunks, triton.next_power_of_2(scratch.chunks)
    grid = (rows, chunks)
    counts = tables.counts if tables.counts is not None else tables.penalised
    adjust_kernel[grid](
        logits, wide.logits, slots, tables.penalised, tables.repetitions, tables.frequencies, tables.presences, counts,
        vocab, CHUNK=CHUNK, COUNTS=tables.counts is not None, PDL=pdl, **options,
    )  # fmt: skip
    width = tables.list_ids.shape[1]
    for mask in (False, True) if width else ():
        list_kernel[(rows,)](
            wide.logits, slots, positions, tokens, tables.num_biases, tables.num_masked, tables.masked_before,
            tables.list_ids, tables.list_values, width, vocab, MASK=mask, LIST=_LIST, PDL=pdl, **options,
        )  # fmt: skip
    wide_top_kernel[grid](
        wide.logits, wide.tops, wide.ids, scratch.flags, slots, tables.temperatures, vocab, chunks,
        CHUNK=CHUNK, PDL=pdl, **options,
    )  # fmt: skip
    if limits:
        wide_limit_kernel[(rows,)](
            wide.logits, wide.tops, slots, tables.temperatures, tables.log_min_ps, tables.top_ks, tables.top_ps,
            wide.limits, vocab, chunks, COUNT=count, STRIDE=_STRIDE, PDL=pdl,
            **({} if INTERPRETED else {"num_warps": 16}), **options,
        )  # fmt: skip
    else:
        wide.limits[:rows, 0].fill_(LOWEST_KEY.value)
        wide.limits[:rows, 1].fill_(vocab)
    wide_noise_kernel[grid](
        wide.logits, wide.tops, scratch.scores, scratch.score_ids, positions, tokens, slots, tables.temperatures,
        tables.log_min_ps, tables.seeds, tables.choices, wide.limits, vocab, chunks,
        CHUNK=CHUNK, COUNT=count, PDL=pdl, **options,
    )  # fmt: skip
