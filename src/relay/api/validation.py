"""Request fields → SamplingParams. Every value is checked here, before anything is queued; nothing is clipped in silence."""

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from relay.api.choice import Wanted
from relay.api.errors import ApiError, context_length_exceeded
from relay.api.types import GenerationRequest
from relay.control.contract import ModelInfo
from relay.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Bounds on what one HTTP request may ask for and hold."""

    max_request_bytes: int = 16 * 1024 * 1024
    max_choices: int = 128  # of one prompt
    max_prompts: int = 256
    max_total_choices: int = 1024  # prompts x n
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_string_chars: int = 1024
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_cache_salt_chars: int = 256
    prompt_bytes_per_token: int = 64  # a longer text is refused without tokenizing it
    tokenizer_threads: int = 2
    max_tokenizing: int = 256  # requests waiting for the tokenizer
    stream_buffer_bytes: int = 1024 * 1024  # unsent bytes of one stream before its reader is cut off
    keep_alive_s: float = 15.0


def bad_value(param: str, why: str) -> ApiError:
    return ApiError(f"Invalid value for '{param}': {why}.", param=param, code="invalid_value")


def _number(param: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or value < low or value > high:
        raise bad_value(param, f"it must be a number from {low:g} to {high:g}")
    return value


def _integer(param: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if value < low or value > high:
        raise bad_value(param, f"it must be an integer from {low} to {high}")
    return value


def check_model(name: str | None, served: Collection[str]) -> None:
    """Raises ApiError 404 for a model that is not served; no name means the one that is."""
    if name is not None and name not in served:
        raise ApiError(
            f"The model `{name[:200]}` does not exist. Served here: {', '.join(served)}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def check_choices(request: GenerationRequest, limits: ApiLimits) -> int:
    """``n``."""
    return _integer("n", request.n, 1, 1, limits.max_choices)


def check_stream(request: GenerationRequest) -> bool:
    """Whether to stream."""
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise bad_value("stream_options", "it is allowed only with 'stream': true")
    return stream


def check_response_format(request: GenerationRequest) -> None:
    """Only free text for now."""
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise ApiError(
            "Only 'response_format': {'type': 'text'} is supported.", param="response_format", code="unsupported_value"
        )


def stop_strings(request: GenerationRequest, limits: ApiLimits) -> tuple[str, ...]:
    """Stop strings, none empty."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > limits.max_stop_strings:
        raise bad_value("stop", f"at most {limits.max_stop_strings} stop strings are allowed")
    for stop in stops:
        if not stop:
            raise bad_value("stop", "a stop string must not be empty")
        if len(stop) > limits.max_stop_string_chars:
            raise bad_value("stop", f"a stop string may have at most {limits.max_stop_string_chars} characters")
    return tuple(stops)


def cache_salt(request: GenerationRequest, limits: ApiLimits) -> str:
    salt = request.cache_salt or ""
    if len(salt) > limits.max_cache_salt_chars:
        raise bad_value("cache_salt", f"it may have at most {limits.max_cache_salt_chars} characters")
    return salt


def wanted_of(request: GenerationRequest, limits: ApiLimits, logprobs: int | None) -> Wanted:
    """What the answer shows besides text, and where the text stops."""
    return Wanted(
        logprobs=logprobs,
        token_ids=bool(request.return_token_ids),
        capture=bool(request.relay_capture),
        stops=stop_strings(request, limits),
        include_stop=bool(request.include_stop_str_in_output),
    )


def sampling_params(
    request: GenerationRequest, model: ModelInfo, limits: ApiLimits, logprobs: int | None
) -> SamplingParams:
    """Everything that does not depend on a prompt; ``with_prompt`` sets max_tokens and the seed."""
    top_k = _integer("top_k", request.top_k, 0, -1, 2**31 - 1)
    return SamplingParams(
        max_tokens=0,
        min_tokens=_integer("min_tokens", request.min_tokens, 0, 0, model.max_model_len),
        temperature=_number("temperature", request.temperature, 1.0, 0.0, 2.0),
        top_k=0 if top_k < 0 or top_k >= model.vocab_size else top_k,
        # 0 means "as few as possible", which is the best token alone
        top_p=max(_number("top_p", request.top_p, 1.0, 0.0, 1.0), sys.float_info.min),
        min_p=_number("min_p", request.min_p, 0.0, 0.0, 1.0),
        presence_penalty=_number("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=_number("repetition_penalty", request.repetition_penalty, 1.0, 0.01, 100.0),
        logit_bias=_logit_bias(request, model, limits),
        seed=_seed(request),
        logprobs=logprobs,
        stop_token_ids=_stop_token_ids(request, model, limits),
        eos_token_ids=() if request.ignore_eos else model.eos_token_ids,
    )


def with_prompt(
    params: SamplingParams, request: GenerationRequest, max_tokens: int, seed: Callable[[], int]
) -> SamplingParams:
    """The parameters for one prompt. Each unseeded prompt draws its own seed: equal prompts must not give clones."""
    if params.min_tokens > max_tokens:
        raise bad_value("min_tokens", f"it must be an integer from 0 to max_tokens ({max_tokens})")
    return msgspec.structs.replace(
        params, max_tokens=max_tokens, seed=params.seed if request.seed is not None else seed()
    )


def fit(context: int, prompt: int, asked: int | None, default: int | None, param: str) -> int:
    """How many tokens may be generated. Raises ApiError ``context_length_exceeded``; only an absent value adapts to the room."""
    room = context - prompt
    if room < 1 and asked != 0:
        raise context_length_exceeded(context, prompt, asked or 0, param)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise context_length_exceeded(context, prompt, asked, param)
    return asked


def check_max_tokens(param: str, value: int | None, low: int) -> int | None:
    """The value asked for, if any; how much fits is only known once the prompt is tokenized."""
    if value is not None and value < low:
        raise bad_value(param, f"it must be at least {low}")
    return value


def _seed(request: GenerationRequest) -> int:
    if request.seed is None:
        return 0
    if not -(2**63) <= request.seed < 2**64:
        raise bad_value("seed", "it must be a 64-bit integer")
    return request.seed % 2**64


def _logit_bias(request: GenerationRequest, model: ModelInfo, limits: ApiLimits) -> dict[int, float]:
    bias = request.logit_bias or {}
    if len(bias) > limits.max_logit_bias:
        raise bad_value("logit_bias", f"at most {limits.max_logit_bias} entries are allowed")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < model.vocab_size):
            raise bad_value("logit_bias", f"'{key[:40]}' is not a token id from 0 to {model.vocab_size - 1}")
        if not -100.0 <= value <= 100.0:
            raise bad_value("logit_bias", "each bias must be from -100 to 100")
        checked[int(key)] = value
    return checked


def _stop_token_ids(request: GenerationRequest, model: ModelInfo, limits: ApiLimits) -> tuple[int, ...]:
    ids = request.stop_token_ids or []
    if len(ids) > limits.max_stop_token_ids:
        raise bad_value("stop_token_ids", f"at most {limits.max_stop_token_ids} ids are allowed")
    for token_id in ids:
        if not 0 <= token_id < model.vocab_size:
            raise bad_value("stop_token_ids", f"{token_id} is not a token id from 0 to {model.vocab_size - 1}")
    return tuple(ids)
