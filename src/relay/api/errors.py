"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}`` with a fitting status."""

import msgspec
from starlette.responses import Response

from relay.control.contract import RequestFailure


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error. ``param`` names the field at fault, ``code`` is for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.close = close  # the rest of the request's body is not worth reading


def from_failure(failure: RequestFailure) -> ApiError:
    """The control plane's reason in the client's terms."""
    return ApiError(
        failure.message, status=failure.status, code=failure.code, retry_after_s=failure.retry_after_s, param=None
    )


def context_length_exceeded(context: int, prompt: int, completion: int, param: str) -> ApiError:
    """The prompt and the tokens asked for do not fit; both numbers are in the text. Nothing is ever cut instead."""
    if completion:
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested {prompt + completion} tokens "
            f"({prompt} in the prompt, {completion} in the completion). Please reduce the length of either."
        )
    else:
        message = (
            f"This model's maximum context length is {context} tokens. However, your prompt has {prompt} tokens and at "
            "least one must be left for the completion. Please reduce the length of the prompt."
        )
    return ApiError(message, param=param, code="context_length_exceeded")


def error_type(status: int) -> str:
    """OpenAI's ``type`` for a status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_json(error: ApiError) -> bytes:
    """The error object as JSON."""
    detail = ErrorDetail(error.message, error_type(error.status), error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """The whole HTTP answer for ``error``."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, error.retry_after_s))
    if error.close:
        headers["connection"] = "close"
    return Response(error_json(error), status_code=error.status, headers=headers, media_type="application/json")
