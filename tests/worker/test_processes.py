"""Real agent and engine processes on a tiny random model; the test is the gateway."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import relay
from relay.models.packer import write_pack
from relay.models.store import open_checkpoint
from relay.protocol.messages import (
    Accept,
    ComputedRow,
    Drained,
    EngineExited,
    Heartbeat,
    Prefill,
    Refuse,
    Reserve,
    Run,
    SequenceFailed,
    Tokens,
    Work,
)
from relay.protocol.sampling import SamplingParams
from relay.worker.spec import WorkerSpec, encode_spec
from relay.worker.status_page import StatusPage
from tests.models.tiny_models import config_json, write_folder
from tests.worker.gateway_side import PATIENCE_S, accept_hello, address_of, listen

SOURCE = Path(relay.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))}
PROMPT = [(7 * i + i * i) % 90 + 3 for i in range(75)]


@pytest.fixture(scope="module")
def pack_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder / "tiny", config_json())
    write_pack(open_checkpoint(folder / "tiny"), folder / "tiny.pack")
    return folder / "tiny.pack"


@pytest.fixture
def listener():
    with listen() as server:
        yield server


class LiveWorker:
    """One agent and its engine, started as a launcher would."""

    def __init__(self, listener, name, pack_path, backend="reference", **values):
        spec = WorkerSpec(
            worker=name,
            incarnation=1,
            gateways=[address_of(listener)],
            pack_path=str(pack_path),
            backend=backend,
            kv_cache_memory_bytes=1 << 22,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            **values,
        )
        command = [sys.executable, "-m", "relay.worker.agent", "--spec", encode_spec(spec)]
        self.process = subprocess.Popen(command, env=ENVIRONMENT)
        self.name = name
        try:
            self._greet(listener)
        except BaseException:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            raise

    def _greet(self, listener):
        for _ in range(2):
            while not select.select([listener], [], [], 0.2)[0]:
                assert self.process.poll() is None, "the worker did not start"
            hello, side = accept_hello(listener)
            assert hello.worker == self.name
            if hello.process == "agent":
                self.agent = side
                assert hello.pid == self.process.pid
            else:
                self.engine, self.hello = side, hello

    def close(self):
        """End the process if a failed test left it, and the sockets."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self.agent.socket.close()
        self.engine.socket.close()


@pytest.fixture
def start(listener, pack_path):
    workers = []

    def begin(name, **values):
        workers.append(LiveWorker(listener, name, pack_path, **values))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()


def work(request, **values):
    params = SamplingParams(**({"max_tokens": 12, "seed": 9, "logprobs": 2} | values))
    return Work(request, 0, 1, PROMPT, len(PROMPT), params, capture=True)


def gone(pid):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_split_over_processes_equals_colocated(start, backend):
    p, d = start("p", backend=backend), start("d", backend=backend)
    assert p.hello.numerics_id == d.hello.numerics_id
    assert p.hello.model_digest == d.hello.model_digest
    p.engine.send(Run(work(1)))
    alone, finish = p.engine.stream(1)
    d.engine.send(Reserve(work(2), 5, "p", 1))
    accepted = d.engine.expect(Accept)
    assert (accepted.transfer, accepted.cached_tokens) == (5, 0)
    p.engine.send(Prefill(work(2), 5, 0, d.hello.kv_addresses, "d", 1))
    (first,) = p.engine.expect(Tokens).entries
    assert (first.position, first.token_ids, first.finish) == (0, alone[:1], None)
    assert first.cached_tokens == 64  # P ran the same prompt before: 4 full units, sent all the same
    assert d.engine.stream(2) == (alone, finish)
    assert len(alone) == 12

    for worker in (p, d):
        worker.process.send_signal(signal.SIGTERM)
        worker.engine.expect(Drained)
        assert worker.agent.expect(EngineExited) == EngineExited(status=0)
        assert worker.process.wait(PATIENCE_S) == 0


def test_p_killed_under_way_is_reported_by_d_which_serves_on(start):
    p, d = start("p"), start("d")
    d.engine.send(Reserve(work(1), 5, "p", 1))
    d.engine.expect(Accept)
    p.engine.send(Run(work(8, max_tokens=400)))  # keeps P's steps short of the prompt's end for a while
    p.engine.expect(Tokens)
    p.engine.send(Prefill(work(1), 5, 0, d.hello.kv_addresses, "d", 1))
    p.engine.expect(Tokens)
    os.kill(p.hello.pid, signal.SIGKILL)
    first = d.engine.expect((Tokens, SequenceFailed))
    if isinstance(first, SequenceFailed):
        assert (first.request, first.attempt, first.retry) == (1, 1, True)
    else:  # everything had arrived before the kill
        d.engine.inbox.insert(0, first)
        assert len(d.engine.stream(1)[0]) == 12
    d.engine.send(Run(work(2)))
    assert len(d.engine.stream(2)[0]) == 12


