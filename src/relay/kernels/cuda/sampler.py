"""Drawing tokens on the device: ``relay.kernels.sampler.draw`` for steps without penalties, bias or mask (``sampler_wide.py`` has
those).

IEEE fp64, each operation rounded by itself (contraction is off), the polynomials of ``sampler_math``. Three kernels: the largest
logit of each chunk of the vocabulary, the best score (value / temperature + Gumbel noise) of each chunk, the choice among chunks.
Largest and lowest-id are order-free, so chunks are no part of the canon.
"""

import torch
import triton
import triton.language as tl

from relay.kernels import sampler_math as sm
from relay.kernels.cuda.launch import launch_options, pdl_enabled, pdl_start
from relay.kernels.cuda.sampler_limits import KEYS, find_limits, key_of
from relay.kernels.cuda.sampler_tables import SamplerTables

CHUNK = 2048


def reason_of(flags: int) -> str:
    """Why a flagged row has no token."""
    if flags & 1:
        return "a logit is NaN or +inf"
    if flags & 4:
        return "a logit overflowed when penalties and bias were applied"
    return "no token is left to draw, or a logit overflowed when divided by the temperature"


C0, C1, C2, C3, C4, C5 = (tl.constexpr(value) for value in sm.LOG_COEFFICIENTS)
HIGH = tl.constexpr(sm.LN2_HIGH)
LOW = tl.constexpr(sm.LN2_LOW)


@triton.jit
def _log(x):
    """``sampler_math.log`` of positive normal fp64 numbers."""
    shifted = x.to(tl.int64, bitcast=True) + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
    exponent = (shifted >> 52).to(tl.float64) - 1023.0
    mantissa = ((shifted & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True)
    f = mantissa - 1.0
    s = f / (mantissa + 1.0)
    z = s * s
    p = z * 0.0 + C5
    p = p * z + C4
    p = p * z + C3
    p = p * z + C2
    p = p * z + C1
    p = p * z + C0
    tail = s * (z * p) + exponent * LOW
    return exponent * HIGH + (2.0 * s + tail)


@triton.jit
def _philox_word(token, position, choice, low, high):
    """Word 0 of Philox4x32-10 with counter (token, position, choice, 0); all uint32."""
    c0 = token
    c1 = tl.zeros_like(c0) + position
    c2 = tl.zeros_like(c0) + choice
    c3 = tl.zeros_like(c0)
    left: tl.constexpr = 0xD2511F53
    right: tl.constexpr = 0xCD9E8D57
    for _ in tl.static_range(10):
        a = tl.full(c0.shape, left, tl.uint32)
        b = tl.full(c0.shape, right, tl.uint32)
        high0, low0 = tl.umulhi(c0, a), c0 * a
        high1, low1 = tl.umulhi(c2, b), c2 * b
        c0 = high1 ^ c1 ^ low
        c1 = low1
        c2 = high0 ^ c3 ^ high
        c3 = low0
        low = (low + tl.full([], 0x9E3779B9, tl.uint32)).to(tl.uint32)
        high = (high + tl.full([], 0xBB67AE85, tl.uint32)).to(tl.uint32)
    return c0


@triton.jit
def gumbel_noise(v, positions, tokens, choices, seeds, row, slot):
    """fp64 noise of vocabulary ids ``v`` for the token that ``row`` draws."""
    position = (tl.load(positions + tl.load(tokens + row).to(tl.int64)) + 1).to(tl.uint32)
    choice = tl.load(choices + slot).to(tl.uint32, bitcast=True)
    low = tl.load(seeds + slot * 2).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + slot * 2 + 1).to(tl.uint32, bitcast=True)
    word = _philox_word(v.to(tl.uint32), position, choice, low, high)
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -_log(-_log(u))


