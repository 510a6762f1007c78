"""The answer to one generation request: sinks that receive tokens, and the two ways to send what they make of them."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relay.api.choice import Choice
from relay.api.errors import ApiError, error_response, from_failure
from relay.api.metrics import ApiMetrics
from relay.api.resume import Resume, event_id
from relay.api.sse import DONE, EventStream, GoneReason, Headers, event
from relay.api.types import PromptTokensDetails, Usage
from relay.control.contract import Delivery, Gateway, RequestFailure, Submission, SubmissionRefused

log = logging.getLogger("relay.api")
json_string = msgspec.json.Encoder().encode


class Format(Protocol):
    """How an endpoint writes its answers; all bytes are JSON objects, without framing."""

    def computed_with(self, numerics_id: str) -> None:
        """Called before the first of the others: the answer's fingerprint."""
        ...

    def opening(self, choice: Choice) -> bytes | None:
        """The chunk before the first text (role, echoed prompt), if any."""
        ...

    def text_frame(self, choice: Choice) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of a text-only chunk."""
        ...

    def detailed_chunk(self, choice: Choice, text: str) -> bytes:
        """A chunk with text and the details of tokens from ``choice.shown`` on."""
        ...

    def closing(self, choice: Choice, text: str) -> bytes:
        """The chunk with the last ``text``, details of tokens from ``choice.shown`` on (where asked for) and the finish reason.

        One chunk: its id then says that the choice has ended.
        """
        ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def plain(self, choices: list[Choice], usage: Usage) -> bytes: ...


@dataclass(slots=True)
class Job:
    """A validated request: one submission a prompt, and a choice for each of its ``n``."""

    submissions: list[Submission]
    choices: list[list[Choice]]
    format: Format
    stream: bool
    include_usage: bool
    details: bool
    resume: Resume


def usage_of(choices: list[list[Choice]]) -> Usage:
    """Prompt tokens once a prompt, completion tokens of all choices; cached are those no choice had to compute."""
    prompt = sum(len(group[0].prompt_ids) for group in choices)
    completion = sum(choice.text.num_tokens for group in choices for choice in group)
    cached = sum(min(choice.cached_tokens for choice in group) for group in choices)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class PromptSink:
    """Receives the tokens of one prompt's choices (``relay.control.contract.TokenSink``)."""

    __slots__ = ("_answer", "_choices", "_early", "request")

    def __init__(self, answer: "Answer", choices: list[Choice]) -> None:
        self._answer = answer
        self._choices = choices
        self._early: list[int] = []  # choices that ended before ``submit`` returned
        self.request: int | None = None

    def redirect(self, answer: "Answer", choices: list[Choice]) -> None:
        """From now on everything goes to ``answer``, which is told all that came before."""
        before, self._answer, self._choices = self._choices, answer, choices
        for index, (old, new) in enumerate(zip(before, choices, strict=True)):
            if old.token_ids or old.finish_reason is not None:
                new.last_ns = old.last_ns
                self._show(answer, new, old.so_far(index))

    def submitted(self, request: int) -> None:
        self.request = request
        for choice in self._early:
            self._answer.gateway.finish_choice(request, choice)

    def tokens(self, delivery: Delivery) -> None:
        answer = self._answer
        choice = self._choices[delivery.choice]
        if answer.over or choice.finish_reason is not None:
            return
        now_ns = time.monotonic_ns()
        answer.metrics.delivered(
            now_ns - (choice.last_ns or answer.arrived_ns), not choice.last_ns, len(delivery.token_ids)
        )
        choice.last_ns = now_ns
        self._show(answer, choice, delivery)

    def _show(self, answer: "Answer", choice: Choice, delivery: Delivery) -> None:
        try:
            answer.computed_with(delivery.numerics_id)
            delta = choice.accept(delivery)
            if choice.text.stop_matched is not None and delivery.finish is None:
                if self.request is None:
                    self._early.append(delivery.choice)
                else:
                    answer.gateway.finish_choice(self.request, delivery.choice)
            answer.show(choice, delta)
        except Exception:
            log.exception("a delivery could not be shown; the request fails")
            answer.stop()
            answer.fail(ApiError("Internal error while writing the answer.", status=500, code="internal_error"))

    def failed(self, failure: RequestFailure) -> None:
        if not self._answer.over:
            self._answer.stop()
            self._answer.fail(from_failure(failure))


