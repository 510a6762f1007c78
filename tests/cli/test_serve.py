"""``relay serve`` from outside: tokens, kills, status, signals, bad starts."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.cli.serving import ENVIRONMENT, Serve, wait_gone, write_tiny_model

PROMPT = [(7 * i + i * i) % 250 + 3 for i in range(150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def split(model, cache):
    server = Serve(model, cache).ready()
    yield server
    server.close()


@pytest.fixture
def launch(model, cache):
    servers = []

    def begin(*arguments: str) -> Serve:
        servers.append(Serve(model, cache, *arguments))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def test_split_gives_the_tokens_of_colocated(split, launch):
    alone = launch("--prefill", "0").ready()
    for values in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "seed": 11}):
        assert split.complete(PROMPT, 24, **values) == alone.complete(PROMPT, 24, **values)
    assert [worker["id"] for worker in alone.call("/status")[1]["workers"]] == ["worker-0"]
    assert alone.stop() == 0


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
@pytest.mark.parametrize("process", ["pid", "agent_pid"])
def test_a_killed_worker_loses_nothing(split, victim, process):
    prompts = [[*PROMPT, index] for index in range(4)]
    expected = [split.complete(prompt, 60, cache_salt="alone") for prompt in prompts]
    before = split.worker(victim)
    salt = f"{victim} {process}"
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(split.complete, prompt, 60, cache_salt=salt) for prompt in prompts]
        split.wait_for(lambda: split.worker("decode-0")["running"] > 0 or split.worker("prefill-0")["running"] > 0)
        subprocess.run(["kill", "-9", str(before[process])], check=True)
        assert [answer.result() for answer in answers] == expected
    split.wait_for(lambda: split.worker(victim)["incarnation"] > before["incarnation"])
    split.wait_for(lambda: split.worker(victim)["state"] == "ready")
    after = split.worker(victim)
    assert after["incarnation"] == before["incarnation"] + 1
    assert {after["pid"], after["agent_pid"]}.isdisjoint({before["pid"], before["agent_pid"]})
    wait_gone([before["pid"], before["agent_pid"]])


def test_status_command(split):
    run = subprocess.run(
        [sys.executable, "-m", "relay.cli.main", "status", "--json", "--url", split.url],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    workers = json.loads(run.stdout)["workers"]
    assert [(worker["id"], worker["role"]) for worker in workers] == [("prefill-0", "prefill"), ("decode-0", "decode")]
    for worker in workers:
        keys = {"id", "pid", "agent_pid", "role", "state", "incarnation", "kv_used", "kv_total"}
        assert keys <= set(worker)
        assert worker["kv_total"] > 0


def test_what_can_never_fit_is_refused_at_once(split):
    status, answer = split.call("/v1/completions", {"prompt": PROMPT, "max_tokens": 5000})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


def test_a_small_kv_cache_limits_the_context(launch):
    server = launch("--kv-cache-memory", "64k").ready()
    status, answer = server.call("/v1/completions", {"prompt": PROMPT, "max_tokens": 5})
    assert status == 400
    assert "maximum context length is 128 tokens" in answer["error"]["message"]
    assert len(server.complete(PROMPT[:100], 20)) == 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_leaves_nothing(launch, number):
    server = launch("--prefill", "0").ready()
    pids = server.pids()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, PROMPT, 80)
        server.wait_for(lambda: server.worker("worker-0")["running"] > 0)
        assert server.stop(number) == 0
        assert len(answer.result()) == 80
    wait_gone(pids)


def test_a_second_signal_ends_at_once(launch):
    server = launch("--prefill", "0").ready()
    pids = server.pids()
    thread = threading.Thread(
        target=lambda: server.call("/v1/completions", {"prompt": PROMPT, "max_tokens": 800, "ignore_eos": True})
    )
    thread.start()
    server.wait_for(lambda: server.worker("worker-0")["running"] > 0)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert server.process.poll() is None
    assert server.stop(signal.SIGINT) == 0
    thread.join(30)
    wait_gone(pids)


def test_a_killed_gateway_leaves_no_orphans(launch):
    server = launch("--prefill", "0").ready()
    pids = server.pids()
    server.process.kill()
    server.process.wait()
    wait_gone(pids)


def test_signal_during_the_start(launch):
    server = launch()
    time.sleep(0.6)
    server.process.send_signal(signal.SIGTERM)
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode in (0, -signal.SIGTERM)
    assert "Traceback" not in errors


def failed(server: Serve) -> tuple[int, list[str]]:
    """Exit code and what stderr says."""
    out, errors = server.process.communicate(timeout=60)
    assert out == ""
    lines = [line for line in errors.splitlines() if " INFO " not in line and not line.startswith("packing tiny")]
    assert "Traceback" not in errors
    return server.process.returncode, lines


def test_port_in_use_is_one_line_before_anything_starts(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = failed(launch("--port", str(port)))
    assert code == 5
    assert lines == [f"relay: 127.0.0.1:{port} is in use; choose another --port, or 0 for a free one"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prefill", "-1"], 2, "--prefill"),
        (["--decode", "0"], 2, "--decode"),
        (["--block-size", "17"], 2, "--block-size"),
        (["--kv-cache-memory", "lots"], 2, "'lots' is not a size"),
        (["--backend", "quantum"], 2, "quantum"),
        (["--no-such-flag"], 2, "--no-such-flag"),
        (["--max-model-len", "100000"], 2, "--max-model-len 100000"),
        (["--host", "203.0.113.1"], 2, "203.0.113.1"),
        (["--kv-cache-memory", "4k"], 4, "--kv-cache-memory of 4096 bytes"),
        (["--kv-cache-memory", "64k", "--max-model-len", "500"], 4, "--max-model-len 500 does not fit"),
    ],
)
def test_bad_flags_are_one_line(launch, arguments, code, words):
    status, lines = failed(launch(*arguments))
    assert status == code
    assert len(lines) == 1
    assert lines[0].startswith("relay: ")
    assert words in lines[0]


def test_missing_and_damaged_models(tmp_path, cache):
    server = Serve(tmp_path / "nothing-here", cache)
    code, lines = failed(server)
    assert (code, len(lines)) == (3, 1)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 64)
    code, lines = failed(Serve(damaged, cache))
    assert (code, len(lines)) == (6, 1)
