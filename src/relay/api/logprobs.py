"""Logprobs of a choice's tokens in the shapes of the two endpoints."""

import math

from relay.api.choice import Choice
from relay.api.detokenizer import Detokenizer
from relay.api.types import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

_LOWEST = -9999.0  # JSON has no -inf


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST


def _readable(raw: bytes) -> str:
    """A token as text; one that is no whole character as ``bytes:\\x..``, OpenAI's form."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(choice: Choice, detokenizer: Detokenizer, start: int, top: int) -> CompletionLogprobs:
    """Arrays for the tokens from ``start`` on. Offsets count characters of the whole text, an echoed prompt included."""
    count = choice.text.num_tokens
    base = len(choice.echo)
    result = CompletionLogprobs([base + offset for offset in choice.text.offsets[start:count]], [], [], [])
    for token_id, (logprob, alternatives) in zip(
        choice.token_ids[start:count], choice.logprobs[start:count], strict=True
    ):
        token = _readable(detokenizer.token_bytes(token_id))
        result.tokens.append(token)
        result.token_logprobs.append(_finite(logprob))
        best: dict[str, float] = {}
        for other, value in alternatives[:top]:
            best.setdefault(_readable(detokenizer.token_bytes(other)), _finite(value))
        best.setdefault(token, _finite(logprob))
        result.top_logprobs.append(best)
    return result


def chat_logprobs(choice: Choice, detokenizer: Detokenizer, start: int, top: int) -> ChatLogprobs:
    """Entries for the tokens from ``start`` on."""
    count = choice.text.num_tokens
    content = []
    for token_id, (logprob, alternatives) in zip(
        choice.token_ids[start:count], choice.logprobs[start:count], strict=True
    ):
        raw = detokenizer.token_bytes(token_id)
        others = [
            TopLogprob(_lossy(other_raw), _finite(value), list(other_raw))
            for other_raw, value in ((detokenizer.token_bytes(other), value) for other, value in alternatives[:top])
        ]
        content.append(TokenLogprob(_lossy(raw), _finite(logprob), list(raw), others))
    return ChatLogprobs(content)


def _lossy(raw: bytes) -> str:
    return raw.decode(errors="replace")