class Answer:
    """What streamed and plain answers share: submission, cancellation, the end, and what is counted."""

    def __init__(self, job: Job, gateway: Gateway, metrics: ApiMetrics, headers: Headers, arrived_ns: int) -> None:
        self.job = job
        self.gateway = gateway
        self.metrics = metrics
        self.arrived_ns = arrived_ns
        self.headers = headers
        self.over = False
        self.status = 200
        self._sinks: list[PromptSink] = []
        self._named = False
        self._unfinished = sum(len(group) for group in job.choices)

    def submit(self) -> None:
        """Queue every prompt. Raises ApiError, after taking back what was queued, if one is refused."""
        for submission, choices in zip(self.job.submissions, self.job.choices, strict=True):
            if submission.params.max_tokens == 0:
                numerics_id = self.gateway.model.numerics_id
                if not numerics_id:  # answered here, but nobody could say for which numerics
                    raise ApiError("No worker is ready yet.", status=503, code="no_workers", retry_after_s=1)
                self._show_empty(choices)
                continue
            sink = PromptSink(self, choices)
            try:
                request = self.gateway.submit(submission, sink)
            except SubmissionRefused as refused:
                self.over = True
                self.stop()
                raise from_failure(refused.failure) from refused
            self._sinks.append(sink)
            sink.submitted(request)

    def computed_with(self, numerics_id: str) -> None:
        """Who computes the first token names the arithmetic of the answer, before any of it is shown."""
        if not self._named:
            self._named = True
            self.headers.append((b"relay-numerics-id", numerics_id.encode()))
            self.job.format.computed_with(numerics_id)

    def _show_empty(self, choices: list[Choice]) -> None:
        self.computed_with(self.gateway.model.numerics_id)
        for choice in choices:
            choice.finish_reason = "length"
            self.show(choice, "")

    def take_over(self, older: "Answer") -> None:
        """The same request is being answered on an older connection: end that, and go on here with all it has had."""
        sinks, older._sinks = older._sinks, []
        older.replaced()
        self._sinks = sinks
        groups = [
            group for group, one in zip(self.job.choices, self.job.submissions, strict=True) if one.params.max_tokens
        ]
        for group, one in zip(self.job.choices, self.job.submissions, strict=True):
            if not one.params.max_tokens:
                self._show_empty(group)
        for sink, group in zip(sinks, groups, strict=True):
            sink.redirect(self, group)

    def replaced(self) -> None:
        """The client has sent the request again, and reads the answer there."""
        self.over = True
        self.fail(ApiError("The request was sent again and is answered there.", status=409, code="replaced"))

    def stop(self) -> None:
        """Cancel everything in the gateway."""
        self.over = True
        for sink in self._sinks:
            if sink.request is not None:
                self.gateway.cancel(sink.request)

    def gone(self, reason: GoneReason) -> None:
        """The client is not there any more: nothing more is computed for it."""
        if not self.over:
            self.status = 499
            self.metrics.client_gone(reason)
            self.stop()

    def finished(self, choice: Choice) -> bool:
        """Count a choice that has its finish reason; true with the last one."""
        self._unfinished -= 1
        self.metrics.choice_finished(choice.finish_reason or "", len(choice.prompt_ids), choice.text.num_tokens)
        if self._unfinished:
            return False
        self.over = True
        self.metrics.request_finished(time.monotonic_ns() - self.arrived_ns, usage_of(self.job.choices))
        return True

    def show(self, choice: Choice, delta: str) -> None:
        raise NotImplementedError

    def fail(self, error: ApiError) -> None:
        raise NotImplementedError

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class StreamedAnswer(Answer):
    """Writes every delivery as server-sent events, straight from the callback."""

    def __init__(
        self,
        job: Job,
        gateway: Gateway,
        metrics: ApiMetrics,
        headers: Headers,
        arrived_ns: int,
        *,
        keep_alive_s: float,
        buffer_limit: int,
    ) -> None:
        super().__init__(job, gateway, metrics, headers, arrived_ns)
        self._stream = EventStream(headers, keep_alive_s=keep_alive_s, buffer_limit=buffer_limit, on_gone=self.gone)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._choices = [choice for group in job.choices for choice in group]

    def show(self, choice: Choice, delta: str) -> None:
        job, single = self.job, len(self._choices) == 1
        ended = choice.finish_reason is not None
        if choice.behind:  # the client has it; of one choice it may still need the end
            if ended:
                choice.shown = choice.text.num_tokens
                self._close(choice, self._event(job.format.closing(choice, "")) if single else b"")
            return
        frame = self._frames.get(choice.index)
        data = b""
        if frame is None:
            before, after = job.format.text_frame(choice)
            frame = self._frames[choice.index] = (b"data: " + before, after + b"\n\n")
            opening = None if self._begun_before(choice) else job.format.opening(choice)
            if opening is not None:
                data = event_id([other.consumed if other is choice else other.num_shown for other in self._choices])
                data += event(opening)
        if ended and not single:  # text and end in one event, so that its id tells whether the client has both
            self._close(choice, data + self._event(job.format.closing(choice, delta)))
            return
        if job.details:
            if delta or choice.shown < choice.text.num_tokens:
                data += self._event(job.format.detailed_chunk(choice, delta))
                choice.shown = choice.text.num_tokens
        elif delta:
            data += event_id([other.num_shown for other in self._choices]) + frame[0] + json_string(delta) + frame[1]
        if ended:
            choice.shown = choice.text.num_tokens
            self._close(choice, data + self._event(job.format.closing(choice, "")))
        elif data:
            self._stream.write(data)

    def _event(self, payload: bytes) -> bytes:
        """An event after which the client has all that was accepted so far."""
        return event_id([choice.num_shown for choice in self._choices]) + event(payload)

    def _close(self, choice: Choice, data: bytes) -> None:
        """``data`` is the last of ``choice``."""
        if not self.finished(choice):
            if data:
                self._stream.write(data)
            return
        if self.job.include_usage:
            data += self._event(self.job.format.usage_chunk(usage_of(self.job.choices)))
        self._stream.end(data + DONE)

    def _begun_before(self, choice: Choice) -> bool:
        """The client has had this choice's opening. With several choices that is sure only of those it has tokens of."""
        return choice.consumed > 0 or (self.job.resume.consumed is not None and len(self._choices) == 1)

    def fail(self, error: ApiError) -> None:
        self.status = error.status
        self._stream.fail(error)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream.serve(scope, receive, send)


