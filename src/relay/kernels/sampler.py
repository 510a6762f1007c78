"""The sampler that defines what is drawn (docs/decisions/0003-canon.md, "Sampling"); every backend equals it bit for bit.

The next token is a pure function of (logits row, sampling parameters, choice, position, token ids so far). Nothing is
carried between draws but counts of token ids, so a sequence rebuilt elsewhere draws what it would have drawn.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relay.kernels import sampler_math as sm
from relay.kernels.backend import SampledToken
from relay.kernels.canon import WEIGHT_BITS
from relay.protocol.sampling import SamplingParams


class InvalidLogits(ValueError):
    """No token can be drawn from a row: a NaN or +inf in it, or every token masked. ``row`` indexes the sampled rows."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"logits row {row}: {reason}")
        self.row = row
        self.reason = reason


class SlotState:
    """What drawing needs to know of one sequence: parameters, choice and (only where penalties ask) token counts.

    ``seen_ids[:num_seen]`` are the distinct ids of prompt and output, ``output_counts`` how often each was generated.
    ``masked_ids`` are the ids that may not be drawn before ``min_tokens``. Ids without a logit are ignored by ``draw``.
    """

    __slots__ = (
        "_index",
        "bias_ids",
        "bias_values",
        "choice",
        "last_token",
        "masked_ids",
        "num_outputs",
        "num_prompt",
        "num_seen",
        "output_counts",
        "params",
        "seen_ids",
    )

    def __init__(
        self, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None:
        """Raises ValueError for parameters outside their domain or a sequence without a token."""
        _check(params)
        if not prompt_ids and not output_ids:
            raise ValueError("a sequence has at least one token")
        self.params = params
        self.choice = choice
        self.num_prompt = len(prompt_ids)
        self.num_outputs = 0
        self.num_seen = 0
        self.seen_ids = np.zeros(64, np.int32)
        self.output_counts = np.zeros(64, np.int32)
        self._index: dict[int, int] = {}
        bias = sorted(params.logit_bias.items())
        self.bias_ids = np.array([token for token, _ in bias], np.int32)
        self.bias_values = np.array([value for _, value in bias], np.float64)
        masked = sorted({*params.eos_token_ids, *params.stop_token_ids}) if params.min_tokens > 0 else []
        self.masked_ids = np.array(masked, np.int32)
        if params.has_penalties:
            for token in prompt_ids:
                self._count(token, 0)
        for token in output_ids:
            self.push(token)
        self.last_token = int(output_ids[-1] if output_ids else prompt_ids[-1])

    @property
    def position(self) -> int:
        """Absolute index of the token drawn next."""
        return self.num_prompt + self.num_outputs

    @property
    def masking(self) -> bool:
        """Whether ``masked_ids`` are still forbidden."""
        return self.num_outputs < self.params.min_tokens

    def push(self, token_id: int) -> None:
        """The sequence grew by ``token_id``."""
        self.num_outputs += 1
        self.last_token = int(token_id)
        if self.params.has_penalties:
            self._count(token_id, 1)

    def _count(self, token_id: int, generated: int) -> None:
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self.num_seen
            if index == len(self.seen_ids):
                self.seen_ids = np.concatenate([self.seen_ids, np.zeros_like(self.seen_ids)])
                self.output_counts = np.concatenate([self.output_counts, np.zeros_like(self.output_counts)])
            self.seen_ids[index] = token_id
            self.num_seen += 1
        self.output_counts[index] += generated


@np.errstate(over="ignore", invalid="ignore")  # infinities are caught where they matter
def draw(logits: NDArray[np.float32], state: SlotState, row: int = 0) -> SampledToken:
    """The next token of ``state``'s sequence given fp32 ``logits`` [vocab]; ``state`` is not changed.

    Raises InvalidLogits naming ``row``.
    """
    raw = logits.astype(np.float64)
    if not (raw < math.inf).all():
        token = int(np.argmin(raw < math.inf))
        raise InvalidLogits(row, f"the logit of token {token} is {raw[token]}")
    adjusted = _adjust(raw, state)
    best = float(adjusted.max())
    if best == -math.inf:
        raise InvalidLogits(row, "no token is left to draw")
    if not best < math.inf:
        raise InvalidLogits(row, "a logit overflowed when penalties and bias were applied")
    token = int(np.argmax(adjusted)) if state.params.greedy else _draw_noisy(adjusted, state, row)
    logprob, top = _logprobs(raw, token, state.params.logprobs)
    return SampledToken(token, logprob, top)


def draw_rows(logits: NDArray[np.float32], states: Sequence[SlotState]) -> list[SampledToken]:
    """``draw`` for every row of ``logits`` [rows, vocab]; rows do not influence each other."""
    return [draw(logits[row], state, row) for row, state in enumerate(states)]


def _adjust(raw: sm.F64, state: SlotState) -> sm.F64:
    """Penalties, then bias, then the min_tokens mask."""
    params = state.params
    logits = raw.copy()
    if params.has_penalties:
        ids, counts = state.seen_ids[: state.num_seen], state.output_counts[: state.num_seen]
        inside = (ids >= 0) & (ids < len(raw))
        ids, generated = ids[inside], counts[inside].astype(np.float64)
        value = logits[ids]
        value = np.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
        value = value - params.frequency_penalty * generated
        value = np.where(generated > 0, value - params.presence_penalty, value)
        logits[ids] = value
    inside = (state.bias_ids >= 0) & (state.bias_ids < len(raw))
    ids = state.bias_ids[inside]
    logits[ids] = logits[ids] + state.bias_values[inside]
    if state.masking:
        logits[state.masked_ids[(state.masked_ids >= 0) & (state.masked_ids < len(raw))]] = -math.inf
    return logits


def _draw_noisy(adjusted: sm.F64, state: SlotState, row: int) -> int:
    """Temperature, min-p, top-k, top-p, then the highest of value plus noise."""
    params = state.params
    scaled = adjusted / params.temperature
    best = float(scaled.max())
    if best == -math.inf:
        raise InvalidLogits(row, "no token is left to draw")
    if best == math.inf:
        raise InvalidLogits(row, "a logit overflowed when divided by the temperature")
    floor = best + sm.log_of(params.min_p) if params.min_p > 0 else -math.inf
    survivors = np.flatnonzero((scaled >= floor) & (scaled > -math.inf))
    if 0 < params.top_k < len(survivors) or params.top_p < 1:
        ordered = survivors[np.lexsort((survivors, -scaled[survivors]))]
        if params.top_k > 0:
            ordered = ordered[: params.top_k]
        if params.top_p < 1:
            ordered = ordered[: _nucleus(sm.weights(scaled[ordered] - best), params.top_p)]
        survivors = np.sort(ordered)
    words = sm.philox_words(survivors, state.position, state.choice, params.seed)
    return int(survivors[np.argmax(scaled[survivors] + sm.gumbel(words))])


def _nucleus(weights: sm.I64, top_p: float) -> int:
    """Length of the smallest prefix of ``weights`` whose sum reaches ceil(top_p * sum of all), at least 1."""
    total = int(weights.sum())
    needed = min(max(math.ceil(top_p * float(total)), 1), total)
    return int(np.searchsorted(np.cumsum(weights), needed)) + 1


def _logprobs(raw: sm.F64, token: int, count: int | None) -> tuple[float | None, list[tuple[int, float]]]:
    """Log-probability of ``token`` and of the ``count`` best finite logits, of the raw distribution."""
    if count is None:
        return None, []
    best = float(raw.max())
    total = int(sm.weights(raw - best).sum())
    normaliser = sm.log_of(float(total) * 2.0**-WEIGHT_BITS)
    ids = np.flatnonzero(raw > -math.inf)
    if 0 < count < len(ids):
        ids = ids[raw[ids] >= np.partition(raw[ids], -count)[-count]]
    ids = ids[np.lexsort((ids, -raw[ids]))][:count]
    return (float(raw[token]) - best) - normaliser, [(int(v), (float(raw[v]) - best) - normaliser) for v in ids]


def _check(params: SamplingParams) -> None:
    """Refuse what would make the arithmetic undefined; the API has refused it before with better words."""
    finite = (params.temperature, params.presence_penalty, params.frequency_penalty, *params.logit_bias.values())
    if not all(math.isfinite(value) for value in finite) or params.temperature < 0:
        raise ValueError("temperature, penalties and logit_bias must be finite, temperature not negative")
    if not (0 < params.repetition_penalty < math.inf and 0 <= params.top_p <= 1 and 0 <= params.min_p <= 1):
        raise ValueError("repetition_penalty must be over 0, top_p and min_p in [0, 1]")
    if not 0 <= params.seed < 1 << 64 or params.top_k < 0:
        raise ValueError("seed must be in [0, 2^64), top_k not negative")
