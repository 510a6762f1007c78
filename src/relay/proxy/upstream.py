"""One request to one gateway over HTTP/1.1, as a small asyncio client: no pool, one connection a request."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from relay.errors import UsageError

CONNECT_S = 3.0
READ_BYTES = 1 << 16
HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
Headers = list[tuple[bytes, bytes]]


class UpstreamLost(Exception):
    """The gateway could not be reached, or the connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where a gateway listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> "Upstream":
        """Raises UsageError for anything but http://host:port."""
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or not port:
            raise UsageError(f"--upstream {url!r}: write http://HOST:PORT")
        return cls(parts.hostname, port)


@dataclass(slots=True)
class Answer:
    """Head and body of a response while it arrives; the callbacks of ``httptools``."""

    status: int = 0
    headers: Headers = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    head: bool = False
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.head = True

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class Exchange:
    """``begin`` sends the request and returns with the answer's head; ``body`` yields what follows."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._answer = Answer()
        self._parser: Any = httptools.HttpResponseParser(self._answer)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def begin(self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Raises UpstreamLost."""
        up = self._upstream
        try:
            opening = asyncio.open_connection(up.host, up.port)
            self._reader, writer = await asyncio.wait_for(opening, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise UpstreamLost(f"{up.host}:{up.port}: {error or 'timed out'}") from error
        self._writer = writer
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: %b:%d" % (up.host.encode(), up.port)]
        lines += [b"%b: %b" % header for header in headers if header[0] not in HOP_HEADERS and header[0] != b"host"]
        lines += [b"connection: close"]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        while not self._answer.head:
            await self._read()
        self._answer.status = self._parser.get_status_code()
        return self._answer

    async def body(self, quiet_s: float | None) -> AsyncIterator[bytes]:
        """The body in parts. Raises UpstreamLost if it ends early, or if nothing comes for ``quiet_s``."""
        answer = self._answer
        while True:
            parts, answer.parts = answer.parts, []
            for part in parts:
                yield part
            if answer.complete:
                return
            try:
                await asyncio.wait_for(self._read(), quiet_s)
            except TimeoutError as error:
                text = f"{self._upstream.host}:{self._upstream.port} is silent"
                raise UpstreamLost(text) from error

    async def _read(self) -> None:
        assert self._reader is not None
        try:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise UpstreamLost(f"{self._upstream.host}:{self._upstream.port} closed the connection")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise UpstreamLost(f"{self._upstream.host}:{self._upstream.port}: {error}") from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
