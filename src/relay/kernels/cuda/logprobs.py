"""Log-probabilities of drawn tokens: sums and best logits on the device, two fp64 subtractions and one logarithm on the host.

Of the raw distribution, as ``relay.kernels.sampler`` defines them: integer weights, so their sum has no order; the best by
(value, id) found chunk by chunk.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from relay.kernels import sampler_math as sm
from relay.kernels.backend import SampledToken
from relay.kernels.canon import WEIGHT_BITS
from relay.kernels.cuda.launch import launch_options, pdl_enabled, pdl_start
from relay.kernels.cuda.sampler import CHUNK, SamplerScratch
from relay.kernels.cuda.sampler_limits import weight_of
from relay.kernels.cuda.sampler_tables import SamplerTables

HEAD = 4  # words before the ids: sum of weights (two words), best logit, the token's logit


@triton.jit
def mass_kernel(
    logits, tops, masses, slots, num_logprobs, vocab, CHUNKS,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Integer weight of one chunk, for rows that want log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    pdl_start(PDL)
    if tl.load(num_logprobs + tl.load(slots + row).to(tl.int64)) >= 0:
        c = tl.arange(0, COUNT)
        top = tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0).to(tl.float64)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * vocab + v, mask=v < vocab, other=float("-inf")).to(tl.float64)
        weight = tl.where(x > float("-inf"), weight_of(tl.where(x > float("-inf"), x - top, 0.0)), 0)
        tl.store(masses + row * CHUNKS + chunk, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["most", "width"])
def best_kernel(
    logits, tops, ids, masses, drawn, slots, num_logprobs, details, vocab, CHUNKS, most, width,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """details[row] = sum of weights, best logit, the token's logit, then ids and logits of the best; id -1: there are no more."""
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    wanted = tl.load(num_logprobs + tl.load(slots + row).to(tl.int64))
    if wanted >= 0:
        c = tl.arange(0, COUNT)
        inside = c < CHUNKS
        best = tl.load(tops + row * CHUNKS + c, mask=inside, other=float("-inf"))
        best_id = tl.load(ids + row * CHUNKS + c, mask=inside, other=vocab)
        total = tl.sum(tl.load(masses + row * CHUNKS + c, mask=inside, other=0), 0)
        out = details + row * width
        tl.store(out, (total & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True))
        tl.store(out + 1, (total >> 32).to(tl.int32))
        tl.store(out + 2, tl.max(best, 0).to(tl.int32, bitcast=True))
        token = tl.load(drawn + row * 2).to(tl.int64)
        tl.store(out + 3, tl.load(logits + row * vocab + token).to(tl.float32).to(tl.int32, bitcast=True))
        for rank in range(wanted):
            value = tl.max(best, 0)
            there = value > float("-inf")
            which = tl.min(tl.where(best == value, best_id, vocab), 0)
            tl.store(out + HEAD + rank, tl.where(there, which, -1))
            tl.store(out + HEAD + most + rank, value.to(tl.int32, bitcast=True))
            chunk = which // CHUNK
            v = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + row * vocab + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
            left = tl.where((x < value) | ((x == value) & (v > which)), x, float("-inf"))
            next_value = tl.max(left, 0)
            next_id = tl.min(tl.where((left == next_value) & ((x < value) | (v > which)), v, vocab), 0)
            best = tl.where(c == chunk, next_value, best)
            best_id = tl.where(c == chunk, next_id, best_id)


def gather_logprobs(
    logits: torch.Tensor,
    drawn: torch.Tensor,
    slots: torch.Tensor,
    tables: SamplerTables,
    scratch: SamplerScratch,
    most: int,
) -> torch.Tensor:
    """int32 [rows, HEAD + 2 * most] for the rows that want them, at most ``most`` each.

    ``scratch`` holds the largest raw logit of each chunk and its lowest id, ``drawn`` the tokens.
    """
    rows, vocab = logits.shape
    pdl = pdl_enabled()
    options = launch_options(pdl)
    chunks, count = scratch.chunks, triton.next_power_of_2(scratch.chunks)
    width = HEAD + 2 * most
    details = torch.zeros(rows, width, dtype=torch.int32, device=logits.device)
    masses = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    mass_kernel[(rows, chunks)](
        logits, scratch.tops, masses, slots, tables.num_logprobs, vocab, chunks,
        CHUNK=CHUNK, COUNT=count, PDL=pdl, **options,
    )  # fmt: skip
    best_kernel[(rows,)](
        logits, scratch.tops, scratch.ids, masses, drawn, slots, tables.num_logprobs, details, vocab, chunks, most, width,
        CHUNK=CHUNK, COUNT=count, HEAD=HEAD, PDL=pdl, **options,
    )  # fmt: skip
    return details


def with_logprobs(token: int, wanted: int, detail: np.ndarray, most: int) -> SampledToken:
    """``token`` with what ``best_kernel`` found for its row."""
    total = (int(detail[1]) << 32) + int(detail[:1].view(np.uint32)[0])
    best, own = (float(value) for value in detail[2:4].view(np.float32))
    normaliser = sm.log_of(float(total) * 2.0**-WEIGHT_BITS)
    ids = detail[HEAD : HEAD + wanted].tolist()
    values = detail[HEAD + most : HEAD + most + wanted].view(np.float32).tolist()
    top = [
        (token_id, (value - best) - normaliser) for token_id, value in zip(ids, values, strict=True) if token_id >= 0
    ]
    return SampledToken(token, (own - best) - normaliser, top)
