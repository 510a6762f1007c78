"""EventStream against a scripted server: slow readers, failures before and after the first byte, keep-alive, disconnects."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from relay.api.errors import ApiError
from relay.api.sse import DONE, KEEP_ALIVE, EventStream, event


class _Server:
    """An ASGI server whose transport can be full."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        while not self.writable.is_set():
            await self.writable.wait()
        self.messages.append(message)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def complete(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False


def _run(script: Callable[[_Server, EventStream, list[str]], Awaitable[None]], **options: Any) -> _Server:
    async def main() -> _Server:
        server = _Server()
        gone: list[str] = []
        settings = {"keep_alive_s": 60.0, "buffer_limit": 1000, **options}
        stream = EventStream([(b"x-request-id", b"r")], on_gone=gone.append, **settings)
        task = asyncio.create_task(stream.serve({"type": "http"}, server.receive, server.send))
        await asyncio.sleep(0)
        await script(server, stream, gone)
        await asyncio.wait_for(task, 5)
        return server

    return asyncio.run(main())


def test_a_write_is_sent_before_it_returns() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        assert server.messages == []  # nothing is sent before the first event
        stream.write(b"one")
        assert [message["type"] for message in server.messages] == ["http.response.start", "http.response.body"]
        stream.write(b"two")
        assert server.body == b"onetwo"
        stream.end(DONE)

    server = _run(script)
    assert server.complete
    assert server.body == b"onetwo" + DONE
    assert (b"x-request-id", b"r") in server.messages[0]["headers"]


def test_a_full_transport_delays_nothing_else_and_keeps_order() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        stream.write(b"1")
        server.writable.clear()
        for piece in (b"2", b"3", b"4"):
            stream.write(piece)
        await asyncio.sleep(0.01)
        assert server.body == b"1"
        server.writable.set()
        stream.write(b"5")
        await asyncio.sleep(0.01)
        assert server.body == b"12345"
        stream.write(b"6")  # back to direct writing
        assert server.body == b"123456"
        stream.end(b"7")

    assert _run(script).body == b"1234567"


def test_full_from_the_start() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        server.writable.clear()
        stream.write(b"1")
        stream.end(b"2")
        await asyncio.sleep(0.01)
        assert server.messages == []
        server.writable.set()

    server = _run(script)
    assert [message["type"] for message in server.messages].index("http.response.start") == 0
    assert server.body == b"12"
    assert server.complete


def test_a_slow_reader_is_cut_off_at_the_limit() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        stream.write(b"x")
        server.writable.clear()
        for _ in range(11):
            stream.write(b"y" * 100)
            assert gone == []
        stream.write(b"z")
        stream.write(b"z" * 100)
        assert gone == ["slow_reader"]

    server = _run(script)
    assert not server.complete
    assert server.body == b"x"


def test_a_failure_before_the_first_event_has_a_status() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        stream.fail(ApiError("none", status=503, code="no_workers", retry_after_s=2))

    server = _run(script)
    assert server.messages[0]["status"] == 503
    headers = dict(server.messages[0]["headers"])
    assert headers[b"retry-after"] == b"2"
    assert headers[b"x-request-id"] == b"r"
    assert b'"code":"no_workers"' in server.body


def test_a_failure_later_is_an_event() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        stream.write(event(b"{}"))
        stream.fail(ApiError("lost", status=503, code="worker_lost"))

    server = _run(script)
    assert server.body.startswith(event(b"{}") + b'data: {"error":')
    assert server.body.endswith(DONE)
    assert server.complete


def test_keep_alive_comments_fill_silence_and_start_the_response() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        while server.body.count(KEEP_ALIVE) < 2:
            await asyncio.sleep(0.005)
        stream.end(DONE)

    assert _run(script, keep_alive_s=0.01).complete


def test_a_disconnect_is_told_once_and_ends_the_response() -> None:
    told: list[str] = []

    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        stream.write(b"1")
        server.gone.set()
        while not gone:
            await asyncio.sleep(0)
        stream.write(b"2")
        stream.end(b"3")
        told.extend(gone)

    assert _run(script).body == b"1"
    assert told == ["disconnected"]


def test_a_disconnect_while_the_transport_is_full() -> None:
    async def script(server: _Server, stream: EventStream, gone: list[str]) -> None:
        stream.write(b"1")
        server.writable.clear()
        stream.write(b"2")
        await asyncio.sleep(0.01)
        server.gone.set()
        await asyncio.sleep(0.01)
        assert gone == ["disconnected"]
        server.writable.set()  # as servers do when a connection is lost

    _run(script)
