"""Reading and decoding request bodies: size, content type, encoding and JSON are checked before anything else happens."""

import re
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from relay.api.errors import ApiError

_T = TypeVar("_T")
_PATH = re.compile(r"^(.*) - at `(?:key in )?\$\.?([A-Za-z0-9_]*)([^`]*)`$", re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)")
_KEY_BEFORE = re.compile(rb'"([A-Za-z0-9_]{1,64})"\s*:[\s\[]*-?\Z')
_LOGIT_BIAS_BEFORE = re.compile(rb'"logit_bias"\s*:\s*\{[^{}]*\Z')  # its keys are token ids, not fields
_NON_FINITE = re.compile(rb"(NaN|Infinity)")


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request body. Raises ApiError: 413 as soon as it is known to be over ``limit`` bytes, 415 for other content than JSON."""
    headers = dict(scope["headers"])
    _check_content_type(headers)
    length = headers.get(b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise _too_large(limit, close=int(length) > 8 * limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit, close=True)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int, *, close: bool) -> ApiError:
    return ApiError(
        f"The request body is larger than {limit} bytes.", status=413, code="request_too_large", close=close
    )


def _check_content_type(headers: dict[bytes, bytes]) -> None:
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError("Compressed request bodies are not supported.", status=415, code="unsupported_media_type")
    content_type = headers.get(b"content-type")
    if content_type is None:
        return
    media_type = content_type.split(b";", 1)[0].strip().lower()
    if media_type != b"application/json" and not (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    ):
        raise ApiError(
            "The request body must be JSON with 'Content-Type: application/json'.",
            status=415,
            code="unsupported_media_type",
        )


def decode(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """The request as a struct. Raises ApiError (400) naming the field where one is at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        if match is None:
            raise ApiError(f"Invalid request: {error}.", code="invalid_type") from error
        message, field, rest = match.groups()
        where = f"'{field}{rest}'" if field else "the request body"
        raise ApiError(f"Invalid value for {where}: {message}.", param=field or None, code="invalid_type") from error
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from error
    except RecursionError as error:
        raise ApiError("The request body is nested too deeply.", code="invalid_json") from error


def _malformed(body: bytes, reason: str) -> ApiError:
    """Not JSON. NaN and infinities are not JSON either, but the client meant a number, so the field is named."""
    if not body:
        return ApiError("The request body is empty; it must be a JSON object.", code="invalid_json")
    byte = _BYTE.search(reason)
    if byte is not None:
        at = int(byte.group(1))
        key = _KEY_BEFORE.search(body[max(0, at - 128) : at])
        if key is not None and _NON_FINITE.match(body, at):
            field = "logit_bias" if _LOGIT_BIAS_BEFORE.search(body[:at]) else key.group(1).decode()
            return ApiError(
                f"Invalid value for '{field}': it must be a finite number.", param=field, code="invalid_value"
            )
    return ApiError(f"The request body is not valid JSON: {reason}.", code="invalid_json")
