"""The proxy as an ASGI application: every request gets an idempotency key, and a stream that breaks goes on at the next gateway.

Stock SDKs see one unbroken stream: only whole events are passed on, and a request that is sent again names the last of them.
"""

import asyncio
import itertools
import json
import logging
import secrets
import time
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from relay.proxy.events import EventBuffer
from relay.proxy.upstream import HOP_HEADERS, Exchange, Headers, Upstream, UpstreamLost

logger = logging.getLogger("relay.proxy")

FIRST_DELAY_S = 0.02
MAX_DELAY_S = 1.0
AGAIN = (429, 502, 503, 504)  # for a request that some gateway has begun to answer
MAX_BODY_BYTES = 16 * 1024 * 1024
QUIET_S = 25.0  # gateways send a comment into a quiet stream every 15 s


class BodyTooLarge(Exception):
    """The client sends more than any gateway would take."""


class ClientGone(Exception):
    """Nobody is left to answer."""


class Proxy:
    """``patience_s``: how long a request is tried without any progress."""

    def __init__(self, upstreams: Sequence[Upstream], patience_s: float) -> None:
        self._upstreams = list(upstreams)
        self._next = itertools.count()
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await _read_body(receive)
        except ClientGone:
            return
        except BodyTooLarge:
            await _Passing(send).refuse(
                413, f"The request body is larger than {MAX_BODY_BYTES} bytes.", "request_too_large"
            )
            return
        serving = asyncio.ensure_future(self._serve(scope, body, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not serving.done():
            serving.cancel()  # closes its connection, by which the gateway learns that nobody reads
            await asyncio.wait({serving})
        elif serving.exception() is not None:
            raise serving.exception()  # type: ignore[misc]

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        headers: Headers = [(name.lower(), value) for name, value in scope["headers"]]
        if scope["method"] == "POST" and not any(name == b"idempotency-key" for name, _ in headers):
            headers.append((b"idempotency-key", secrets.token_hex(16).encode()))
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        stream = _Passing(send)
        delay_s, last_s = FIRST_DELAY_S, time.monotonic()
        for number in itertools.count(next(self._next)):
            upstream = self._upstreams[number % len(self._upstreams)]
            seen = stream.progress
            try:
                await self._once(upstream, scope["method"], target, stream.resume(headers), body, stream)
                return
            except UpstreamLost as lost:
                stream.events.drop()
                if stream.progress != seen:
                    delay_s, last_s = FIRST_DELAY_S, time.monotonic()
                if time.monotonic() - last_s > self._patience_s:
                    await stream.give_up(str(lost))
                    return
                logger.info("%s: sent again", lost)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    @staticmethod
    async def _once(
        upstream: Upstream, method: str, target: bytes, headers: Headers, body: bytes, stream: "_Passing"
    ) -> None:
        """One try. Raises UpstreamLost if it has to be made again."""
        exchange = Exchange(upstream)
        try:
            answer = await exchange.begin(method, target, headers, body)
            if stream.begun and answer.status != 200:
                if answer.status in AGAIN or answer.status == 409:
                    raise UpstreamLost(f"{upstream.host}:{upstream.port} answers {answer.status}")
                await stream.give_up(f"the rest of the stream was refused with status {answer.status}")
                return
            await stream.head(answer.status, answer.headers)
            async for part in exchange.body(QUIET_S if stream.streams else None):
                await stream.part(part)
            await stream.end()
        finally:
            exchange.close()


class _Passing:
    """One answer on its way to the client. A plain answer is passed on when it is whole, a stream event by event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.streams = False
        self._head: tuple[int, Headers] = (0, [])
        self._plain: list[bytes] = []
        self._numerics_id = b""
        self.events = EventBuffer()
        self.begun = False
        self.progress = 0

    def resume(self, headers: Headers) -> Headers:
        """The request's headers for the next try."""
        if self.events.last_id is None:
            return headers
        again = [header for header in headers if header[0] not in (b"last-event-id", b"relay-numerics-id")]
        again.append((b"last-event-id", self.events.last_id))
        if self._numerics_id:
            again.append((b"relay-numerics-id", self._numerics_id))
        return again

    async def head(self, status: int, headers: Headers) -> None:
        self._plain = []
        fields = dict(headers)
        # Of the answer that goes on: only where nothing was read of those before may it be another.
        self._numerics_id = fields.get(b"relay-numerics-id", self._numerics_id)
        if self.begun:
            return
        self._head = status, [header for header in headers if header[0] not in HOP_HEADERS]
        self.streams = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        if self.streams:
            self.begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": self._head[1]})

    async def part(self, data: bytes) -> None:
        if not self.streams:
            self._plain.append(data)
            return
        whole = self.events.feed(data)
        if whole:
            self.progress += 1
            await self._send({"type": "http.response.body", "body": whole, "more_body": True})

    async def end(self) -> None:
        """The answer is complete. Raises UpstreamLost for a stream that ended without saying so."""
        if self.streams:
            if not self.events.done:
                raise UpstreamLost("the stream ended without [DONE]")
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        status, headers = self._head
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"".join(self._plain), "more_body": False})

    async def give_up(self, why: str) -> None:
        """No gateway continues it: an error in place of the answer, or after what was passed on."""
        text = f"No gateway answers ({why})."
        if not self.begun:
            await self.refuse(503, text, "no_gateway")
            return
        body = b"data: " + _error(503, text, "no_gateway") + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, status: int, text: str, code: str) -> None:
        """An error of the proxy's own, with nothing passed on before."""
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": _error(status, text, code), "more_body": False})


def _error(status: int, text: str, code: str) -> bytes:
    """As OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": text, "type": kind, "param": None, "code": code}}).encode()


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