class PlainAnswer(Answer):
    """Collects the same text and sends one JSON object at the end."""

    def __init__(self, job: Job, gateway: Gateway, metrics: ApiMetrics, headers: Headers, arrived_ns: int) -> None:
        super().__init__(job, gateway, metrics, headers, arrived_ns)
        self._done: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()

    def show(self, choice: Choice, delta: str) -> None:
        choice.parts.append(delta)
        if choice.finish_reason is not None and self.finished(choice):
            self._resolve(None)

    def fail(self, error: ApiError) -> None:
        self.status = error.status
        self._resolve(error)

    def _resolve(self, error: ApiError | None) -> None:
        if not self._done.done():
            self._done.set_result(error)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = asyncio.get_running_loop().create_task(_until_gone(receive, self._client_left))
        try:
            error = await self._done
        except asyncio.CancelledError:
            self.gone("disconnected")
            raise
        finally:
            listener.cancel()
        if self.status == 499:
            return
        headers = {name.decode(): value.decode("latin-1") for name, value in self.headers}
        if error is not None:
            response = error_response(error, headers)
        else:
            choices = [choice for group in self.job.choices for choice in group]
            body = self.job.format.plain(choices, usage_of(self.job.choices))
            response = Response(body, headers=headers, media_type="application/json")
        await response(scope, receive, send)

    def _client_left(self) -> None:
        self.gone("disconnected")
        self._resolve(None)


async def _until_gone(receive: Receive, callback: Callable[[], None]) -> None:
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            callback()
            return
