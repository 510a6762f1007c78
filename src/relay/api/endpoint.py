"""The life of one generation request over HTTP: read, decode, check, submit, answer, account."""

import logging
import secrets
import time
from typing import ClassVar, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from relay.api.answer import Answer, Job, PlainAnswer, StreamedAnswer
from relay.api.body import ClientGone, decode, read_body
from relay.api.context import Context
from relay.api.errors import ApiError, error_response
from relay.api.resume import Resume, bad_header, read_resume
from relay.api.sse import Headers
from relay.api.types import GenerationRequest
from relay.api.validation import cache_salt, check_model

access_log = logging.getLogger("relay.api.access")

_R = TypeVar("_R", bound=GenerationRequest)
_MAX_REQUEST_ID_BYTES = 128


def request_id_of(scope: Scope) -> bytes:
    """The client's X-Request-Id where it is sane, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_REQUEST_ID_BYTES and value.isascii():
            if value.decode("ascii").isprintable():
                return bytes(value)
            break
    return secrets.token_hex(8).encode()


class GenerationEndpoint(Generic[_R]):
    """An ASGI application for one path; subclasses read their own request type."""

    name: ClassVar[str]
    decoder: msgspec.json.Decoder[_R]

    def __init__(self, context: Context) -> None:
        self.context = context

    async def prepare(self, request: _R, resume: Resume) -> Job:
        """Validate everything and tokenize. Raises ApiError."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_ns = time.monotonic_ns()
        request_id = request_id_of(scope)
        headers: Headers = [(b"x-request-id", request_id)]
        status, answer = 500, None
        try:
            answer = await self._answer(scope, receive, headers, arrived_ns)
            self._submit(answer)
            await answer.serve(scope, receive, send)
            status = answer.status
        except ApiError as error:
            status = error.status
            await error_response(error, {"x-request-id": request_id.decode()})(scope, receive, send)
        except ClientGone:
            status = 499  # nobody is left to be told
        except BaseException:
            if answer is not None and not answer.over:
                answer.stop()
            raise
        finally:
            if answer is not None and self.context.running.get(answer.job.resume.digest) is answer:
                del self.context.running[answer.job.resume.digest]
            self.context.metrics.responded(self.name, status)
            self._account(request_id, status, answer, arrived_ns)

    async def _answer(self, scope: Scope, receive: Receive, headers: Headers, arrived_ns: int) -> Answer:
        context = self.context
        body = await read_body(scope, receive, context.limits.max_request_bytes)
        request = decode(body, self.decoder)
        check_model(request.model, context.served_names)
        cache_salt(request, context.limits)
        resume = read_resume(scope, body)
        if resume.consumed is not None and not request.stream:
            raise bad_header("Last-Event-ID", "only a stream can be continued")
        job = await self.prepare(request, resume)
        if job.stream:
            return StreamedAnswer(
                job,
                context.gateway,
                context.metrics,
                headers,
                arrived_ns,
                keep_alive_s=context.limits.keep_alive_s,
                buffer_limit=context.limits.stream_buffer_bytes,
            )
        return PlainAnswer(job, context.gateway, context.metrics, headers, arrived_ns)

    def _submit(self, answer: Answer) -> None:
        """Queue the request, or take it over from an older connection of the same client. Raises ApiError."""
        digest, running = answer.job.resume.digest, self.context.running
        older = running.get(digest) if digest else None
        if digest:
            running[digest] = answer
        if older is None or older.over:
            answer.submit()
        else:
            answer.take_over(older)

    def _account(self, request_id: bytes, status: int, answer: Answer | None, arrived_ns: int) -> None:
        """One line a request; never any text of it."""
        prompt = completion = 0
        if answer is not None:
            prompt = sum(len(group[0].prompt_ids) for group in answer.job.choices)
            completion = sum(choice.text.num_tokens for group in answer.job.choices for choice in group)
        access_log.info(
            "%s %s status=%d prompt_tokens=%d completion_tokens=%d e2e_ms=%.1f",
            request_id.decode(),
            self.name,
            status,
            prompt,
            completion,
            (time.monotonic_ns() - arrived_ns) * 1e-6,
        )
