"""ctypes binding of sampler.c: draws the tokens ``relay.kernels.sampler.draw`` defines, bit for bit, and fast."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from relay.kernels.backend import SampledToken
from relay.kernels.sampler import InvalidLogits, SlotState

_DRAWN, _BAD_LOGIT = 0, 1
_REASONS = {  # the words of relay.kernels.sampler
    2: "no token is left to draw",
    3: "a logit overflowed when penalties and bias were applied",
    4: "a logit overflowed when divided by the temperature",
}


class _Draw(ctypes.Structure):
    """``relay_draw`` of sampler.c."""

    _fields_: ClassVar = [
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repetition", c_double),
        ("frequency", c_double),
        ("presence", c_double),
        ("seen_ids", c_void_p),
        ("output_counts", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("masked_ids", c_void_p),
        ("seed", c_uint64),
        ("position", c_uint32),
        ("choice", c_uint32),
        ("top_k", c_int32),
        ("num_logprobs", c_int32),
        ("num_seen", c_int32),
        ("num_bias", c_int32),
        ("num_masked", c_int32),
        ("has_penalties", c_int32),
    ]


class _Drawn(ctypes.Structure):
    """``relay_drawn`` of sampler.c."""

    _fields_: ClassVar = [
        ("logprob", c_double),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("token", c_int32),
        ("status", c_int32),
        ("num_top", c_int32),
        ("unused", c_int32),
    ]


class CSampler:
    """The C sampler of one loaded ``library``; serves one caller at a time, since it keeps its scratch memory.

    ``pool`` is a ``pool_create`` handle of ``threads`` threads that share the rows; without one the caller draws them all.
    """

    def __init__(self, library: ctypes.CDLL, pool: int | None = None, threads: int = 1) -> None:
        self._sample = library.relay_sample_rows
        self._sample.restype = None
        self._sample.argtypes = [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p]
        self._scratch_bytes = library.relay_sample_scratch_bytes
        self._scratch_bytes.restype = c_int64
        self._scratch_bytes.argtypes = [c_int32]
        self._pool = pool
        self._threads = threads
        self._vocab = 0
        self._scratch = np.empty(0, np.uint8)

    def draw(self, logits: NDArray[np.float32], state: SlotState, row: int = 0) -> SampledToken:
        """The next token of ``state``'s sequence given fp32 ``logits`` [vocab]. Raises InvalidLogits naming ``row``."""
        return self.draw_rows(logits[None], [state], row)[0]

    def draw_rows(
        self, logits: NDArray[np.float32], states: Sequence[SlotState], first_row: int = 0
    ) -> list[SampledToken]:
        """``draw`` for every row of fp32 ``logits`` [rows, vocab], whose rows may lie apart but not their values.

        Raises InvalidLogits for the lowest bad row, counted from ``first_row``; no state changes in any case.
        """
        if logits.dtype != np.float32 or logits.ndim != 2 or logits.strides[1] != 4 or len(logits) != len(states):
            raise ValueError("logits must be fp32, one row a state, the values of a row contiguous")
        rows, vocab = logits.shape
        if vocab != self._vocab:
            self._scratch = np.empty(self._scratch_bytes(vocab) * self._threads, np.uint8)
            self._vocab = vocab
        draws, drawn = (_Draw * rows)(), (_Drawn * rows)()
        kept: list[object] = []
        for state, draw, out in zip(states, draws, drawn, strict=True):
            _describe(draw, state)
            if draw.num_logprobs > 0:
                draw.num_logprobs = min(draw.num_logprobs, vocab)
                top_ids, top_logprobs = (c_int32 * draw.num_logprobs)(), (c_double * draw.num_logprobs)()
                out.top_ids, out.top_logprobs = ctypes.addressof(top_ids), ctypes.addressof(top_logprobs)
                kept.append((top_ids, top_logprobs))
            else:
                kept.append(None)
        self._sample(
            self._pool,
            logits.ctypes.data,
            logits.strides[0] // 4,
            rows,
            vocab,
            ctypes.addressof(draws),
            self._scratch.ctypes.data,
            ctypes.addressof(drawn),
        )
        tokens = []
        for row, (draw, out, top) in enumerate(zip(draws, drawn, kept, strict=True)):
            if out.status != _DRAWN:
                bad = f"the logit of token {out.token} is {logits[row, out.token]}"
                raise InvalidLogits(first_row + row, bad if out.status == _BAD_LOGIT else _REASONS[out.status])
            if draw.num_logprobs < 0:
                tokens.append(SampledToken(out.token))
                continue
            best = list(zip(*top, strict=True))[: out.num_top] if isinstance(top, tuple) else []
            tokens.append(SampledToken(out.token, out.logprob, best))
        return tokens


def _describe(draw: _Draw, state: SlotState) -> None:
    """Fill ``draw``; it points into ``state`` and is valid until that is pushed to."""
    params = state.params
    draw.temperature = params.temperature
    draw.top_p = params.top_p
    draw.min_p = params.min_p
    draw.seed = params.seed
    draw.position = state.position
    draw.choice = state.choice
    draw.top_k = min(params.top_k, 2**31 - 1)
    draw.num_logprobs = -1 if params.logprobs is None else params.logprobs
    if params.has_penalties:
        draw.has_penalties = 1
        draw.repetition = params.repetition_penalty
        draw.frequency = params.frequency_penalty
        draw.presence = params.presence_penalty
        draw.num_seen = state.num_seen
        draw.seen_ids = state.seen_ids.ctypes.data
        draw.output_counts = state.output_counts.ctypes.data
    if len(state.bias_ids):
        draw.num_bias = len(state.bias_ids)
        draw.bias_ids = state.bias_ids.ctypes.data
        draw.bias_values = state.bias_values.ctypes.data
    if state.masking:
        draw.num_masked = len(state.masked_ids)
        draw.masked_ids = state.masked_ids.ctypes.data
