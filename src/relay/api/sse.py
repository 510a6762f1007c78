"""Server-sent events written from callbacks: no task switch a token, bounded memory for a slow reader.

``EventStream.write`` is called on the event loop, once a step and choice. While the connection takes bytes, it runs the server's
``send`` to its end right there: a coroutine that does not wait is a function call. When ``send`` waits (the transport's
buffer is full), the half-run coroutine is handed to the stream's own task, which finishes it; until then chunks collect
in a backlog, and a reader whose backlog passes the limit is cut off.

The response starts with the first event, so that a request that fails before it has a real HTTP status; a keep-alive
comment starts it too.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Literal

from starlette.types import Receive, Send

from relay.api.errors import ApiError, error_json, error_response

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

GoneReason = Literal["disconnected", "slow_reader"]
Headers = list[tuple[bytes, bytes]]


def event(payload: bytes) -> bytes:
    """One event with ``payload`` (JSON without newlines)."""
    return b"data: %b\n\n" % payload


class _Started:
    """Awaits the rest of a coroutine that was run by hand up to ``future``."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], future: Any) -> None:
        self._coroutine = coroutine
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        future = self._future
        while True:
            yield future
            try:
                future = self._coroutine.send(None)
            except StopIteration:
                return

    def drop(self) -> None:
        self._coroutine.close()


class EventStream:
    """One streamed response. ``on_gone`` is called at most once: the client left, or reads too slowly."""

    def __init__(
        self, headers: Headers, *, keep_alive_s: float, buffer_limit: int, on_gone: Callable[[GoneReason], None]
    ) -> None:
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._extra_headers = headers
        self._keep_alive_s = keep_alive_s
        self._buffer_limit = buffer_limit
        self._on_gone = on_gone
        self._send: Send | None = None
        self._busy = True  # ``send`` may not be called from ``write``
        self._begun = False
        self._ended = False
        self._gone: GoneReason | None = None
        self._rejection: ApiError | None = None
        self._started: _Started | None = None
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._last_write_s = 0.0
        self._time: Callable[[], float] = float

    def write(self, data: bytes) -> None:
        """Send ``data`` (whole events), now or as soon as the connection takes it."""
        if self._ended or self._gone:
            return
        if self._busy:
            self._queue(data)
            return
        self._last_write_s = self._time()
        if not self._begun:
            self._run(self._start_message())
        if self._busy:  # the start already waits
            self._queue(data)
        else:
            self._run({"type": "http.response.body", "body": data, "more_body": True})

    def end(self, data: bytes) -> None:
        """Send ``data`` and finish the response."""
        self.write(data)
        self._ended = True
        self._rouse()

    def fail(self, error: ApiError) -> None:
        """End with an error: a plain HTTP answer if nothing was sent yet, else an error event."""
        if self._begun or self._backlog:
            self.end(event(error_json(error)) + DONE)
        else:
            self._rejection = error
            self._ended = True
            self._rouse()

    async def serve(self, scope: Any, receive: Receive, send: Send) -> None:
        """Run the response to its end; returns when it is complete or the client is gone."""
        loop = asyncio.get_running_loop()
        self._time = loop.time
        self._last_write_s = loop.time()
        self._send = send
        self._task = asyncio.current_task()
        listener = loop.create_task(self._listen(receive))
        timer = loop.create_task(self._keep_alive())
        try:
            await self._pump(loop, send)
            if self._gone is None:
                if self._rejection is not None:
                    headers = {name.decode(): value.decode("latin-1") for name, value in self._extra_headers}
                    await error_response(self._rejection, headers)(scope, receive, send)
                else:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if self._gone != "slow_reader" or self._task is None:
                self._leave("disconnected")
                raise
            self._task.uncancel()
        except OSError:  # how some servers report a closed connection
            self._leave("disconnected")
        finally:
            self._ended = True
            self._busy = True
            if self._started is not None:
                self._started.drop()
            listener.cancel()
            timer.cancel()

    async def _pump(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        """Sends what ``write`` could not; sleeps while there is nothing of that kind."""
        while self._gone is None:
            if self._started is not None:
                await self._started
                self._started = None
            elif self._backlog:
                if not self._begun:
                    message = self._start_message()
                    await send(message)
                data = b"".join(self._backlog)
                self._backlog.clear()
                self._backlog_bytes = 0
                await send({"type": "http.response.body", "body": data, "more_body": True})
            elif self._ended:
                return
            else:
                self._busy = False
                self._wake = loop.create_future()
                await self._wake

    def _start_message(self) -> dict[str, Any]:
        self._begun = True
        return {"type": "http.response.start", "status": 200, "headers": [*self._headers, *self._extra_headers]}

    def _run(self, message: dict[str, Any]) -> None:
        """Call ``send`` by hand; keep it for the task if it waits."""
        assert self._send is not None
        coroutine: Any = self._send(message)
        try:
            future = coroutine.send(None)
        except StopIteration:
            return
        except OSError:
            self._leave("disconnected")
            return
        self._started = _Started(coroutine, future)
        self._busy = True
        self._rouse()

    def _queue(self, data: bytes) -> None:
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        if self._backlog_bytes > self._buffer_limit:
            self._leave("slow_reader")
            if self._task is not None:
                self._task.cancel()

    def _leave(self, reason: GoneReason) -> None:
        if self._gone is None and not self._ended:
            self._gone = reason
            self._backlog.clear()
            self._on_gone(reason)
            self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _listen(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._leave("disconnected")
                return

    async def _keep_alive(self) -> None:
        while True:
            quiet_s = self._time() - self._last_write_s
            if quiet_s >= self._keep_alive_s:
                self._last_write_s = self._time()
                if not self._backlog:
                    self.write(KEEP_ALIVE)
                quiet_s = 0.0
            await asyncio.sleep(self._keep_alive_s - quiet_s)
