"""Bad input: a clean 4xx with OpenAI's error object and the field at fault; nothing reaches the gateway."""

import json
from typing import Any

import httpx
import pytest
from api_fakes import FakeGateway

from relay.api.validation import ApiLimits
from relay.control.contract import RequestFailure

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def _error(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


SHARED = [
    ("n", [0, -1, 129, 1.5, "2", True, [], 10**30]),
    ("temperature", [-1, -1e-9, 2.1, "hot", True, {}]),
    ("top_p", [-0.1, 1.1, "x"]),
    ("top_k", [-2, 1.5, 2**31, "x"]),
    ("min_p", [-0.1, 1.1]),
    ("presence_penalty", [-2.1, 50]),
    ("frequency_penalty", [-50, 2.1, "x"]),
    ("repetition_penalty", [0, -1, 1000, "x"]),
    ("seed", [2**64, -(2**63) - 1, 1.5, "x"]),
    ("stop", ["", [""], ["a", ""], 5, [5], ["x"] * 17, "y" * 2000]),
    ("stop_token_ids", [[-1], [10**9], ["a"], 5, [True], [2**70]]),
    (
        "logit_bias",
        [
            {"-1": 1},
            {"abc": 1},
            {"1.5": 1},
            {"": 1},
            {"999999999": 5},
            {"10": "x"},
            {"10": None},
            {"10": 101},
            {"٣": 1},
            5,
        ],
    ),
    ("max_tokens", [-1, 1.5, "x", 10**12, 2**63, 600]),
    ("min_tokens", [-1, 5000, "x", 1.5, 17]),
    ("stream", ["yes", 1]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("ignore_eos", ["yes"]),
    ("return_token_ids", [5]),
    ("cache_salt", ["s" * 300, 5]),
    ("response_format", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {}, 5]),
    ("model", [5, {}, []]),
]
TEXT_ONLY = [
    (
        "prompt",
        [
            None,
            [],
            [[]],
            5,
            {},
            True,
            [1.5],
            [-1],
            [2**70],
            [10**6],
            [True, "a"],
            [[1], "a"],
            [1, "a"],
            [[1], []],
            [[1.5]],
            "",
        ],
    ),
    ("prompt", [["x"] * 300, "a " * 600, [5] * 512, [5] * 100_000, ["ok", ""], [None]]),
    ("logprobs", [-1, 21, 1.5, "x", True]),
    ("best_of", [3, -1]),
    ("suffix", ["end"]),
]
CHAT_ONLY = [
    ("max_completion_tokens", [0, -3, "x", 1.5, 10**12]),
    ("max_tokens", [0]),
    ("top_logprobs", [-1, 21, 5, 1.5]),
    ("logprobs", [5, "x"]),
    ("tools", [[{"type": "function", "function": {"name": "f"}}], 5]),
    ("tool_choice", ["required", {"type": "function"}]),
    ("chat_template_kwargs", [{"messages": []}, 5]),
    ("functions", [[{"name": "f"}]]),
    ("messages", [None, [], 5, {}, "hi", [5], [[]], [{"role": "user", "content": "refuse this"}]]),
]


def _cases(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(param, value) for param, values in table for value in values]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_bad_values_name_their_field(client: httpx.Client, gateway: FakeGateway, path: str) -> None:
    own = TEXT_ONLY if path == TEXT else CHAT_ONLY
    for param, value in _cases(SHARED + own):
        base: dict[str, Any] = {"prompt": "hello"} if path == TEXT else {"messages": HELLO}
        if param != "max_completion_tokens":
            base["max_tokens"] = 16
        response = client.post(path, json={**base, param: value})
        what = f"{param}={str(value)[:60]}: {response.text[:200]}"
        assert response.status_code == 400, what
        error = _error(response)
        fits = param in ("max_tokens", "max_completion_tokens") and error["code"] == "context_length_exceeded"
        assert fits or error["param"].split("[")[0] == param, what
        assert error["type"] == "invalid_request_error"
    assert gateway.submissions == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "param", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_numbers_that_are_not_finite(client: httpx.Client, gateway: FakeGateway, param: str, value: str) -> None:
    raw = f'{{"prompt": "hi", "max_tokens": 2, "{param}" : {value}}}'
    response = client.post(TEXT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert _error(response)["param"] == param
    assert gateway.submissions == []


def test_a_bias_that_is_not_finite(client: httpx.Client) -> None:
    raw = '{"prompt": "hi", "max_tokens": 2, "logit_bias": {"5": 1, "7": NaN}}'
    response = client.post(TEXT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert _error(response)["param"] == "logit_bias"


@pytest.mark.parametrize("message", [{}, {"content": None}])
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_assistants_may_have_said_nothing(client: httpx.Client, role: str, message: dict[str, Any]) -> None:
    response = client.post(CHAT, json={"messages": [{"role": role, **message}], "max_tokens": 1})
    assert response.status_code == 400
    assert _error(response)["param"] == "messages[0].content"
    spoken = [{"role": "assistant", **message}, {"role": role, "content": ""}]
    assert client.post(CHAT, json={"messages": spoken, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:,x"}}],
        [{"type": "text"}],
        [{}],
        [5],
        [{"type": "text", "text": 5}],
        5,
        {},
    ],
)
def test_content_that_is_not_text(client: httpx.Client, content: Any) -> None:
    response = client.post(CHAT, json={"messages": [*HELLO, {"role": "user", "content": content}]})
    assert response.status_code == 400
    assert _error(response)["param"].startswith("messages[1].content")


@pytest.mark.parametrize("field", ["chat_template_kwargs", "message"])
def test_nesting_that_json_allows_and_templates_do_not(client: httpx.Client, field: str) -> None:
    deep = '{"x": ' + "[" * 600 + "]" * 600 + "}"
    message = '{"role": "user", "content": "x", "extra": ' + deep + "}"
    if field == "message":
        raw = f'{{"max_tokens": 1, "messages": [{message}]}}'
    else:
        raw = f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}], "{field}": {deep}}}'
    response = client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "nested too deeply" in _error(response)["message"]


