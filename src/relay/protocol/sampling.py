"""Sampling parameters as they travel and as every sampler reads them."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. A pure function of (logits row, these, choice, position) gives the token.

    ``seed`` is always set (given, or drawn at admission), 0 ≤ seed < 2^64. ``temperature`` < 1e-5 is greedy. ``top_k`` 0 means all.
    ``logprobs``: None for none, k ≥ 0 for the chosen token plus the k best. ``stop_token_ids`` end the sequence as EOS does;
    ``eos_token_ids`` are the model's, already emptied where ``ignore_eos`` was asked. Frequency and presence penalties
    count generated tokens, repetition counts prompt and generated ones.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
