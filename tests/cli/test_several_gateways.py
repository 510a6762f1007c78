"""Two real gateways on one port, killed in the middle of streams: through `relay proxy`, or by resuming, clients get every byte."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest
from tests.cli.serving import ENVIRONMENT, PATIENCE_S, Serve, running, wait_gone, write_tiny_model
from tests.cli.streams import ask_all, check_whole

TOKENS = 300
ARGUMENTS = ["--backend", "cpu", "--gateways", "2", "--threads", "1", "--max-num-batched-tokens", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(model, cache):
    server = Serve(model, cache, *ARGUMENTS).ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def proxy(server):
    command = [sys.executable, "-m", "relay.cli.main", "proxy", "--upstream", server.url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
    line = process.stdout.readline()
    yield re.search(r"http://\S+", line)[0]
    process.terminate()
    process.communicate(timeout=PATIENCE_S)


def requests(salt: str) -> list[tuple[str, dict]]:
    found = []
    for index in range(8):
        body = {
            "max_tokens": TOKENS,
            "seed": 100 + index,
            "temperature": (0, 0.9)[index % 2],
            "ignore_eos": True,
            "return_token_ids": index % 3 == 0,
            "stream": index % 4 != 3,
            "cache_salt": salt,
            "user": salt,
        }
        if index % 3 == 1:
            body |= {"n": 2, "stop": ["kQ", "Ze"]}
        if index % 2:
            body["messages"] = [{"role": "user", "content": f"{index} tell me more " * 6}]
            found.append(("/v1/chat/completions", body))
        else:
            body["prompt"] = [(index * 31 + j * 7 + j * j) % 250 + 3 for j in range(60 + 17 * index)]
            found.append(("/v1/completions", body | ({"logprobs": 2} if index == 2 else {})))
    return found


def gateways(server: Serve) -> list[dict]:
    return server.call("/status")[1]["gateways"]


def two(server: Serve) -> bool:
    lives = gateways(server)
    return len(lives) == 2 and all(running(life["pid"]) for life in lives)


def incarnations(server: Serve) -> dict[str, int]:
    return {worker["id"]: worker["incarnation"] for worker in server.call("/status")[1]["workers"]}


def test_streams_through_the_proxy_survive_kills_of_gateways(server, proxy):
    wanted = requests("same")
    calm = ask_all(proxy, wanted)
    for outcome, (_, body) in zip(calm, wanted, strict=True):
        check_whole(outcome, body)
    server.wait_for(lambda: two(server))
    before = incarnations(server)
    killer = subprocess.Popen([sys.executable, "-c", KILLER, server.url, "5"], env=ENVIRONMENT)
    stormy = ask_all(proxy, wanted)
    killer.wait(PATIENCE_S)
    for quiet, loud, (_, body) in zip(calm, stormy, wanted, strict=True):
        check_whole(loud, body)
        assert loud.answers.keys() == quiet.answers.keys()
        for index, answer in quiet.answers.items():
            assert loud.answers[index].text == answer.text
            assert loud.answers[index].logprobs == answer.logprobs
            assert loud.answers[index].finishes == answer.finishes
        assert loud.usage == quiet.usage
    server.wait_for(lambda: two(server))
    assert incarnations(server) == before  # no worker was harmed


KILLER = """
import json, os, signal, sys, time, urllib.request
url, kills = sys.argv[1], int(sys.argv[2])
for kill in range(kills):
    time.sleep(0.6)
    try:
        with urllib.request.urlopen(url + "/status", timeout=10) as response:
            lives = json.load(response)["gateways"]
    except OSError:
        continue
    for life in lives if kill == 2 else [lives[kill % len(lives)]]:
        try:
            os.kill(life["pid"], signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


@contextmanager
def post(server: Serve, body: dict, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(server.url)
    with closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"} | headers)
        with connection.getresponse() as response:
            yield response


def read(response: http.client.HTTPResponse, events: int = 10**9) -> tuple[str, str | None, bool]:
    """(text, id of the last event, whether it was the end), of at most ``events`` events."""
    text, last, number = "", None, 0
    try:
        for raw in response:
            line = raw.decode().rstrip("\n")
            if line == "data: [DONE]":
                return text, last, True
            if line.startswith("id: "):
                last = line[4:]
            elif line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
                number += 1
                if number == events:
                    break
    except (OSError, http.client.HTTPException):
        return text, last, False
    return text, last, False


def test_a_client_that_resumes_gets_the_rest_from_whoever_is_there(server):
    body = {"prompt": [7, 8, 9] * 20, "max_tokens": TOKENS, "stream": True, "temperature": 1.0, "ignore_eos": True}
    key = {"idempotency-key": "raw"}
    with post(server, body, key) as response:
        whole, _, ended = read(response)
    assert ended
    text, last, key = "", None, {"idempotency-key": "raw"}
    for _ in range(3):
        server.wait_for(lambda: two(server))
        with post(server, body, key | ({"last-event-id": last} if last else {})) as response:
            part, new, ended = read(response, 40)
            text, last = text + part, new or last
            for life in gateways(server):
                os.kill(life["pid"], signal.SIGKILL)
    server.wait_for(lambda: two(server))
    with post(server, body, key | {"last-event-id": last}) as response:
        part, _, ended = read(response)
    assert ended
    assert text + part == whole
    assert adopted(server) > 0  # it was found further on than before, not computed from its prompt each time


def adopted(server: Serve) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_S) as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(r"^relay_worker_orphans_adopted_total\{.*\} (\S+)$", text, re.M))


