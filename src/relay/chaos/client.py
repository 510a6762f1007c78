"""An HTTP client that keeps everything an answer said: one connection a request, times of every token.

It is not the project's own API code read backwards: bytes from the socket, JSON numbers kept as they were printed.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from relay.chaos.requests import ChatOrCompletion

LINE_LIMIT = 1 << 20
FIRST_DELAY_S, MAX_DELAY_S = 0.02, 0.5
AGAIN = (409, 429, 502, 503, 504)  # of an answer that has begun: another gateway may continue it


@dataclass(slots=True)
class Answer:
    """One choice as the client saw it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finishes: list[Any] = field(default_factory=list)  # every (finish_reason, stop_reason) it was told; must be one


@dataclass(slots=True)
class Outcome:
    """A whole answer. ``problems``: what makes it a failure whatever the tokens are."""

    status: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    ends: int = 0  # [DONE] events, or one whole body
    problems: list[str] = field(default_factory=list)
    num_tokens: int = 0
    started_s: float = 0.0
    first_s: float = 0.0  # monotonic time of the first token
    ended_s: float = 0.0
    breaks_s: list[float] = field(default_factory=list)  # when its connection broke and it was sent again
    resumed_s: list[float] = field(default_factory=list)  # first new token after each of them; 0: none was left to come
    last_id: str = ""  # of the last event that was read
    numerics_id: str = ""
    single: bool = True  # one choice: what follows its last token is sent again until [DONE] was read

    def canonical(self) -> bytes:
        """The bytes that are compared: everything that may not depend on faults."""
        choices = {
            str(index): [a.text, a.token_ids, a.logprobs, a.finishes] for index, a in sorted(self.answers.items())
        }
        return json.dumps([self.status, choices, self.usage, self.ends], sort_keys=True).encode()

    def digest(self) -> str:
        return hashlib.blake2b(self.canonical(), digest_size=16).hexdigest()

    def whole(self, request: ChatOrCompletion) -> str:
        """Why this is no whole answer, or an empty string."""
        if self.problems:
            return "; ".join(self.problems)
        if self.status != 200:
            return f"status {self.status}"
        if self.ends != 1:
            return f"{self.ends} ends"
        expected = list(range(request.body.get("n", 1)))
        if sorted(self.answers) != expected:
            return f"choices {sorted(self.answers)} instead of {expected}"
        ends = [len(answer.finishes) for answer in self.answers.values()]
        return "" if set(ends) == {1} else f"finish reasons a choice: {ends}"

    def add(self, event: dict[str, Any], now_s: float) -> list[tuple[int, int]]:
        """Take in one JSON object; (choice, tokens it has now) of those that got tokens."""
        if "error" in event:
            self.problems.append(json.dumps(event["error"]))
            return []
        if event.get("usage"):
            usage = dict(event["usage"])
            usage.pop("prompt_tokens_details", None)  # says what was cached, which faults may change
            self.usage = usage
        grown = []
        for choice in event.get("choices", []):
            answer = self.answers.setdefault(choice["index"], Answer())
            answer.text += _text(choice)
            ids = choice.get("token_ids") or []
            if ids:
                if self.breaks_s and not self.resumed_s[-1]:
                    self.resumed_s[-1] = now_s
                answer.token_ids += ids
                self.num_tokens += len(ids)
                self.first_s = self.first_s or now_s
                grown.append((choice["index"], len(answer.token_ids)))
            answer.logprobs += _logprobs(choice.get("logprobs"))
            if choice.get("finish_reason") is not None:
                end = [choice["finish_reason"], choice.get("stop_reason")]
                if not (self.breaks_s and self.single and answer.finishes == [end]):
                    answer.finishes.append(end)
        return grown


def _text(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else (choice.get("delta") or choice.get("message") or {}).get("content")
    return text or ""


def _logprobs(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], logprobs["text_offset"])
    return [list(row) for row in zip(*columns, strict=True)]


def _loads(raw: bytes) -> dict[str, Any]:
    value = json.loads(raw, parse_float=str)  # floats as printed: equal means equal digits
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


Progress = Callable[[int, int, float], None]  # (choice, tokens it has now, monotonic seconds)


class TryAgain(Exception):
    """A gateway cannot continue an answer now."""


