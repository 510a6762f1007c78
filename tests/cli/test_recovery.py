"""A real ``relay serve`` whose processes are killed under load: every client must see exactly what it sees without faults."""

import json
import os
import signal
import socket
import struct
import threading
import time

import pytest
from tests.cli.serving import Serve, running, wait_gone, write_tiny_model
from tests.cli.streams import ask_all, check_whole

STREAMS = 12
TOKENS = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    server = Serve(
        model, tmp_path_factory.mktemp("cache"), "--backend", "cpu", "--max-num-batched-tokens", "64"
    ).ready()
    yield server
    server.close()


def mixture(salt: str) -> list[tuple[str, dict]]:
    """Both endpoints, streamed and whole, greedy and sampled, with all that a resumed attempt has to rebuild."""
    requests = []
    for index in range(STREAMS):
        body = {
            "max_tokens": TOKENS,
            "seed": 100 + index,
            "temperature": (0, 0.9, 1.0)[index % 3],
            "return_token_ids": True,
            "ignore_eos": index % 4 != 0,
            "cache_salt": f"{salt}{index // 4}",
        }
        if index % 4 != 3:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= (
            {},
            {"n": 2, "top_p": 0.9},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
            {"top_k": 20, "logit_bias": {"70": 3.0}},
            {"stop": ["kQ", "Ze", "z\n"], "min_p": 0.01},
            {"stop_token_ids": [80], "min_tokens": 150},
        )[index % 6]
        chat = index % 2 == 1
        if index % 3 != 2:
            body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        if chat:
            body["messages"] = [{"role": "user", "content": f"{index} tell me more " * 8}]
        else:
            body["prompt"] = [(index * 31 + j * 7 + j * j) % 250 + 3 for j in range(90 + 17 * index)]
        requests.append(("/v1/chat/completions" if chat else "/v1/completions", body))
    return requests


@pytest.fixture(scope="module")
def expected(server):
    outcomes = ask_all(server.url, mixture("calm"))
    for outcome, (_, body) in zip(outcomes, mixture("calm"), strict=True):
        check_whole(outcome, body)
    assert {finish for o in outcomes for a in o.answers.values() for finish in a.finishes} == {"stop", "length"}
    return outcomes


def quiet(server: Serve) -> bool:
    """Nothing runs, waits or holds KV, and every worker is back."""
    status = server.call("/status")[1]
    idle = {"state": "ready", "kv_used": 0, "running": 0, "waiting": 0, "placed": 0}
    return status["requests"] == {"running": 0, "waiting": 0} and all(
        {key: worker[key] for key in idle} == idle for worker in status["workers"]
    )


class Killer(threading.Thread):
    """Kills ``victims`` ``times`` times, always while they have work, every time a new incarnation of them."""

    def __init__(self, server: Serve, victims: list[tuple[str, str]], times: int, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.server, self.victims, self.times, self.number = server, victims, times, number
        self.killed: list[int] = []

    def run(self) -> None:
        rounds = 0
        while rounds < self.times:
            time.sleep(0.05)
            workers = {worker["id"]: worker for worker in self.server.call("/status")[1]["workers"]}
            doomed = [(workers[name], process) for name, process in self.victims]
            if all(worker["state"] == "ready" and worker["placed"] for worker, _ in doomed):
                for worker, process in doomed:
                    os.kill(worker[process], self.number)
                    self.killed += [worker["pid"], worker["agent_pid"]]
                rounds += 1
                self.server.wait_for(
                    lambda ids=[(w["id"], w["incarnation"]) for w, _ in doomed]: all(
                        self.server.worker(name)["incarnation"] > incarnation for name, incarnation in ids
                    )
                )


def ask_until_over(server: Serve, salt: str, killer: Killer, expected: list) -> None:
    """Load until every kill was done; every answer must be the calm one."""
    killer.start()
    batch = 0
    while batch == 0 or killer.is_alive():
        for outcome, calm in zip(ask_all(server.url, mixture(f"{salt} {batch}")), expected, strict=True):
            assert outcome == calm
        batch += 1
    killer.join()
    server.wait_for(lambda: quiet(server))
    wait_gone(killer.killed)


P, D = "prefill-0", "decode-0"


@pytest.mark.parametrize(
    ("victims", "times"),
    [
        ([(P, "pid")], 2),
        ([(D, "pid")], 7),
        ([(P, "agent_pid")], 1),
        ([(D, "agent_pid")], 2),
        ([(P, "pid"), (D, "pid")], 3),
    ],
    ids=["P", "D again and again", "agent of P", "agent of D", "both at once"],
)
def test_kills_change_nothing(server, expected, victims, times):
    killer = Killer(server, victims, times)
    ask_until_over(server, str(victims), killer, expected)
    assert len(killer.killed) == 2 * len(victims) * times


def test_a_frozen_engine_is_replaced(server, expected):
    killer = Killer(server, [(D, "pid")], 1, signal.SIGSTOP)
    ask_until_over(server, "frozen", killer, expected)


def test_clients_that_hang_up_leave_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")
    for index in range(60):
        body = {"prompt": [5 + index] * 300, "max_tokens": 400, "ignore_eos": True, "stream": index % 2 == 0}
        data = json.dumps(body | {"n": 1 + index % 2}).encode()
        client = socket.create_connection((host, int(port)))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: relay\r\ncontent-type: application/json\r\n")
        client.sendall(b"content-length: %d\r\n\r\n" % len(data) + data)
        if index % 4 == 0:
            client.recv(1)
        if index % 3 == 0:  # a reset instead of an orderly end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    server.wait_for(lambda: quiet(server))


def test_a_stderr_nobody_reads_stops_neither_service_nor_signals(server, expected):
    """Last: it ends the server. stderr was a full pipe all along for whoever logs enough; now it is a broken one."""
    pids = server.pids()
    server.process.stderr.close()
    assert ask_all(server.url, mixture("unheard"))[0] == expected[0]
    assert server.stop(signal.SIGTERM) == 0
    wait_gone(pids)
    assert not any(running(pid) for pid in pids)
