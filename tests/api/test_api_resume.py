"""A stream that broke anywhere, asked for again with its idempotency key and the id of the last event: exactly the rest comes."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from api_fakes import FakeGateway, chat_template
from api_server import served

from relay.api.app import create_app
from relay.api.resume import Resume, event_id
from relay.models.tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = {"idempotency-key": "a-key"}


@dataclass
class Seen:
    """What a client has of a stream."""

    events: list[tuple[str, str]] = field(default_factory=list)  # (id, data)

    def text(self) -> dict[int, str]:
        texts: dict[int, str] = {}
        for choice in self._choices():
            part = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + part
        return texts

    def of(self, name: str) -> dict[int, list[Any]]:
        """All values of one key of choices, lists joined."""
        found: dict[int, list[Any]] = {}
        for choice in self._choices():
            value = choice.get(name)
            if isinstance(value, dict):
                value = value.get("content") or list(
                    zip(value["tokens"], value["token_logprobs"], value["text_offset"], strict=True)
                )
            if value is not None:
                found.setdefault(choice["index"], []).extend(value if isinstance(value, list) else [value])
        return found

    def usage(self) -> list[Any]:
        return [event["usage"] for event in self._json() if event.get("usage")]

    def ids(self) -> set[str]:
        return {event["id"] for event in self._json()}

    def _json(self) -> list[dict[str, Any]]:
        return [json.loads(data) for _, data in self.events if data != "[DONE]"]

    def _choices(self) -> Iterator[dict[str, Any]]:
        for event in self._json():
            yield from event["choices"]


def read(client: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str]) -> Seen:
    with client.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        raw = b"".join(response.iter_raw()).decode()
        assert response.status_code == 200, raw
    seen = Seen()
    for event in raw.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        seen.events.append((fields.get("id", ""), fields["data"]))
    return seen


REQUESTS = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 12}),
    "greedy": (TEXT, {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}),
    "stop string": (TEXT, {"prompt": "the quick brown fox", "max_tokens": 40, "stop": ["e"], "temperature": 0.7}),
    "held back": (TEXT, {"prompt": "the quick brown fox", "max_tokens": 24, "stop": ["a b c d", "nothing at all"]}),
    "characters of many tokens": (TEXT, {"prompt": "日本語🙂", "max_tokens": 30}),
    "two choices": (CHAT, {"messages": [{"role": "user", "content": "machines"}], "max_tokens": 9, "n": 2}),
    "two prompts": (TEXT, {"prompt": ["stories about", "日本語"], "max_tokens": 8, "n": 2}),
    "usage": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "bread"}],
            "max_tokens": 7,
            "stream_options": {"include_usage": True},
        },
    ),
    "logprobs": (TEXT, {"prompt": "electric sheep", "max_tokens": 8, "logprobs": 2}),
    "chat logprobs": (
        CHAT,
        {"messages": [{"role": "user", "content": "sheep"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 2},
    ),
    "token ids": (TEXT, {"prompt": "electric sheep", "max_tokens": 8, "return_token_ids": True}),
    "echo": (TEXT, {"prompt": "electric sheep", "max_tokens": 5, "echo": True}),
}


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_rest_after_every_event_is_exactly_the_rest(
    client: httpx.Client, gateway: FakeGateway, name: str, burst: int
) -> None:
    path, body = REQUESTS[name]
    gateway.burst = burst
    whole = read(client, path, body, KEY)
    assert whole.events[-1] == ("", "[DONE]")
    assert all(event_id for event_id, _ in whole.events[:-1])
    gateway.burst = 1
    many = body.get("n", 1) > 1 or isinstance(body.get("prompt"), list)
    for cut in range(len(whole.events) - 1):
        last, _ = whole.events[cut]
        rest = read(client, path, body, {**KEY, "last-event-id": last})
        both = Seen(whole.events[: cut + 1] + rest.events)
        assert both.text() == whole.text(), f"cut after {whole.events[cut]}"
        # Of one choice the end is said again, if [DONE] was not read.
        times = 2 if not many and Seen(whole.events[: cut + 1]).of("finish_reason") else 1
        for key in ("finish_reason", "stop_reason"):
            assert both.of(key) == {choice: values * times for choice, values in whole.of(key).items()}
        assert both.of("logprobs") == whole.of("logprobs")
        if not many:
            assert both.of("token_ids") == whole.of("token_ids")
        assert both.usage()[-1:] == whole.usage()
        assert both.ids() == whole.ids()
        assert rest.events[-1] == ("", "[DONE]")


@pytest.mark.parametrize("name", ["chat", "characters of many tokens"])
def test_ids_are_tokens_read(client: httpx.Client, name: str) -> None:
    path, body = REQUESTS[name]
    seen = read(client, path, {**body, "stream_options": {"include_usage": True}}, {})
    ids = [int(event_id) for event_id, _ in seen.events[:-1]]
    assert ids == sorted(ids)
    assert ids[-1] == seen.usage()[0]["completion_tokens"]
    if path == CHAT:
        assert ids[0] == 0


def test_two_gateways_that_know_nothing_of_each_other_give_the_same_stream(tokenizer: Tokenizer) -> None:
    path, body = REQUESTS["chat"]
    streams = []
    for _ in range(2):
        app = create_app(FakeGateway(tokenizer), tokenizer, chat_template(), served_names=("fake",))
        with served(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
            streams.append(read(client, path, body, KEY))
    first, second = streams
    assert first.text() == second.text()
    assert first.ids() == second.ids()
    assert [event_id for event_id, _ in first.events] == [event_id for event_id, _ in second.events]


def test_without_a_key_or_with_another_the_tokens_are_others(client: httpx.Client) -> None:
    path, body = REQUESTS["chat"]
    texts = [
        read(client, path, body, headers).text()[0] for headers in ({}, {}, KEY, {"idempotency-key": "other"}, KEY)
    ]
    assert texts[2] == texts[4]
    assert len(set(texts)) == 4


def test_a_key_is_its_callers_own(client: httpx.Client) -> None:
    path, body = REQUESTS["chat"]
    callers = [KEY, KEY | {"authorization": "Bearer a"}, KEY | {"authorization": "Bearer b"}]
    assert len({read(client, path, body, headers).text()[0] for headers in callers}) == 3


def test_a_seed_that_is_given_counts(client: httpx.Client) -> None:
    path, body = REQUESTS["chat"]
    assert read(client, path, {**body, "seed": 5}, KEY).text() == read(client, path, {**body, "seed": 5}, {}).text()


def test_prompts_and_choices_of_one_key_differ(client: httpx.Client, gateway: FakeGateway) -> None:
    body = {"prompt": ["same", "same"], "max_tokens": 8, "n": 2}
    answer = client.post(TEXT, json=body, headers=KEY).json()
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    first, second = gateway.submissions
    assert first.resume_key != second.resume_key
    assert len(first.resume_key) == 16


def test_a_plain_answer_is_the_same_bytes_of_text_again(client: httpx.Client) -> None:
    path, body = REQUESTS["chat"]
    first, second = (client.post(path, json=body, headers=KEY).json() for _ in range(2))
    assert first | {"created": 0} == second | {"created": 0}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"last-event-id": "3"}, "idempotency_key_required"),
        (KEY | {"last-event-id": "x"}, "invalid_header"),
        (KEY | {"last-event-id": ""}, "invalid_header"),
        (KEY | {"last-event-id": "-1"}, "invalid_header"),
        (KEY | {"last-event-id": "1,2"}, "invalid_header"),
        (KEY | {"last-event-id": "9999999999"}, "invalid_header"),
        (KEY | {"last-event-id": "999999"}, "invalid_header"),
        ({"idempotency-key": ""}, "invalid_header"),
        ({"idempotency-key": "k" * 256}, "invalid_header"),
    ],
)
def test_headers_that_make_no_sense(client: httpx.Client, headers: dict[str, str], code: str) -> None:
    path, body = REQUESTS["chat"]
    response = client.post(path, json={**body, "stream": True}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code


def test_only_a_stream_can_be_continued(client: httpx.Client) -> None:
    path, body = REQUESTS["chat"]
    response = client.post(path, json=body, headers=KEY | {"last-event-id": "1"})
    assert response.status_code == 400


def test_what_was_read_was_computed_with_these_numerics(client: httpx.Client, gateway: FakeGateway) -> None:
    path, body = REQUESTS["chat"]
    with client.stream("POST", path, json={**body, "stream": True}, headers=KEY) as response:
        numerics_id = response.headers["relay-numerics-id"]
    assert numerics_id == "numerics-0"
    read(client, path, body, {**KEY, "last-event-id": "0", "relay-numerics-id": numerics_id})
    read(client, path, body, {**KEY, "last-event-id": "2", "relay-numerics-id": numerics_id})
    assert [submission.numerics_id for submission in gateway.submissions[-2:]] == ["", "numerics-0"]


@pytest.mark.parametrize("name", ["chat", "greedy"])
def test_an_answer_names_what_it_is_computed_with_and_not_what_its_gateway_met_first(
    client: httpx.Client, gateway: FakeGateway, name: str
) -> None:
    """In a rolling upgrade, and ever after it."""
    gateway.computes_with = "numerics-1"
    path, body = REQUESTS[name]
    plain = client.post(path, json=body)
    assert plain.headers["relay-numerics-id"] == plain.json()["system_fingerprint"] == "numerics-1"
    with client.stream("POST", path, json={**body, "stream": True}, headers=KEY) as response:
        assert response.headers.get_list("relay-numerics-id") == ["numerics-1"]
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert {event["system_fingerprint"] for event in events} == {"numerics-1"}


@pytest.mark.parametrize("stream", [True, False])
def test_the_newest_connection_gets_the_answer_and_nothing_is_computed_twice(
    client: httpx.Client, gateway: FakeGateway, stream: bool
) -> None:
    gateway._step_s = 0.01
    path = CHAT
    body = {"messages": [{"role": "user", "content": "windows"}], "max_tokens": 40, "stream": stream}
    older: list[bytes] = []

    def first() -> None:
        with httpx.Client(base_url=client.base_url, timeout=20, trust_env=False) as other:
            older.append(other.post(path, json=body, headers=KEY).content)

    thread = threading.Thread(target=first)
    thread.start()
    deadline = time.monotonic() + 20
    while not (gateway._running and len(gateway._running[0].output) > 5):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    newer = client.post(path, json=body, headers=KEY).content
    thread.join(20)
    assert b'"code":"replaced"' in older[0]
    assert len(gateway.submissions) == 1
    assert gateway.cancelled == []
    again = client.post(path, json=body, headers=KEY).content
    if stream:
        assert _parsed(newer).text() == _parsed(again).text()
        assert _parsed(newer).of("finish_reason") == {0: ["length"]}
    else:
        assert json.loads(newer) | {"created": 0} == json.loads(again) | {"created": 0}


def _parsed(raw: bytes) -> Seen:
    seen = Seen()
    for event in raw.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        seen.events.append((fields.get("id", ""), fields["data"]))
    return seen


def test_derivation_depends_on_everything() -> None:
    one = Resume(b"d" * 32)
    values = {
        one.resume_key("m", 0),
        one.resume_key("m", 1),
        one.resume_key("n", 0),
        Resume(b"e" * 32).resume_key("m", 0),
    }
    assert len(values) == 4
    assert Resume().resume_key("m", 0) == b""
    assert 0 <= one.seed(0) < 2**64
    assert one.seed(0) != one.seed(1)
    assert event_id([12, 9]) == b"id: 12,9\n"