async def ask(
    host: str,
    port: int,
    request: ChatOrCompletion,
    timeout_s: float,
    on_tokens: Progress | None = None,
    *,
    key: str = "",
) -> Outcome:
    """POST ``request`` and read its answer to the end. Whatever goes wrong is a problem of the outcome, never an exception.

    With an idempotency ``key`` a broken connection is none: the request is sent again, with the id of the last event that was
    read, until an answer is whole or the time is over.
    """
    outcome = Outcome(started_s=time.monotonic(), single=request.body.get("n", 1) == 1)
    delay_s = FIRST_DELAY_S
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                before = outcome.num_tokens
                try:
                    await _ask(host, port, request, outcome, on_tokens, key)
                    break
                except (OSError, EOFError, TryAgain):
                    if not key:
                        raise
                    if outcome.ends:
                        break
                    if not outcome.breaks_s or outcome.resumed_s[-1]:
                        outcome.breaks_s.append(time.monotonic())
                        outcome.resumed_s.append(0.0)
                    delay_s = FIRST_DELAY_S if outcome.num_tokens > before else min(2 * delay_s, MAX_DELAY_S)
                await asyncio.sleep(delay_s)
    except TimeoutError:
        outcome.problems.append(f"no end after {timeout_s:.0f} s")
    except (OSError, ValueError, EOFError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    outcome.ended_s = time.monotonic()
    return outcome


async def _ask(
    host: str, port: int, request: ChatOrCompletion, outcome: Outcome, on_tokens: Progress | None, key: str
) -> None:
    """One connection. Raises OSError or EOFError when it breaks, TryAgain when an answer that has begun is not continued."""
    data = json.dumps(request.body).encode()
    head = f"POST {request.path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    fields = {"idempotency-key": key, "last-event-id": outcome.last_id, "relay-numerics-id": outcome.numerics_id}
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
    try:
        writer.write(head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        outcome.status, length, numerics_id = await _read_head(reader)
        if outcome.breaks_s and outcome.status in AGAIN:
            raise TryAgain
        outcome.numerics_id = outcome.numerics_id or (numerics_id if key and request.stream else "")
        if request.stream and outcome.status == 200:
            await _read_events(reader, outcome, on_tokens)
        else:
            body = (
                await reader.readexactly(length) if length is not None else b"".join([c async for c in _chunks(reader)])
            )
            for choice, count in outcome.add(_loads(body), time.monotonic()):
                if on_tokens is not None:
                    on_tokens(choice, count, time.monotonic())
            outcome.ends += 1
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, outcome: Outcome, on_tokens: Progress | None) -> None:
    """An id counts when the data behind it was read."""
    rest, last_id = b"", outcome.last_id
    async for chunk in _chunks(reader):
        *lines, rest = (rest + chunk).split(b"\n")
        now_s = time.monotonic()
        for line in lines:
            if line.startswith(b"id: "):
                last_id = line[4:].decode()
            if not line.startswith(b"data: "):
                continue
            outcome.last_id = last_id
            if line == b"data: [DONE]":
                outcome.ends += 1
            elif outcome.ends:
                outcome.problems.append("an event after [DONE]")
            else:
                for choice, count in outcome.add(_loads(line[6:]), now_s):
                    if on_tokens is not None:
                        on_tokens(choice, count, now_s)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, int | None, str]:
    """(status, content length or None for chunks, numerics id or an empty string)."""
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    length: int | None = None
    numerics_id = ""
    while (line := (await reader.readuntil(b"\r\n")).strip()) != b"":
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
        elif name.strip().lower() == b"relay-numerics-id":
            numerics_id = value.strip().decode()
    return status, length, numerics_id


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a chunked body, to its end."""
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:size]


async def get_json(host: str, port: int, path: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """GET ``path``. Raises OSError, ValueError, EOFError or TimeoutError."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())
            _, length, _ = await _read_head(reader)
            body = (
                await reader.readexactly(length) if length is not None else b"".join([c async for c in _chunks(reader)])
            )
            value = json.loads(body)
            if not isinstance(value, dict):
                raise ValueError(f"{path}: no JSON object")
            return value
        finally:
            writer.close()


async def order(host: str, port: int, what: str, body: dict[str, Any], timeout_s: float = 10.0) -> int:
    """POST an operator's order to /admin/``what``; the answer's status. Raises OSError, ValueError, EOFError or TimeoutError."""
    data = json.dumps(body).encode()
    head = f"POST /admin/{what} HTTP/1.1\r\nhost: {host}:{port}\r\nx-relay-admin: 1\r\nconnection: close\r\n"
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
        try:
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
            return (await _read_head(reader))[0]
        finally:
            writer.close()
