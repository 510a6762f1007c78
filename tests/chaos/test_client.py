"""The client of a cluster with several gateways: an answer in pieces, over connections that break, is put together once."""

import asyncio
import json

from relay.chaos.client import ask
from relay.chaos.requests import ChatOrCompletion

BODY = {"model": "m", "prompt": "x", "seed": 9, "stream": True}


def event(number: str, choice: int, text: str, ids: list[int], finish: str | None = None) -> bytes:
    chosen = {"index": choice, "text": text, "token_ids": ids, "finish_reason": finish}
    return f"id: {number}\ndata: {json.dumps({'choices': [chosen]})}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


async def asked(body: dict, *answers: tuple[int, bytes, bool], key: str = "k", timeout_s: float = 20.0):
    """(outcome, headers of each try). Every answer is (status, bytes, whether it comes to its end)."""
    tries: list[dict[str, str]] = []
    waiting = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")[1:-2]
        tries.append(dict(line.split(": ", 1) for line in head))
        await reader.readexactly(int(tries[-1]["content-length"]))
        status, data, whole = waiting.pop(0)
        writer.write(b"HTTP/1.1 %d x\r\nrelay-numerics-id: n1\r\ntransfer-encoding: chunked\r\n\r\n" % status)
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if whole else b""))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        outcome = await ask(host, port, ChatOrCompletion("one", "/v1/completions", body), timeout_s, key=key)
    return outcome, tries


def test_a_broken_stream_goes_on_behind_the_last_event_that_was_whole():
    async def story():
        half = event("2", 0, "b", [2])
        outcome, tries = await asked(
            BODY,
            (200, event("1", 0, "a", [1]) + half[: len(half) // 2], False),
            (503, b"{}", True),
            (200, event("2", 0, "b", [2]) + event("3", 0, "c", [3], "stop") + USAGE, False),
            (200, event("3", 0, "", [], "stop") + USAGE + DONE, True),
        )
        request = ChatOrCompletion("one", "/v1/completions", BODY)
        assert outcome.whole(request) == ""
        assert (outcome.answers[0].text, outcome.answers[0].token_ids) == ("abc", [1, 2, 3])
        assert outcome.answers[0].finishes == [["stop", None]]
        assert [one.get("last-event-id") for one in tries] == [None, "1", "1", "3"]
        assert {one["idempotency-key"] for one in tries} == {"k"}
        assert [one.get("relay-numerics-id") for one in tries] == [None, "n1", "n1", "n1"]
        assert (len(outcome.breaks_s), outcome.resumed_s[0] > 0, outcome.resumed_s[1]) == (2, True, 0.0)

    asyncio.run(story())


def test_what_comes_twice_is_seen():
    async def story():
        twice = (200, event("1", 0, "a", [1]) + event("2", 0, "b", [2], "stop") + DONE, True)
        outcome, _ = await asked(BODY, (200, event("1", 0, "a", [1]), False), twice)
        assert outcome.answers[0].token_ids == [1, 1, 2]
        outcome, _ = await asked(
            BODY,
            (200, event("1", 0, "a", [1], "stop"), False),
            (200, event("1", 0, "", [], "length") + DONE, True),
        )
        assert len(outcome.answers[0].finishes) == 2

    asyncio.run(story())


def test_a_plain_answer_is_asked_for_again_as_a_whole():
    async def story():
        body = BODY | {"stream": False}
        whole = json.dumps({"choices": [{"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "stop"}]})
        outcome, tries = await asked(body, (200, whole.encode()[:20], False), (200, whole.encode(), True))
        assert (outcome.answers[0].token_ids, outcome.ends, outcome.problems) == ([1, 2], 1, [])
        assert ["last-event-id" in one for one in tries] == [False, False]

    asyncio.run(story())


def test_without_a_key_a_broken_connection_is_a_failure():
    async def story():
        outcome, tries = await asked(BODY, (200, event("1", 0, "a", [1]), False), key="")
        assert outcome.problems
        assert len(tries) == 1
        assert "idempotency-key" not in tries[0]

    asyncio.run(story())