@pytest.mark.parametrize("role", [None, 5, "", "robot"])
def test_roles(client: httpx.Client, role: Any) -> None:
    response = client.post(CHAT, json={"messages": [{"role": role, "content": "x"}]})
    assert response.status_code == 400
    assert _error(response)["param"] == "messages[0].role"


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b'{"model": "x", }', b"[]", b'"x"', b"null", b"123", b"{'a': 1}", b'{"model": "\xff\xfe"}', b"\xff\xfe{\x00}\x00",
     b'{"prompt": "x" x}', b"[" * 20000, b'{"a":' * 20000, b'{"prompt":' + b"[" * 20000, b'{"messages":' + b"[" * 20000,
     b"\x00" * 10, b"NaN", b'{"model":"fake","model":{}}', b'{"prompt":["\xff"]}', b'{"messages":[{"role":"\xff"}]}',
     b'{"prompt":"\\ud800"}', b'{"messages":[{"role":"user","content":"\\udfff"}]}'],
)  # fmt: skip
def test_bodies_that_are_no_requests(client: httpx.Client, gateway: FakeGateway, path: str, raw: bytes) -> None:
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    _error(response)
    assert gateway.submissions == []


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("garbage", 415),
    ],
)
def test_content_types(client: httpx.Client, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = client.post(TEXT, content=json.dumps({"prompt": "hi", "max_tokens": 1}), headers=headers)
    assert response.status_code == status
    if status != 200:
        _error(response)


def test_compressed_bodies_are_refused(client: httpx.Client) -> None:
    response = client.post(
        TEXT, content=b"{}", headers={"content-type": "application/json", "content-encoding": "gzip"}
    )
    assert response.status_code == 415


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_models_are_404(client: httpx.Client, path: str, stream: bool) -> None:
    for model in ("no-such-model", "", "fake2", "../fake"):
        response = client.post(path, json={"model": model, "prompt": "x", "messages": HELLO, "stream": stream})
        assert response.status_code == 404
        error = _error(response)
        assert error["code"] == "model_not_found"
        assert "fake-alias" in error["message"]


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert client.get("/v2/nothing").status_code == 404
    _error(client.get("/v2/nothing"))
    response = client.get(TEXT)
    assert response.status_code == 405
    _error(response)


def test_context_length_names_both_numbers(client: httpx.Client) -> None:
    error = _error(client.post(TEXT, json={"prompt": [5] * 500, "max_tokens": 20}))
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert "520" in error["message"]
    assert client.post(TEXT, json={"prompt": [5] * 500, "max_tokens": 12}).status_code == 200
    assert client.post(TEXT, json={"prompt": [5] * 511}).status_code == 200


def test_a_text_far_too_long_is_refused_without_tokenizing(
    client: httpx.Client, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    for path, body in (
        (TEXT, {"prompt": "a" * 40_000}),
        (CHAT, {"messages": [{"role": "user", "content": "漢" * 11_000}]}),
    ):
        error = _error(client.post(path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]


class TestSmallBody:
    @pytest.fixture
    def limits(self) -> ApiLimits:
        return ApiLimits(max_request_bytes=1000)

    def test_declared_and_chunked_bodies_over_the_limit(self, client: httpx.Client) -> None:
        body = json.dumps({"prompt": "x" * 2000}).encode()
        headers = {"content-type": "application/json"}
        for content in (body, iter([body[:500], body[500:]])):
            response = client.post(TEXT, content=content, headers=headers)
            assert response.status_code == 413
            assert _error(response)["code"] == "request_too_large"
        assert client.post(TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_carry_status_and_retry_after(client: httpx.Client, gateway: FakeGateway, stream: bool) -> None:
    gateway.is_ready = False
    response = client.post(TEXT, json={"prompt": "x", "stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert _error(response) == {
        "message": "No worker is ready.",
        "type": "server_error",
        "param": None,
        "code": "no_workers",
    }
    gateway.is_ready = True
    gateway._queue = 2
    response = client.post(TEXT, json={"prompt": ["x", "y", "z"], "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert _error(response)["code"] == "queue_full"
    assert len(gateway.cancelled) == 2  # the prompts that were queued are taken back
    assert gateway.num_running == 0


def test_a_failure_before_the_first_token_has_its_status(client: httpx.Client, gateway: FakeGateway) -> None:
    gateway.fail_after = (0, RequestFailure(503, "worker_lost", "gone", 3))
    for stream in (False, True):
        response = client.post(TEXT, json={"prompt": "x", "stream": stream, "n": 2})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert _error(response)["code"] == "worker_lost"


def test_a_failure_in_the_stream_is_an_event(client: httpx.Client, gateway: FakeGateway) -> None:
    gateway.fail_after = (2, RequestFailure(503, "worker_lost", "gone"))
    response = client.post(CHAT, json={"messages": HELLO, "stream": True, "temperature": 0})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "worker_lost"
    assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 8}).status_code == 503
