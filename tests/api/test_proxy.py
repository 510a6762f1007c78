"""`relay proxy` between clients and gateways that break: stock clients see one unbroken stream, byte for byte the same text."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from api_fakes import FakeGateway, chat_template
from api_server import served
from hypothesis import given
from hypothesis import strategies as st

from relay.api.app import create_app
from relay.errors import UsageError
from relay.models.tokenizer import Tokenizer
from relay.proxy.app import Proxy, _Passing
from relay.proxy.events import EventBuffer
from relay.proxy.upstream import Upstream

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "日本語 tell me"}], "max_tokens": 30}


class Cutting:
    """A TCP relay before a gateway that breaks connections: of the n-th, only ``cuts[n]`` bytes come back (all, after those)."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port = port
        self.cuts = cuts
        self.requests: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            left = self.cuts.pop(0) if self.cuts else 1 << 40
            threading.Thread(target=self._relay, args=(client, left), daemon=True).start()

    def _relay(self, client: socket.socket, left: int) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as upstream:
            threading.Thread(target=self._up, args=(client, upstream), daemon=True).start()
            while left and (data := upstream.recv(min(left, 4096))):
                left -= len(data)
                try:
                    client.sendall(data)
                except OSError:
                    break
            for end in (client, upstream):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _up(self, client: socket.socket, upstream: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                self.requests.append(data)
                upstream.sendall(data)
            upstream.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)


class Gateways:
    """Two gateways that know nothing of each other, and a proxy."""

    def __init__(self, tokenizer: Tokenizer, cuts: list[list[int]]) -> None:
        self._stack = ExitStack()
        self.fakes = [FakeGateway(tokenizer) for _ in cuts]
        apps = [create_app(fake, tokenizer, chat_template(), served_names=("fake",)) for fake in self.fakes]
        urls = [self._stack.enter_context(served(app)) for app in apps]
        self.relays = [Cutting(int(url.rpartition(":")[2]), own) for url, own in zip(urls, cuts, strict=True)]
        for relay in self.relays:
            self._stack.callback(relay.close)
        self.direct = self._client(urls[0])
        upstreams = [Upstream.parse(relay.url) for relay in self.relays]
        self.url = self._stack.enter_context(served(Proxy(upstreams, 10.0)))
        self.client = self._client(self.url)

    def _client(self, url: str) -> httpx.Client:
        return self._stack.enter_context(httpx.Client(base_url=url, timeout=20, trust_env=False))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def gateways(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Gateways]:
    made = Gateways(tokenizer, request.param)
    yield made
    made.close()


