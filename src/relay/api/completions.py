"""POST /v1/completions."""

from functools import partial

import msgspec

from relay.api.answer import Job
from relay.api.choice import Choice, Wanted, new_choice
from relay.api.context import Context, Identity
from relay.api.endpoint import GenerationEndpoint
from relay.api.errors import ApiError
from relay.api.logprobs import completion_logprobs
from relay.api.prompts import Prompt, parse_prompts
from relay.api.resume import Resume
from relay.api.types import CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from relay.api.validation import (
    bad_value,
    check_choices,
    check_max_tokens,
    check_response_format,
    check_stream,
    fit,
    sampling_params,
    wanted_of,
    with_prompt,
)
from relay.control.contract import Submission

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionFormat:
    """Writes ``text_completion`` objects."""

    def __init__(self, identity: Identity, context: Context, wanted: Wanted, *, usage_null: bool) -> None:
        self._identity = identity
        self._context = context
        self._wanted = wanted
        self._usage: msgspec.UnsetType | None = None if usage_null else msgspec.UNSET

    def computed_with(self, numerics_id: str) -> None:
        self._identity.numerics_id = numerics_id

    def opening(self, choice: Choice) -> bytes | None:
        if not choice.echo and not self._wanted.token_ids:
            return None
        chunk = CompletionChoice(choice.index, choice.echo, None, None)
        if self._wanted.token_ids:
            chunk.token_ids = []
            chunk.prompt_token_ids = choice.prompt_ids
        return self._chunk(chunk)

    def text_frame(self, choice: Choice) -> tuple[bytes, bytes]:
        return self._identity.text_frame(CompletionChoice(choice.index, self._identity.mark, None, None), self._usage)

    def detailed_chunk(self, choice: Choice, text: str) -> bytes:
        chunk = CompletionChoice(choice.index, text, self._logprobs(choice, choice.shown), None)
        if self._wanted.token_ids:
            chunk.token_ids = choice.token_ids[choice.shown :]
        return self._chunk(chunk)

    def closing(self, choice: Choice, text: str) -> bytes:
        details = choice.shown < choice.text.num_tokens
        logprobs = self._logprobs(choice, choice.shown) if details else None
        chunk = CompletionChoice(choice.index, text, logprobs, choice.finish_reason, choice.stop_reason)
        if self._wanted.token_ids and details:
            chunk.token_ids = choice.token_ids[choice.shown :]
        if self._wanted.capture:
            chunk.relay = choice.capture()
        return self._chunk(chunk)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._identity.encode([], usage)

    def plain(self, choices: list[Choice], usage: Usage) -> bytes:
        return self._identity.encode([self._whole(choice) for choice in choices], usage)

    def _whole(self, choice: Choice) -> CompletionChoice:
        text = choice.echo + "".join(choice.parts)
        whole = CompletionChoice(
            choice.index, text, self._logprobs(choice, 0), choice.finish_reason, choice.stop_reason
        )
        if self._wanted.token_ids:
            whole.token_ids = choice.token_ids
            whole.prompt_token_ids = choice.prompt_ids
        if self._wanted.capture:
            whole.relay = choice.capture()
        return whole

    def _logprobs(self, choice: Choice, start: int) -> CompletionLogprobs | None:
        if self._wanted.logprobs is None:
            return None
        return completion_logprobs(choice, self._context.detokenizer, start, self._wanted.logprobs)

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return self._identity.encode([choice], self._usage)


class CompletionsEndpoint(GenerationEndpoint[CompletionRequest]):
    """Text or token-id prompts, several at once; choice index = prompt index * n + choice."""

    name = "completions"
    decoder = msgspec.json.Decoder(CompletionRequest)

    async def prepare(self, request: CompletionRequest, resume: Resume) -> Job:
        context, limits, model = self.context, self.context.limits, self.context.gateway.model
        check_response_format(request)
        stream = check_stream(request)
        n = check_choices(request, limits)
        logprobs = self._logprobs(request)
        if request.best_of not in (None, n):
            raise bad_value("best_of", "it must be equal to 'n'")
        if request.suffix:
            raise ApiError("'suffix' is not supported.", param="suffix", code="unsupported_value")
        asked = check_max_tokens("max_tokens", request.max_tokens, 0)
        wanted = wanted_of(request, limits, logprobs)
        params = sampling_params(request, model, limits, logprobs)
        raw = bytes(request.prompt).strip()
        if raw == b"null":
            raise ApiError("'prompt' is required.", param="prompt", code="missing_required_parameter")
        prompts = parse_prompts(
            bytes(request.prompt),
            vocab_size=model.vocab_size,
            context=model.max_model_len,
            max_prompts=limits.max_prompts,
        )
        if len(prompts) * n > limits.max_total_choices:
            raise bad_value("n", f"prompts times 'n' may be at most {limits.max_total_choices}")
        tokenized = await context.encode_prompts(prompts, request.add_special_tokens is not False, "prompt")
        submissions: list[Submission] = []
        choices: list[list[Choice]] = []
        resume.check_choices(len(tokenized) * n)
        for position, ids in enumerate(tokenized):
            if not ids:
                raise bad_value("prompt", "it has no tokens")
            max_tokens = fit(model.max_model_len, len(ids), asked, DEFAULT_MAX_TOKENS, "prompt")
            for index in range(position * n, position * n + n):
                resume.check_tokens(index, max_tokens)
            own = with_prompt(params, request, max_tokens, partial(context.seed, resume, position))
            submissions.append(context.submission(request, ids, own, n, resume, position))
        for position, submission in enumerate(submissions):
            echo = self._echo(prompts[position], tokenized[position]) if request.echo else ""
            choices.append(
                [
                    new_choice(
                        index,
                        submission.token_ids,
                        submission.params,
                        wanted,
                        context.detokenizer,
                        echo,
                        resume.consumed_of(index),
                    )
                    for index in range(position * n, position * n + n)
                ]
            )
        include_usage = bool(request.stream_options and request.stream_options.include_usage)
        identity = context.identity("cmpl", "text_completion", request.model, resume)
        form = CompletionFormat(identity, context, wanted, usage_null=include_usage)
        return Job(submissions, choices, form, stream, include_usage, wanted.details, resume)

    def _logprobs(self, request: CompletionRequest) -> int | None:
        logprobs = request.logprobs
        if logprobs is None:
            return None
        if not 0 <= logprobs <= self.context.limits.max_logprobs:
            raise bad_value("logprobs", f"it must be an integer from 0 to {self.context.limits.max_logprobs}")
        if request.echo:
            raise ApiError(
                "Scoring a prompt ('echo' with 'logprobs') is not supported.", param="echo", code="unsupported_value"
            )
        return logprobs

    def _echo(self, prompt: Prompt, ids: list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.context.text_of(ids)