@triton.jit
def top_kernel(logits, tops, ids, flags, vocab, CHUNKS, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Largest logit (fp32) and its lowest id of chunk program_id(1) of row program_id(0); flags NaN and +inf."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    pdl_start(PDL)
    x = tl.load(logits + row * vocab + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    bad = tl.max((~(x < float("inf"))).to(tl.int32), 0)
    top = tl.max(tl.where(x < float("inf"), x, float("-inf")), 0)
    at = row * CHUNKS + chunk
    tl.store(tops + at, top)
    tl.store(ids + at, tl.min(tl.where(x == top, v, vocab), 0))
    tl.store(flags + at, bad)


@triton.jit
def noise_kernel(
    logits, tops, scores, score_ids, positions, tokens, slots, temperatures, log_min_ps, seeds, choices, limits,
    vocab, CHUNKS, CHUNK: tl.constexpr, COUNT: tl.constexpr, LIMITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Best value / temperature + noise of a chunk and its lowest id; nothing for greedy rows."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    if temperature >= 1e-5:
        c = tl.arange(0, COUNT)
        top = tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
        floor = top.to(tl.float64) / temperature + tl.load(log_min_ps + slot)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        raw = tl.load(logits + row * vocab + v, mask=v < vocab, other=float("-inf"))
        scaled = raw.to(tl.float64) / temperature
        noise = gumbel_noise(v, positions, tokens, choices, seeds, row, slot)
        keep = (scaled >= floor) & (scaled > float("-inf")) & (v < vocab)
        if LIMITS:
            key = key_of(raw)
            lowest = tl.load(limits + row * 2)
            keep = keep & ((key > lowest) | ((key == lowest) & (v <= tl.load(limits + row * 2 + 1))))
        score = tl.where(keep, scaled + noise, float("-inf"))
        best = tl.max(score, 0)
        tl.store(scores + row * CHUNKS + chunk, best)
        tl.store(score_ids + row * CHUNKS + chunk, tl.min(tl.where(keep & (score == best), v, vocab), 0))


@triton.jit
def pick_kernel(
    tops, ids, flags, scores, score_ids, slots, temperatures, last_tokens, drawn, vocab, CHUNKS,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The row's token into drawn[row, 0] and last_tokens[slot]; its flags into drawn[row, 1]."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COUNT)
    inside = c < CHUNKS
    pdl_start(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    top = tl.load(tops + row * CHUNKS + c, mask=inside, other=float("-inf"))
    best = tl.max(top, 0)
    flag = tl.max(tl.load(flags + row * CHUNKS + c, mask=inside, other=0), 0)
    token = tl.min(tl.where(inside & (top == best), tl.load(ids + row * CHUNKS + c, mask=inside, other=0), vocab), 0)
    left = best > float("-inf")
    if temperature >= 1e-5:
        score = tl.load(scores + row * CHUNKS + c, mask=inside, other=float("-inf"))
        highest = tl.max(score, 0)
        token = tl.min(
            tl.where(inside & (score == highest), tl.load(score_ids + row * CHUNKS + c, mask=inside, other=0), vocab), 0
        )
        left = left & (best.to(tl.float64) / temperature < float("inf"))
    token = tl.minimum(token, vocab - 1)
    tl.store(drawn + row * 2, token)
    tl.store(drawn + row * 2 + 1, flag + tl.where(left, 0, 2))
    tl.store(last_tokens + slot, token)


class SamplerScratch:
    """Partial results of ``rows`` rows over the chunks of a vocabulary."""

    def __init__(self, rows: int, vocab: int, device: str) -> None:
        self.chunks = triton.cdiv(vocab, CHUNK)
        shape = (rows, self.chunks)
        self.tops = torch.empty(shape, dtype=torch.float32, device=device)
        self.scores = torch.empty(shape, dtype=torch.float64, device=device)
        self.ids, self.score_ids, self.flags = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(3))
        self.counts = torch.zeros(rows, KEYS, dtype=torch.int32, device=device)
        self.limits = torch.zeros(rows, 2, dtype=torch.int32, device=device)


def find_tops(logits: torch.Tensor, scratch: SamplerScratch) -> None:
    """Largest raw logit, its lowest id and flags of each chunk of each row of ``logits``, into ``scratch``."""
    rows, vocab = logits.shape
    pdl = pdl_enabled()
    top_kernel[(rows, scratch.chunks)](
        logits, scratch.tops, scratch.ids, scratch.flags, vocab, scratch.chunks, CHUNK=CHUNK, PDL=pdl,
        **launch_options(pdl),
    )  # fmt: skip


def pick(
    tops: torch.Tensor,
    ids: torch.Tensor,
    slots: torch.Tensor,
    tables: SamplerTables,
    scratch: SamplerScratch,
    drawn: torch.Tensor,
    vocab: int,
) -> None:
    """Choose among chunks by ``tops`` (fp32 or fp64 [rows, chunks]) and their ``ids``; flags and scores are in ``scratch``."""
    pdl = pdl_enabled()
    pick_kernel[(len(slots),)](
        tops, ids, scratch.flags, scratch.scores, scratch.score_ids, slots, tables.temperatures,
        tables.last_tokens, drawn, vocab, scratch.chunks,
        COUNT=triton.next_power_of_2(scratch.chunks), PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def sample_rows(
    logits: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    tables: SamplerTables,
    scratch: SamplerScratch,
    drawn: torch.Tensor,
    limits: bool,
) -> None:
    """Draw a token for each row of ``logits`` bf16 [rows, vocab], contiguous; ``limits``: some row has top-k or top-p.

    ``tokens`` int32 [rows]: step token whose logits they are, so its position + 1 is drawn; ``slots`` int32 [rows]. Writes
    ``drawn`` int32 [rows, 2] (token, flags) and each slot's last token. A flagged row's token means nothing.
    """
    rows, vocab = logits.shape
    pdl = pdl_enabled()
    chunks = scratch.chunks
    find_tops(logits, scratch)
    if limits:
        parameters = (tables.temperatures, tables.log_min_ps, tables.top_ks, tables.top_ps)
        find_limits(logits, scratch.tops, slots, parameters, scratch.counts, scratch.limits)
    noise_kernel[(rows, chunks)](
        logits, scratch.tops, scratch.scores, scratch.score_ids, positions, tokens, slots, tables.temperatures,
        tables.log_min_ps, tables.seeds, tables.choices, scratch.limits, vocab, chunks,
        CHUNK=CHUNK, COUNT=triton.next_power_of_2(chunks), LIMITS=limits, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
    pick(scratch.tops, scratch.ids, slots, tables, scratch, drawn, vocab)
