"""Both endpoints over HTTP: streamed equals plain, OpenAI's shapes, choices, logprobs, echo, usage, stop strings."""

import json
from typing import Any

import httpx
import pytest
from api_fakes import MULTIBYTE, FakeGateway
from sse_client import finish_reasons, joined, stream

from relay.api.context import Context
from relay.api.resume import Resume
from relay.api.validation import ApiLimits
from relay.models.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def _body(path: str, prompt: str = "Once upon a time", **fields: Any) -> dict[str, Any]:
    asked = {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
    return {"model": "fake", "temperature": 0, "max_tokens": 24, **asked, **fields}


def _plain(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("prompt", ["Once upon a time", MULTIBYTE, "  tabs\t\tand\n\nlines  "])
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.3, "seed": 7, "n": 3}, {"max_tokens": 1}, {"max_tokens": 7, "return_token_ids": True}],
)
def test_streamed_equals_plain(client: httpx.Client, path: str, prompt: str, fields: dict[str, Any]) -> None:
    body = _body(path, prompt, **fields)
    plain = _plain(client, path, body)
    chunks = stream(client, path, {**body, "stream_options": {"include_usage": True}})
    usage_chunk = chunks.pop()
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"] == plain["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert joined(chunks) == {choice["index"]: _text(choice) for choice in plain["choices"]}
    assert finish_reasons(chunks) == {choice["index"]: [choice["finish_reason"]] for choice in plain["choices"]}
    assert plain["usage"]["total_tokens"] == plain["usage"]["prompt_tokens"] + plain["usage"]["completion_tokens"]
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    if body.get("return_token_ids"):
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
        assert ids == plain["choices"][0]["token_ids"]
        holder, first = (plain["choices"][0], chunks[0]["choices"][0]) if path == TEXT else (plain, chunks[0])
        assert holder["prompt_token_ids"] == first["prompt_token_ids"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_shapes(client: httpx.Client, path: str) -> None:
    plain = _plain(client, path, _body(path))
    chat = path == CHAT
    assert set(plain) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert plain["object"] == ("chat.completion" if chat else "text_completion")
    assert plain["id"].startswith("chatcmpl-" if chat else "cmpl-")
    assert plain["system_fingerprint"] == "numerics-0"
    [choice] = plain["choices"]
    assert set(choice) == {"index", "message" if chat else "text", "logprobs", "finish_reason", "stop_reason"}
    if chat:
        assert set(choice["message"]) == {"role", "content", "refusal"}
    chunks = stream(client, path, _body(path))
    for key in ("id", "object", "created", "model", "system_fingerprint"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert chunks[0]["object"] == ("chat.completion.chunk" if chat else "text_completion")
    assert all("usage" not in chunk for chunk in chunks)
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert {"index", "finish_reason", "logprobs", "delta" if chat else "text"} <= set(choice)
    if chat:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"]
    assert len({_plain(client, path, _body(path, max_tokens=1))["id"] for _ in range(3)}) == 3


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_stop_strings_cut_exactly(client: httpx.Client, gateway: FakeGateway, path: str) -> None:
    whole = _text(_plain(client, path, _body(path))["choices"][0])
    tokens = _plain(client, path, _body(path))["usage"]["completion_tokens"]
    assert len(whole) > 20
    for start, size in ((3, 2), (7, 5), (len(whole) // 2, 8), (1, 1)):
        stop = whole[start : start + size]
        want = whole[: whole.find(stop)]
        for body in (_body(path, stop=stop), _body(path, stop=[stop, "never there"])):
            plain = _plain(client, path, body)
            assert _text(plain["choices"][0]) == want
            assert plain["choices"][0]["finish_reason"] == "stop"
            assert plain["choices"][0]["stop_reason"] == stop
            assert plain["usage"]["completion_tokens"] <= tokens
            chunks = stream(client, path, body)
            assert joined(chunks).get(0, "") == want
            assert finish_reasons(chunks) == {0: ["stop"]}
        included = _plain(client, path, _body(path, stop=stop, include_stop_str_in_output=True))
        assert _text(included["choices"][0]) == want + stop
    assert gateway.num_running == 0
    for none in (None, []):
        assert _text(_plain(client, path, _body(path, stop=none))["choices"][0]) == whole


def test_a_stop_string_ends_one_choice_of_several(client: httpx.Client, gateway: FakeGateway) -> None:
    body = _body(TEXT, temperature=1.0, seed=5, n=3, max_tokens=40)
    texts = [choice["text"] for choice in _plain(client, TEXT, body)["choices"]]
    stop = texts[1][6:10]
    assert stop not in texts[0] + texts[2]
    stopped = _plain(client, TEXT, {**body, "stop": stop})["choices"]
    assert [choice["text"] for choice in stopped] == [texts[0], texts[1][: texts[1].find(stop)], texts[2]]
    assert gateway.finished_choices == [(2, 1)]
    assert gateway.cancelled == []


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_several_tokens_in_one_delivery_change_nothing(client: httpx.Client, gateway: FakeGateway, path: str) -> None:
    """Also where a stop string is complete in the middle of a delivery: what follows it there is overshoot."""
    logprobs = {"logprobs": 2} if path == TEXT else {"logprobs": True, "top_logprobs": 2}
    details = {"return_token_ids": True, "relay_capture": True, **logprobs}
    whole = _text(_plain(client, path, _body(path))["choices"][0])
    for stop in (None, whole[len(whole) // 2 :][:3], whole[5:9]):
        body = _body(path, stop=stop, **details)
        answers = []
        for gateway.burst in (1, 3, 7):
            answer = _plain(client, path, body)
            chunks = stream(client, path, body)
            assert joined(chunks).get(0, "") == _text(answer["choices"][0])
            ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
            assert ids == answer["choices"][0]["token_ids"]
            assert len(ids) == answer["usage"]["completion_tokens"]
            answer["choices"][0]["relay"].pop(
                "kv_digests"
            )  # come with the engine's finish, which a stop string precedes
            answers.append((answer["choices"], answer["usage"]))
        assert answers[0] == answers[1] == answers[2]
    assert gateway.num_running == 0


def test_stop_token_ids_end_and_are_not_shown(client: httpx.Client) -> None:
    whole = _plain(client, TEXT, _body(TEXT, return_token_ids=True))["choices"][0]
    token = whole["token_ids"][3]
    cut = _plain(client, TEXT, _body(TEXT, return_token_ids=True, stop_token_ids=[token]))["choices"][0]
    end = whole["token_ids"].index(token) + 1
    assert cut["token_ids"] == whole["token_ids"][:end]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", token)
    assert cut["text"] == _plain(client, TEXT, _body(TEXT, max_tokens=end - 1))["choices"][0]["text"]


def test_prompt_lists_number_choices_over_prompts(client: httpx.Client) -> None:
    prompts = ["one two", "three", "four five six"]
    alone = [_plain(client, TEXT, _body(TEXT, prompt)) for prompt in prompts]
    body = {**_body(TEXT, n=2), "prompt": prompts}
    together = _plain(client, TEXT, body)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    for index, choice in enumerate(together["choices"]):
        assert choice["text"] == alone[index // 2]["choices"][0]["text"]
    assert together["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert joined(stream(client, TEXT, body)) == {choice["index"]: choice["text"] for choice in together["choices"]}


def test_token_id_prompts(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once upon a time")
    by_text = _plain(client, TEXT, _body(TEXT))
    by_ids = _plain(client, TEXT, {**_body(TEXT), "prompt": ids})
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"]["prompt_tokens"] == len(ids)
    both = _plain(client, TEXT, {**_body(TEXT), "prompt": [ids, ids[:2]]})
    assert both["usage"]["prompt_tokens"] == len(ids) + 2
    assert both["choices"][0]["text"] == by_text["choices"][0]["text"]


@pytest.mark.parametrize("prompt", ["Once upon a time", MULTIBYTE])
def test_echo(client: httpx.Client, tokenizer: Tokenizer, prompt: str) -> None:
    text = _plain(client, TEXT, _body(TEXT, prompt))["choices"][0]["text"]
    for asked in (prompt, tokenizer.encode(prompt)):
        body = {**_body(TEXT), "prompt": asked, "echo": True}
        assert _plain(client, TEXT, body)["choices"][0]["text"] == prompt + text
        assert joined(stream(client, TEXT, body)) == {0: prompt + text}


def test_max_tokens_zero_computes_nothing(client: httpx.Client, gateway: FakeGateway) -> None:
    for echo, want in ((False, ""), (True, "Once upon a time")):
        body = _body(TEXT, max_tokens=0, echo=echo)
        answer = _plain(client, TEXT, body)
        assert answer["choices"][0]["text"] == want
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert joined(stream(client, TEXT, body)).get(0) == want
    assert gateway.submissions == []
    assert client.post(TEXT, json=_body(TEXT, max_tokens=0, echo=True, logprobs=1)).status_code == 400


@pytest.mark.parametrize("prompt", ["Once upon a time", MULTIBYTE])
def test_completion_logprobs_line_up(client: httpx.Client, prompt: str) -> None:
    body = _body(TEXT, prompt, logprobs=2, max_tokens=12)
    plain = _plain(client, TEXT, body)
    [choice] = plain["choices"]
    logprobs = choice["logprobs"]
    count = plain["usage"]["completion_tokens"]
    assert {key: len(value) for key, value in logprobs.items()} == dict.fromkeys(logprobs, count)
    assert choice["text"] == _plain(client, TEXT, _body(TEXT, prompt, max_tokens=12))["choices"][0]["text"]
    if prompt.isascii():
        assert "".join(logprobs["tokens"]) == choice["text"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value == max(top.values()) <= 0
        assert len(top) <= 3
    streamed: dict[str, list[Any]] = {key: [] for key in logprobs}
    for chunk in stream(client, TEXT, body):
        for key, value in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[key] += value
    assert streamed == logprobs


def test_chat_logprobs(client: httpx.Client) -> None:
    body = _body(CHAT, MULTIBYTE, logprobs=True, top_logprobs=2, max_tokens=8)
    content = _plain(client, CHAT, body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    raw = bytes(byte for entry in content for byte in entry["bytes"])
    assert raw.decode(errors="replace") == _plain(client, CHAT, body)["choices"][0]["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    streamed = [
        e for c in stream(client, CHAT, body) for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    assert (
        _plain(client, CHAT, _body(CHAT, logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    )


def test_fields_reach_the_gateway(client: httpx.Client, gateway: FakeGateway) -> None:
    sampling = {"temperature": 0.7, "top_k": -1, "top_p": 0, "min_p": 0.1, "seed": -1, "logit_bias": {"10": 5}}
    penalties = {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1}
    others = {"min_tokens": 2, "cache_salt": "salt", "ignore_eos": True, "n": 2, "relay_capture": True}
    ignored = {"user": "me", "store": True, "metadata": {}, "unknown": {"a": [1]}}
    body = _body(TEXT, **{**sampling, **penalties, **others, **ignored})
    _plain(client, TEXT, body)
    [submission] = gateway.submissions
    params = submission.params
    assert (submission.n, submission.cache_salt, submission.capture) == (2, "salt", True)
    assert (params.max_tokens, params.min_tokens, params.seed, params.top_k) == (24, 2, 2**64 - 1, 0)
    assert 0 < params.top_p < 1e-300
    assert (params.temperature, params.min_p, params.logit_bias, params.eos_token_ids) == (0.7, 0.1, {10: 5.0}, ())
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)


def test_defaults(client: httpx.Client, gateway: FakeGateway) -> None:
    _plain(client, TEXT, {"prompt": ["a", "a"]})
    _plain(client, CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": None})
    one, two, chat = gateway.submissions
    assert one.params.max_tokens == 16
    assert one.params.temperature == 1.0
    assert one.params.eos_token_ids == (0, 2)
    assert chat.params.max_tokens == 512 - len(chat.token_ids)
    assert len({one.params.seed, two.params.seed, chat.params.seed}) == 3


def test_seeds_can_be_drawn_from_one_seed(gateway: FakeGateway, tokenizer: Tokenizer) -> None:
    def drawn(seed: int | None) -> list[int]:
        context = Context(gateway, tokenizer, None, ("fake",), ApiLimits(), seed)
        return [context.seed(Resume(), 0) for _ in range(3)]

    assert drawn(7) == drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)
    assert all(0 <= seed < 2**64 for seed in drawn(7) + drawn(None))


def test_capture(client: httpx.Client) -> None:
    body = _body(TEXT, relay_capture=True, max_tokens=4)
    capture = _plain(client, TEXT, body)["choices"][0]["relay"]
    assert len(capture["logit_digests"]) == 4
    assert capture["kv_digests"] == ["00" * 16]
    assert stream(client, TEXT, body)[-1]["choices"][0]["relay"] == capture
    assert "relay" not in _plain(client, TEXT, _body(TEXT))["choices"][0]


def test_content_forms_are_equal(client: httpx.Client) -> None:
    def ask(message: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "go"}]
        answer = _plain(client, CHAT, {"messages": messages, "temperature": 0, "max_tokens": 8})
        return {key: answer[key] for key in ("choices", "usage")}

    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": " hello"}]
    assert ask({"role": "user", "content": parts}) == ask({"role": "user", "content": "Say hello"})
    empty = ask({"role": "assistant", "content": ""})
    assert (
        ask({"role": "assistant", "content": None})
        == empty
        == ask({"role": "assistant"})
        == ask({"role": "assistant", "content": []})
    )


@pytest.mark.parametrize(
    "fields",
    [{"tools": []}, {"tools": None}, {"tools": [{}], "tool_choice": "none"}, {"response_format": {"type": "text"}}],
)
def test_trivial_forms_are_accepted(client: httpx.Client, fields: dict[str, Any]) -> None:
    _plain(client, CHAT, _body(CHAT, **fields))


def test_request_ids(client: httpx.Client) -> None:
    kept = client.post(TEXT, json=_body(TEXT, max_tokens=1), headers={"x-request-id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    for headers in ({}, {"x-request-id": "x" * 1000}):
        made = client.post(TEXT, json=_body(TEXT, max_tokens=1), headers=headers).headers["x-request-id"]
        assert len(made) == 16
    assert client.post(TEXT, json={}, headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    with client.stream("POST", TEXT, json=_body(TEXT, stream=True), headers={"x-request-id": "mine-3"}) as response:
        assert response.headers["x-request-id"] == "mine-3"
        assert b"data: [DONE]" in response.read()


def test_answers_are_json_without_raw_newlines(client: httpx.Client) -> None:
    assert "\n" not in client.post(TEXT, json=_body(TEXT, "lines\n\n", echo=True)).text
    assert json.loads(client.post(TEXT, json=_body(TEXT, "a\n", echo=True)).text)["choices"][0]["text"].startswith(
        "a\n"
    )


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_request_sent_before_the_first_worker_has_a_fingerprint(
    client: httpx.Client, gateway: FakeGateway, path: str
) -> None:
    for streamed in (False, True):
        gateway.name_numerics("")
        gateway.numerics_after_submit = "numerics-1"
        answers = stream(client, path, _body(path)) if streamed else [_plain(client, path, _body(path))]
        assert {answer["system_fingerprint"] for answer in answers} == {"numerics-1"}


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_is_answered_without_a_fingerprint(client: httpx.Client, gateway: FakeGateway, streamed: bool) -> None:
    gateway.name_numerics("")
    response = client.post(TEXT, json=_body(TEXT, max_tokens=0, echo=True, stream=streamed))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "no_workers"