def test_heartbeats_show_steps_and_phase(start):
    worker = start("w")
    first = worker.agent.expect(Heartbeat, lambda beat: beat.phase == "ready")
    assert first.engine_state in "SR"
    worker.engine.send(Run(work(1)))
    tokens, _ = worker.engine.stream(1)
    later = worker.agent.expect(Heartbeat, lambda beat: beat.step >= len(tokens))
    assert later.phase in ("ready", "stepping")


def test_engine_killed_ends_the_agent_with_word_of_it(start):
    worker = start("w")
    os.kill(worker.hello.pid, signal.SIGKILL)
    assert worker.agent.expect(EngineExited) == EngineExited(signal=signal.SIGKILL)
    assert worker.process.wait(PATIENCE_S) == 128 + signal.SIGKILL


def page_of(agent_pid):
    """The agent's status page, through its descriptor."""
    folder = f"/proc/{agent_pid}/fd"
    number = next(name for name in os.listdir(folder) if "relay-status" in os.readlink(f"{folder}/{name}"))
    return StatusPage.open(f"{folder}/{number}")


def stop_in_a_step(worker):
    """SIGSTOP the engine where it computes; returns the rows of that step."""
    page, deadline = page_of(worker.process.pid), time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        os.kill(worker.hello.pid, signal.SIGSTOP)
        worker.agent.expect(Heartbeat, lambda beat: beat.engine_state == "T")
        if rows := page.manifest():
            return rows
        os.kill(worker.hello.pid, signal.SIGCONT)
        worker.agent.expect(Heartbeat, lambda beat: beat.engine_state != "T")
    raise AssertionError("no step was met")


def test_a_crash_in_a_step_is_reported_with_its_rows(start):
    worker = start("w")
    for request in (1, 2):
        worker.engine.send(Run(work(request, max_tokens=300)))
        worker.engine.expect(Tokens, lambda tokens, r=request: any(entry.request == r for entry in tokens.entries))
    rows = stop_in_a_step(worker)
    assert {row.request for row in rows} == {1, 2}
    os.kill(worker.hello.pid, signal.SIGSEGV)
    os.kill(worker.hello.pid, signal.SIGCONT)
    report = worker.agent.expect(EngineExited)
    assert report == EngineExited(None, signal.SIGSEGV, [ComputedRow(*row) for row in rows], False)
    assert all(row.end > len(PROMPT) for row in report.manifest)


def test_agent_killed_ends_the_engine(start):
    worker = start("w")
    worker.process.kill()
    worker.process.wait(PATIENCE_S)
    assert gone(worker.hello.pid)


def test_lost_gateway_ends_both(start):
    worker = start("w")
    worker.agent.socket.close()
    worker.engine.socket.close()
    assert worker.process.wait(PATIENCE_S) != 0
    assert gone(worker.hello.pid)


def test_draining_worker_finishes_and_refuses(start):
    worker = start("w")
    worker.engine.send(Run(work(1, max_tokens=60)))
    worker.engine.expect(Tokens)
    worker.process.send_signal(signal.SIGTERM)
    worker.agent.expect(Heartbeat, lambda beat: beat.phase == "draining")
    worker.engine.send(Run(work(2)))
    assert worker.engine.expect(Refuse).reason == "draining"
    worker.engine.expect(Drained)
    assert worker.process.wait(PATIENCE_S) == 0


def test_a_second_sigterm_ends_at_once(start):
    worker = start("w")
    worker.engine.send(Run(work(1, max_tokens=900)))
    worker.engine.expect(Tokens)
    worker.process.send_signal(signal.SIGTERM)
    worker.agent.expect(Heartbeat, lambda beat: beat.phase == "draining")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.agent.expect(EngineExited).signal == signal.SIGKILL
    assert worker.process.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert not [m for m in worker.engine.inbox if isinstance(m, Drained)]


def test_wrong_digest_is_one_line_and_its_own_code(listener, pack_path):
    spec = WorkerSpec(
        worker="w",
        incarnation=1,
        gateways=[address_of(listener)],
        pack_path=str(pack_path),
        model_digest="0" * 64,
        backend="reference",
    )
    command = [sys.executable, "-m", "relay.worker.agent", "--spec", encode_spec(spec)]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 6
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("w: ")
    assert "expected " + "0" * 64 in line