def test_sigterm_lets_streams_finish_and_ends_everything(model, cache):
    server = Serve(model, cache, *ARGUMENTS).ready()
    try:
        pids = [*server.pids(), *(life["pid"] for life in gateways(server))]
        body = {"prompt": [7, 8, 9] * 20, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        with post(server, body, {}) as response:
            read(response, 1)
            server.process.send_signal(signal.SIGTERM)
            assert read(response)[2]
        server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 0
        wait_gone(pids)
    finally:
        server.close()


def test_nothing_outlives_a_killed_supervisor(model, cache):
    server = Serve(model, cache, *ARGUMENTS).ready()
    try:
        pids = [*server.pids(), *(life["pid"] for life in gateways(server))]
        assert len(pids) == 7
        server.process.kill()
        wait_gone(pids)
    finally:
        server.close()


def test_a_stopped_gateway_is_replaced_and_its_streams_go_on(server, proxy):
    wanted = requests("stopped")[:4]
    calm = ask_all(proxy, wanted)
    server.wait_for(lambda: two(server))
    before, lives = incarnations(server), gateways(server)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_all, proxy, wanted)
        time.sleep(0.3)
        os.kill(lives[0]["pid"], signal.SIGSTOP)
        stormy = asking.result(PATIENCE_S)
    for quiet, loud in zip(calm, stormy, strict=True):
        assert {index: answer.text for index, answer in loud.answers.items()} == {
            index: answer.text for index, answer in quiet.answers.items()
        }
        assert loud.ends == 1
    server.wait_for(lambda: two(server) and gateways(server) != lives)
    assert incarnations(server) == before


def test_a_model_that_does_not_fit_is_one_line_and_nothing_is_left(model, cache):
    server = Serve(model, cache, *ARGUMENTS, "--kv-cache-memory", "64K", "--max-model-len", "1000")
    try:
        _, errors = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 4
        assert [line for line in errors.splitlines() if line.startswith("relay: ")] != []
    finally:
        server.close()


def test_a_drain_reaches_every_gateway(model, cache):
    server = Serve(model, cache, *ARGUMENTS, "--decode", "2").ready()
    try:
        command = [sys.executable, "-m", "relay.cli.main", "drain", "decode-1", "--url", server.url]
        subprocess.run(command, check=True, timeout=PATIENCE_S, env=ENVIRONMENT)
        victim = gateways(server)[0]["pid"]
        os.kill(victim, signal.SIGKILL)  # its next life must know too
        server.wait_for(lambda: two(server) and victim not in [life["pid"] for life in gateways(server)])
        states: dict[str, str] = {}

        def all_know() -> bool:
            status = server.call("/status")[1]  # from whichever gateway answers
            states[status["gateway"]] = next(w["state"] for w in status["workers"] if w["id"] == "decode-1")
            return states == {"gateway-0": "stopped", "gateway-1": "stopped"}

        server.wait_for(all_know)
    finally:
        server.close()
