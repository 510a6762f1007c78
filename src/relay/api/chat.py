"""POST /v1/chat/completions."""

import msgspec

from relay.api.answer import Job
from relay.api.choice import Choice, Wanted, new_choice
from relay.api.context import Context, Identity
from relay.api.endpoint import GenerationEndpoint
from relay.api.errors import ApiError
from relay.api.logprobs import chat_logprobs
from relay.api.messages import parse_messages
from relay.api.resume import Resume
from relay.api.types import ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatRequest, Usage
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

_OWN_VARIABLES = frozenset({"messages", "tools", "documents"})  # of templates; they come from the request's own fields


class ChatFormat:
    """Writes ``chat.completion`` objects and ``chat.completion.chunk`` chunks."""

    def __init__(self, identity: Identity, context: Context, wanted: Wanted, *, usage_null: bool) -> None:
        self._identity = identity
        self._context = context
        self._wanted = wanted
        self._usage: msgspec.UnsetType | None = None if usage_null else msgspec.UNSET

    def computed_with(self, numerics_id: str) -> None:
        self._identity.numerics_id = numerics_id

    def opening(self, choice: Choice) -> bytes | None:
        chunk = ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""), None, None)
        prompt_ids = choice.prompt_ids if self._wanted.token_ids else msgspec.UNSET
        return self._identity.encode([chunk], self._usage, prompt_ids)

    def text_frame(self, choice: Choice) -> tuple[bytes, bytes]:
        chunk = ChatChunkChoice(choice.index, ChatDelta(content=self._identity.mark), None, None)
        return self._identity.text_frame(chunk, self._usage)

    def detailed_chunk(self, choice: Choice, text: str) -> bytes:
        chunk = ChatChunkChoice(choice.index, ChatDelta(content=text), self._logprobs(choice, choice.shown), None)
        if self._wanted.token_ids:
            chunk.token_ids = choice.token_ids[choice.shown :]
        return self._identity.encode([chunk], self._usage)

    def closing(self, choice: Choice, text: str) -> bytes:
        delta = ChatDelta(content=text) if text else ChatDelta()
        details = choice.shown < choice.text.num_tokens
        logprobs = self._logprobs(choice, choice.shown) if details else None
        chunk = ChatChunkChoice(choice.index, delta, logprobs, choice.finish_reason, choice.stop_reason)
        if self._wanted.token_ids and details:
            chunk.token_ids = choice.token_ids[choice.shown :]
        if self._wanted.capture:
            chunk.relay = choice.capture()
        return self._identity.encode([chunk], self._usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._identity.encode([], usage)

    def plain(self, choices: list[Choice], usage: Usage) -> bytes:
        prompt_ids = choices[0].prompt_ids if self._wanted.token_ids else msgspec.UNSET
        return self._identity.encode([self._whole(choice) for choice in choices], usage, prompt_ids)

    def _whole(self, choice: Choice) -> ChatChoice:
        message = ChatMessage("assistant", "".join(choice.parts))
        whole = ChatChoice(choice.index, message, self._logprobs(choice, 0), choice.finish_reason, choice.stop_reason)
        if self._wanted.token_ids:
            whole.token_ids = choice.token_ids
        if self._wanted.capture:
            whole.relay = choice.capture()
        return whole

    def _logprobs(self, choice: Choice, start: int) -> ChatLogprobs | None:
        if self._wanted.logprobs is None:
            return None
        return chat_logprobs(choice, self._context.detokenizer, start, self._wanted.logprobs)


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """A conversation, rendered by the model's template."""

    name = "chat.completions"
    decoder = msgspec.json.Decoder(ChatRequest)

    async def prepare(self, request: ChatRequest, resume: Resume) -> Job:
        context, limits, model = self.context, self.context.limits, self.context.gateway.model
        check_response_format(request)
        _check_tools(request)
        stream = check_stream(request)
        n = check_choices(request, limits)
        param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        asked = check_max_tokens(param, getattr(request, param), 1)
        logprobs = self._logprobs(request)
        wanted = wanted_of(request, limits, logprobs)
        params = sampling_params(request, model, limits, logprobs)
        ids = await self._tokenize(request)
        max_tokens = fit(model.max_model_len, len(ids), asked, None, "messages")
        resume.check_choices(n)
        for index in range(n):
            resume.check_tokens(index, max_tokens)
        params = with_prompt(params, request, max_tokens, lambda: context.seed(resume, 0))
        submission = context.submission(request, ids, params, n, resume, 0)
        choices = [
            new_choice(k, ids, params, wanted, context.detokenizer, consumed=resume.consumed_of(k)) for k in range(n)
        ]
        include_usage = bool(request.stream_options and request.stream_options.include_usage)
        kind = "chat.completion.chunk" if stream else "chat.completion"
        form = ChatFormat(
            context.identity("chatcmpl", kind, request.model, resume), context, wanted, usage_null=include_usage
        )
        return Job([submission], [choices], form, stream, include_usage, wanted.details, resume)

    def _logprobs(self, request: ChatRequest) -> int | None:
        top = request.top_logprobs
        if top is not None:
            if not 0 <= top <= self.context.limits.max_logprobs:
                raise bad_value("top_logprobs", f"it must be an integer from 0 to {self.context.limits.max_logprobs}")
            if top and not request.logprobs:
                raise bad_value("top_logprobs", "it needs 'logprobs': true")
        return (top or 0) if request.logprobs else None

    async def _tokenize(self, request: ChatRequest) -> list[int]:
        context = self.context
        template = context.chat_template
        messages = parse_messages(request.messages)
        if template is None:
            raise ApiError(
                "This model has no chat template; use /v1/completions.", param="messages", code="no_chat_template"
            )
        context.check_size("".join(message["content"] for message in messages), "messages")

        variables = request.chat_template_kwargs or {}
        if not _OWN_VARIABLES.isdisjoint(variables):
            raise bad_value("chat_template_kwargs", f"it may not hold {', '.join(sorted(_OWN_VARIABLES))}")

        def render() -> list[int]:
            text = template.render(messages, add_generation_prompt=True, variables=variables)
            context.check_size(text, "messages")
            return context.tokenizer.encode(text, bool(request.add_special_tokens))

        try:
            return await context.pool.run(render)
        except (ValueError, TypeError) as error:
            raise ApiError(
                f"The chat template refused the messages: {str(error)[:200]}", param="messages", code="invalid_value"
            ) from error


def _check_tools(request: ChatRequest) -> None:
    """Tools are accepted where they change nothing."""
    if request.tools and request.tool_choice != "none":
        raise ApiError("Tool calling is not supported; send no 'tools'.", param="tools", code="unsupported_value")
    if request.tool_choice not in (None, "none", "auto"):
        raise ApiError("Tool calling is not supported.", param="tool_choice", code="unsupported_value")
    if request.functions or request.function_call not in (None, "none", "auto"):
        raise ApiError("Function calling is not supported.", param="functions", code="unsupported_value")
