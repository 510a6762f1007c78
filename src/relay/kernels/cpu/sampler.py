"""ctypes binding of sampler.c: draws the tokens ``relay.kernels.sampler.draw`` defines, bit for bit, and fast.

``logits`` rows must be C-contiguous fp32. A ``CSampler`` keeps one scratch memory, so it serves one thread at a time.
"""

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


class CSampler:
    """The C sampler of one loaded ``library``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sample = library.relay_sample_row
        self._sample.restype = c_int32
        self._sample.argtypes = [c_void_p, c_int32, *[c_void_p] * 7]
        self._scratch_bytes = library.relay_sample_scratch_bytes
        self._scratch_bytes.restype = c_int64
        self._scratch_bytes.argtypes = [c_int32]
        self._vocab = 0
        self._scratch = np.empty(0, np.uint8)
        self._token = c_int32()
        self._logprob = c_double()
        self._num_top = c_int32()

    def draw(self, logits: NDArray[np.float32], state: SlotState, row: int = 0) -> SampledToken:
        """The next token of ``state``'s sequence given fp32 ``logits`` [vocab]. Raises InvalidLogits naming ``row``."""
        if logits.dtype != np.float32 or logits.ndim != 1 or not logits.flags.c_contiguous:
            raise ValueError("logits must be a contiguous fp32 row")
        vocab = len(logits)
        if vocab != self._vocab:
            self._scratch = np.empty(self._scratch_bytes(vocab), np.uint8)
            self._vocab = vocab
        draw = _describe(state)
        count = min(draw.num_logprobs, vocab)
        draw.num_logprobs = count
        top_ids, top_logprobs = (c_int32 * max(count, 0))(), (c_double * max(count, 0))()
        status = self._sample(
            logits.ctypes.data,
            vocab,
            ctypes.addressof(draw),
            self._scratch.ctypes.data,
            ctypes.addressof(self._token),
            ctypes.addressof(self._logprob),
            ctypes.addressof(top_ids),
            ctypes.addressof(top_logprobs),
            ctypes.addressof(self._num_top),
        )
        token = self._token.value
        if status != _DRAWN:
            bad = f"the logit of token {token} is {logits[token]}" if status == _BAD_LOGIT else _REASONS[status]
            raise InvalidLogits(row, bad)
        if count < 0:
            return SampledToken(token)
        top = list(zip(top_ids, top_logprobs, strict=True))[: self._num_top.value]
        return SampledToken(token, self._logprob.value, top)

    def draw_rows(self, logits: NDArray[np.float32], states: Sequence[SlotState]) -> list[SampledToken]:
        """``draw`` for every row of ``logits`` [rows, vocab]."""
        return [self.draw(logits[row], state, row) for row, state in enumerate(states)]


def _describe(state: SlotState) -> _Draw:
    """The C description of ``state``; valid until the state is pushed to."""
    params = state.params
    draw = _Draw(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        position=state.position,
        choice=state.choice,
        top_k=min(params.top_k, 2**31 - 1),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )
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
    return draw
