"""``relay drain`` and ``relay restart`` on a real server under load: every client sees what it sees on a calm one."""

import json
import os
import signal
import threading

import pytest
from tests.cli.serving import Serve, wait_gone, write_tiny_model
from tests.cli.streams import ask_all
from tests.cli.test_recovery import mixture

from relay.cli import main
from relay.cli.leave import Rollout

WORKERS = {"prefill-0", "decode-0", "decode-1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    server = Serve(
        model, tmp_path_factory.mktemp("cache"), "--backend", "cpu", "--max-num-batched-tokens", "64", "--decode", "2"
    ).ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(server):
    return ask_all(server.url, mixture("calm"))


def idle(server: Serve) -> bool:
    """Nothing runs, waits or holds KV."""
    status = server.call("/status")[1]
    held = [worker[key] for worker in status["workers"] for key in ("kv_used", "running", "waiting", "placed")]
    return not any([*held, *status["requests"].values()])


def under_load(server: Serve, expected: list, salt: str, leave) -> None:
    """Load until ``leave`` has returned; every answer must be the calm one."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            leave()
        except BaseException as error:  # an assertion of this thread is the test's
            problems.append(error)

    thread = threading.Thread(target=run)
    server.wait_for(lambda: idle(server))
    starter = threading.Timer(0.3, thread.start)
    starter.start()
    batch = 0
    while batch == 0 or thread.is_alive():
        for outcome, calm in zip(ask_all(server.url, mixture(f"{salt} {batch}")), expected, strict=True):
            assert outcome == calm
        batch += 1
        starter.join()
    thread.join()
    assert not problems, problems


def command(server: Serve, *arguments: str) -> int:
    return main.run([*arguments, "--url", server.url, "--timeout", "80"])


def test_a_rolling_restart_changes_nothing(server, expected):
    before = {worker["id"]: worker for worker in server.call("/status")[1]["workers"]}
    old = [worker[key] for worker in before.values() for key in ("pid", "agent_pid")]
    under_load(server, expected, "rolling", lambda: check(command(server, "restart", "--rolling")))
    after = {worker["id"]: worker for worker in server.call("/status")[1]["workers"]}
    assert set(after) == WORKERS
    assert all(after[name]["incarnation"] == before[name]["incarnation"] + 1 for name in WORKERS)
    assert all("status 0" in worker["last_loss"] or "EOF" in worker["last_loss"] for worker in after.values())
    metrics = server.metrics()
    assert metrics["relay_workers_drained_total"] == 3
    assert metrics.get("relay_workers_lost_total", 0) == 0
    assert metrics.get("relay_resumed_total", 0) == 0
    wait_gone(old)


def check(code: int) -> None:
    assert code == 0


def test_a_drained_worker_stays_out_until_it_is_asked_for(server, expected):
    under_load(server, expected, "drain", lambda: check(command(server, "drain", "decode-1")))
    assert server.worker("decode-1")["state"] == "stopped"
    under_load(server, expected, "back", lambda: check(command(server, "restart", "decode-1")))
    assert server.worker("decode-1")["state"] == "ready"


def test_sigterm_of_an_engine_and_of_an_agent_lose_nothing(server, expected):
    def terminate() -> None:
        for name, process in (("decode-0", "pid"), ("prefill-0", "agent_pid")):
            worker = server.worker(name)
            os.kill(worker[process], signal.SIGTERM)
            server.wait_for(lambda w=worker: server.worker(w["id"])["incarnation"] > w["incarnation"])
            server.wait_for(lambda w=worker: server.worker(w["id"])["state"] == "ready")

    under_load(server, expected, "sigterm", terminate)


def test_orders_that_cannot_be(server, capsys):
    assert command(server, "drain", "decode-9") == 1
    assert "there is no worker 'decode-9'" in capsys.readouterr().err
    assert main.run(["restart"]) == 2
    assert "--rolling" in capsys.readouterr().err
    assert main.run(["drain", "a", "--url", "ftp://x"]) == 2
    assert main.run(["drain", "a", "--url", "http://127.0.0.1:1"]) == 1
    assert "no answer" in capsys.readouterr().err


def test_a_wait_that_is_no_time_orders_nothing(capsys):
    for seconds in ("-1", "0", "nan"):
        assert main.run(["restart", "--rolling", "--timeout", seconds, "--url", "http://127.0.0.1:1"]) == 2
        assert "--timeout must be a positive number" in capsys.readouterr().err


def seen(gateway: str, incarnations: dict[str, int], left: list[str], epoch: int = 1) -> dict:
    """A status of one of two gateways."""
    workers = [{"id": name, "incarnation": life, "state": "ready"} for name, life in incarnations.items()]
    gateways = [{"id": "g0", "epoch": epoch, "pid": 1}, {"id": "g1", "epoch": 1, "pid": 2}]
    return {"gateway": gateway, "gateways": gateways, "workers": workers, "rollout": {"left": left, "problem": ""}}


def test_a_gateway_that_does_not_lead_the_rollout_does_not_end_the_wait():
    rollout = Rollout({"a": 1, "b": 1})
    assert rollout.look(seen("g1", {"a": 1, "b": 1}, []))["left"] == ["a", "b"]
    assert not rollout.over
    rollout.look(seen("g0", {"a": 2, "b": 1}, ["b"]))
    assert not rollout.over
    assert rollout.look(seen("g1", {"a": 2, "b": 2}, []))["left"] == []
    assert rollout.over


def test_a_rollout_whose_gateway_died_is_over_and_names_who_was_left():
    rollout = Rollout({"a": 1, "b": 1})
    rollout.look(seen("g0", {"a": 2, "b": 1}, ["b"]))
    rollout.look(seen("g1", {"a": 2, "b": 1}, []))
    assert not rollout.over
    assert rollout.look(seen("g0", {"a": 2, "b": 1}, [], epoch=2))["left"] == ["b"]
    assert rollout.over
