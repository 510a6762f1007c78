"""The ``prompt`` field of /v1/completions: a text, a list of token ids, or a list of texts or of lists of token ids."""

import msgspec

from relay.api.body import decode
from relay.api.errors import ApiError, context_length_exceeded

Prompt = str | list[int]

_text = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder()


def parse_prompts(raw: bytes, *, vocab_size: int, context: int, max_prompts: int) -> list[Prompt]:
    """The prompts in order, from stripped JSON. Raises ApiError with ``param`` 'prompt'.

    A list of more ids than the context has room for is refused before it is built.
    """
    if raw.startswith(b'"'):
        return [_decode_text(raw)]
    if not raw.startswith(b"["):
        raise _bad("it must be a text, a list of token ids, or a list of either")
    inner = raw[1:65].lstrip()[:1]
    if inner not in (b"[", b'"'):
        count = raw.count(b",") + 1
        if count > context:
            raise context_length_exceeded(context, count, 0, "prompt")
    try:
        value = decode(raw, _any)
    except ApiError as error:
        error.param = "prompt"
        raise
    if not isinstance(value, list) or not value:
        raise _bad("it must not be empty")
    if all(type(item) is int for item in value):
        return [_check_ids(value, vocab_size)]
    if len(value) > max_prompts:
        raise _bad(f"at most {max_prompts} prompts can be sent at once")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_check_ids(item, vocab_size) for item in value]
    raise _bad("it must be a text, a list of token ids, or a list of either, not a mixture")


def _decode_text(raw: bytes) -> str:
    try:
        return decode(raw, _text)
    except ApiError as error:
        error.param = "prompt"
        raise


def _check_ids(ids: list[int], vocab_size: int) -> list[int]:
    if not ids:
        raise _bad("a list of token ids must not be empty")
    for token_id in ids:
        if type(token_id) is not int:
            raise _bad("token ids must be integers")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise _bad(f"token id {low if low < 0 else high} is outside the vocabulary (0 to {vocab_size - 1})")
    return ids


def _bad(why: str) -> ApiError:
    return ApiError(f"Invalid value for 'prompt': {why}.", param="prompt", code="invalid_value")