def stream(client: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, list[Any], int]:
    """(text, finish reasons, number of [DONE]); every event must be whole."""
    text, finishes, ends = "", [], 0
    with client.stream("POST", CHAT, json={**body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200, response.read()
        raw = b"".join(response.iter_raw()).decode()
    for event in raw.split("\n\n")[:-1]:
        data = event.split("\n")[-1].removeprefix("data: ")
        if data == "[DONE]":
            ends += 1
            continue
        choice = json.loads(data)["choices"][0]
        text += choice["delta"].get("content") or ""
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, finishes, ends


@pytest.mark.parametrize("gateways", [[[], []]], indirect=True)
def test_what_is_whole_is_passed_on_as_it_is(gateways: Gateways) -> None:
    assert stream(gateways.client, BODY, {"idempotency-key": "k"}) == stream(
        gateways.direct, BODY, {"idempotency-key": "k"}
    )
    assert gateways.client.get("/v1/models").json() == gateways.direct.get("/v1/models").json()
    refused = gateways.client.post(CHAT, json={"messages": 5})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "gateways", [[[0, 900], [700, 30]], [[2500], [0, 0, 1234]], [[600] * 4, [800] * 3]], indirect=True
)
def test_a_stream_that_breaks_goes_on_where_it_was(gateways: Gateways) -> None:
    passed = stream(gateways.client, BODY, {"idempotency-key": "a"})
    assert passed == stream(gateways.direct, BODY, {"idempotency-key": "a"})
    assert passed[1:] == (["length"], 1)
    assert any(b"last-event-id: " in data for relay in gateways.relays for data in relay.requests)


def test_it_asks_for_the_numerics_of_what_was_read_and_not_of_an_answer_that_broke_before() -> None:
    async def send(_: Any) -> None:
        pass

    async def answers() -> list[tuple[bytes, bytes]]:
        passing = _Passing(send)
        for numerics, tokens in ((b"one", b"0"), (b"two", b"2")):
            kind = (b"content-type", b"text/event-stream")
            await passing.head(200, [kind, (b"relay-numerics-id", numerics)])
            await passing.part(b"id: " + tokens + b"\ndata: {}\n\n")
        return passing.resume([])

    assert asyncio.run(answers()) == [(b"last-event-id", b"2"), (b"relay-numerics-id", b"two")]


@pytest.mark.parametrize("gateways", [[[1500, 900], [1100]]], indirect=True)
def test_a_key_is_added_once_a_request(gateways: Gateways) -> None:
    stream(gateways.client, BODY, {})
    stream(gateways.client, BODY, {})
    sent = b"".join(data for relay in gateways.relays for data in relay.requests)
    keys = re.findall(rb"idempotency-key: (\S+)", sent)
    assert len(keys) == 5
    assert len(set(keys)) == 2


@pytest.mark.parametrize("gateways", [[[100], [0]]], indirect=True)
def test_a_plain_answer_that_breaks_is_asked_for_again(gateways: Gateways) -> None:
    answer = gateways.client.post(CHAT, json=BODY, headers={"idempotency-key": "a"}).json()
    again = gateways.direct.post(CHAT, json=BODY, headers={"idempotency-key": "a"}).json()
    assert answer["choices"] == again["choices"]


@pytest.mark.parametrize("gateways", [[[1700], []]], indirect=True)
def test_the_openai_client_sees_one_stream(gateways: Gateways) -> None:
    openai = pytest.importorskip("openai")
    texts = []
    for url in (gateways.url, str(gateways.direct.base_url)):
        with openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=0) as client:
            chunks = client.chat.completions.create(
                model="fake", stream=True, extra_headers={"idempotency-key": "z"}, **BODY
            )
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert texts[0] == texts[1] != ""
    assert any(b"last-event-id: " in data for relay in gateways.relays for data in relay.requests)


@pytest.mark.parametrize("gateways", [[[], []]], indirect=True)
def test_a_client_that_leaves_ends_the_request(gateways: Gateways) -> None:
    for fake in gateways.fakes:
        fake._step_s = 0.01
    with gateways.client.stream("POST", CHAT, json={**BODY, "stream": True, "max_tokens": 400}) as response:
        next(response.iter_raw())
    for _ in range(400):
        if any(fake.cancelled for fake in gateways.fakes):
            break
        gateways.client.get("/live")
    assert sum(len(fake.cancelled) for fake in gateways.fakes) == 1


def test_without_a_gateway_it_says_so() -> None:
    with served(Proxy([Upstream("127.0.0.1", 9)], 0.05)) as url:
        answer = httpx.post(f"{url}{CHAT}", json=BODY, trust_env=False)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_gateway"


@pytest.mark.parametrize("url", ["https://a:1", "a:1", "http://", "http://a:99999", "http://a:1/v1"])
def test_upstreams_that_make_no_sense(url: str) -> None:
    with pytest.raises(UsageError):
        Upstream.parse(url)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_events_are_whole_however_their_bytes_come(sizes: list[int]) -> None:
    events = [b"id: %d\ndata: {%d}\n\n" % (n, n) for n in range(6)] + [b": keep-alive\n\n", b"data: [DONE]\n\n"]
    raw = b"".join(events)
    buffer, out, at = EventBuffer(), b"", 0
    for size in [*sizes, len(raw)]:
        whole = buffer.feed(raw[at : at + size])
        at += size
        out += whole
        assert raw.startswith(out)
        assert out == b"" or out.endswith(b"\n\n")
    assert out == raw
    assert buffer.last_id == b"5"
    assert buffer.done
