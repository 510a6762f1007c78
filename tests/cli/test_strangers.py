"""Strangers at every listener of a running server: closed before anything of theirs is parsed or kept, at nobody's cost."""

import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest
from tests.cli.serving import Serve, write_tiny_model

from relay.protocol.framing import MAX_FRAME_BYTES, encode
from relay.protocol.messages import Heartbeat, Hello

PROMPT = [(7 * i + i * i) % 250 + 3 for i in range(100)]
CLOSED_S = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    server = Serve(model, tmp_path_factory.mktemp("cache"), "--backend", "cpu", "--transport", "tcp").ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(server):
    return server.complete(PROMPT, 40)


def listeners(pid: int) -> list[int]:
    """Ports on which ``pid`` listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def worker_port(server: Serve) -> int:
    (port,) = set(listeners(server.process.pid)) - {int(server.url.rsplit(":", 1)[1])}
    return port


def memory_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def closed(client: socket.socket) -> bool:
    """The server ends this connection without a word that matters."""
    client.settimeout(CLOSED_S)
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def frame(size: int, payload: bytes = b"") -> bytes:
    return struct.pack("<III", size, size ^ 0xFFFFFFFF, 0) + payload


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 16,
    "too long": frame(MAX_FRAME_BYTES + 1),
    "long before any hello": frame(MAX_FRAME_BYTES),
    "no hello": encode(Heartbeat(1, "ready", 0, "S")),
    "unknown worker": encode(Hello(process="agent", worker="mallory", incarnation=1, pid=1)),
    "another life": encode(Hello(process="engine", worker="decode-0", incarnation=99, pid=1)),
    "who is there already": encode(Hello(process="engine", worker="decode-0", incarnation=1, pid=1)),
    "wrong checksum": frame(8, b"\x81\xa4type\xa1x"),
    "not a message": frame(1, b"\xc1"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_the_workers_listener_turns_them_away(server, expected, name):
    with socket.create_connection(("127.0.0.1", worker_port(server)), timeout=5) as client:
        client.sendall(STRANGERS[name])
        assert closed(client)
    assert server.complete(PROMPT, 40) == expected
    assert {worker["incarnation"] for worker in server.call("/status")[1]["workers"]} == {1}


@pytest.mark.parametrize("name", ["http", "zeros", "ones", "too long", "no hello"])
def test_a_workers_kv_listener_turns_them_away(server, expected, name):
    for port in listeners(server.worker("decode-0")["pid"]):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(STRANGERS[name])
            assert closed(client)
    assert server.complete(PROMPT, 40) == expected


def test_what_a_stranger_sends_is_not_kept(server, expected):
    """A frame of 16 MiB is legal from a worker; from somebody who has not said who he is it is not waited for."""
    before = memory_kb(server.process.pid)
    clients = [socket.create_connection(("127.0.0.1", worker_port(server)), timeout=5) for _ in range(20)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(frame(MAX_FRAME_BYTES))
            client.sendall(bytes(8 << 20))
    assert memory_kb(server.process.pid) - before < 40 << 10
    for client in clients:
        client.close()
    assert server.complete(PROMPT, 40) == expected


def test_a_crowd_that_says_nothing_keeps_no_worker_out(server, expected):
    crowd = [socket.create_connection(("127.0.0.1", worker_port(server)), timeout=5) for _ in range(1200)]
    try:
        lost = server.worker("decode-0")
        os.kill(lost["pid"], signal.SIGKILL)
        began = time.monotonic()
        server.wait_for(lambda: server.worker("decode-0")["incarnation"] > lost["incarnation"])
        server.wait_for(lambda: server.worker("decode-0")["state"] == "ready")
        assert server.worker("decode-0")["incarnation"] == lost["incarnation"] + 1
        assert time.monotonic() - began < 60
        assert server.complete(PROMPT, 40) == expected
    finally:
        for client in crowd:
            client.close()
