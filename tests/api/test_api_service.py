"""What surrounds generation: clients that leave, slow readers, models, probes, metrics."""

import json
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest
from api_fakes import FakeGateway
from prometheus_client.parser import text_string_to_metric_families

from relay.api.validation import ApiLimits
from relay.models.tokenizer import Tokenizer

TEXT = "/v1/completions"


def _open(base_url: str, body: dict[str, object]) -> socket.socket:
    """A raw connection with one request sent."""
    url = urlsplit(base_url)
    raw = json.dumps(body).encode()
    connection = socket.create_connection((url.hostname or "", url.port or 0), timeout=10)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def _eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def gateway(tokenizer: Tokenizer) -> FakeGateway:
    return FakeGateway(tokenizer, context=1 << 20)


LONG = {"prompt": ["one", "two"], "n": 2, "max_tokens": 1 << 19, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_choices(base_url: str, gateway: FakeGateway, stream: bool) -> None:
    connection = _open(base_url, {**LONG, "stream": stream})
    _eventually(lambda: gateway.num_running == 4)
    if stream:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    connection.close()
    _eventually(lambda: gateway.num_running == 0)
    assert sorted(gateway.cancelled) == [1, 2]
    metrics = httpx.get(base_url + "/metrics", trust_env=False, verify=False).text
    assert 'relay_clients_gone_total{model_name="fake",reason="disconnected"} 1.0' in metrics


class TestSlowReader:
    @pytest.fixture
    def limits(self) -> ApiLimits:
        return ApiLimits(stream_buffer_bytes=20_000)

    def test_is_cut_off(self, base_url: str, gateway: FakeGateway) -> None:
        gateway._step_s = 0.0
        url = urlsplit(base_url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.hostname, url.port))
        raw = json.dumps({**LONG, "stream": True, "n": 64, "return_token_ids": True, "logprobs": 20}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        connection.sendall(head.encode() + raw)
        _eventually(lambda: bool(gateway.cancelled))
        _eventually(lambda: gateway.num_running == 0)
        metrics = httpx.get(base_url + "/metrics", trust_env=False, verify=False).text
        assert 'relay_clients_gone_total{model_name="fake",reason="slow_reader"} 1.0' in metrics
        connection.close()


def test_models(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["fake", "fake-alias"]
    assert listed["data"][0]["max_model_len"] == 1 << 20
    assert client.get("/v1/models/fake-alias").json()["id"] == "fake-alias"
    missing = client.get("/v1/models/nope/nope")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_probes(client: httpx.Client, gateway: FakeGateway) -> None:
    for path in ("/live", "/ready", "/health"):
        assert client.get(path).json() == {"status": "ok"}
    gateway.is_ready = False
    gateway.is_healthy = (False, "worker d0 makes no progress")
    assert client.get("/live").status_code == 200
    assert client.get("/ready").status_code == 503
    response = client.get("/health")
    assert response.status_code == 503
    assert "no progress" in response.json()["reason"]
    assert client.get("/status").json() == {"workers": [], "running": 0}
    assert client.get("/version").json()["numerics_id"] == "numerics-0"


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    for stream in (False, True):
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": stream}
        assert client.post(TEXT, json=body).status_code == 200
    client.post(TEXT, json={"n": 0})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    model = ("model_name", "fake")
    assert samples["vllm:time_to_first_token_seconds_count", model] == 2
    assert samples["vllm:inter_token_latency_seconds_count", model] == 8
    assert samples["vllm:e2e_request_latency_seconds_count", model] == 2
    assert samples["vllm:generation_tokens_total", model] == 10
    assert samples["vllm:request_success_total", ("finished_reason", "length"), model] == 2
    assert samples["vllm:num_requests_running", model] == 0
    assert samples["relay_requests_resumed_total", ("cause", "connection")] == 3
    assert samples["relay_http_responses_total", ("endpoint", "completions"), ("status", "200")] == 2
    assert samples["relay_http_responses_total", ("endpoint", "completions"), ("status", "400")] == 1
    buckets = [value for (name, *_), value in samples.items() if name == "vllm:inter_token_latency_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 8


def test_probes_answer_while_a_long_text_is_tokenized(
    client: httpx.Client, base_url: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(text: str, add_special: bool = True) -> list[int]:
        time.sleep(1.0)
        return [5]

    monkeypatch.setattr(tokenizer, "encode", slow)
    connection = _open(base_url, {"prompt": "x", "max_tokens": 1})
    began = time.monotonic()
    assert client.get("/live").status_code == 200
    answered = time.monotonic()
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert answered - began < time.monotonic() - answered  # long before the tokenizer was done
    connection.close()
