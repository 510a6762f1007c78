"""The process that holds weights and its socket, with bytes in the place of GPU memory."""

import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relay.errors import DeviceLostError, DoesNotFitError
from relay.worker.weights_link import NotShared, fetch, listen, wait_for_end
from relay.worker.weights_process import serve

SOURCE = Path(__file__).parent.parent.parent / "src"


def start(load, **bounds):
    name = f"relay-test-{secrets.token_hex(8)}"
    listener = listen(name)
    ended = []

    def run():
        try:
            serve(listener, load, **bounds)
            ended.append(None)
        except Exception as error:
            ended.append(error)
        finally:
            listener.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return name, thread, ended


def test_each_user_gets_a_message_of_its_own_and_the_holder_ends_after_the_last():
    gate = threading.Event()
    made = []

    def load():
        gate.wait(10)
        return lambda: made.append(1) or b"message %d" % len(made)

    name, thread, ended = start(load, unused_s=0.1)
    got = []
    early = threading.Thread(target=lambda: got.append(fetch(name)), daemon=True)
    early.start()
    time.sleep(0.05)
    assert not got, "nothing is loaded yet"
    gate.set()
    early.join(10)
    second = fetch(name)
    assert sorted([got[0][1], second[1]]) == [b"message 1", b"message 2"]
    got[0][0].close()
    third = fetch(name)
    assert third[1] == b"message 3"
    second[0].close()
    third[0].close()
    thread.join(10)
    assert ended == [None]


def test_a_holder_that_nobody_asks_ends():
    _, thread, ended = start(lambda: lambda: b"", first_user_s=0.05)
    thread.join(10)
    assert ended == [None]


def test_a_load_that_fails_is_told_to_users_and_launcher():
    gate = threading.Event()

    def load():
        gate.wait(10)
        raise DoesNotFitError("too small")

    name, thread, ended = start(load)
    waiting = []

    def ask():
        try:
            fetch(name)
        except NotShared as error:
            waiting.append(str(error))

    user = threading.Thread(target=ask, daemon=True)
    user.start()
    time.sleep(0.05)
    gate.set()
    thread.join(10)
    assert isinstance(ended[0], DoesNotFitError)


def test_a_user_notices_the_end_of_its_holder():
    name = f"relay-test-{secrets.token_hex(8)}"
    script = "import sys; from relay.worker import weights_link as l, weights_process as p\n"
    script += "p.serve(l.listen(sys.argv[1]), lambda: lambda: b'x')"
    holder = subprocess.Popen([sys.executable, "-c", script, name], env={**os.environ, "PYTHONPATH": str(SOURCE)})
    try:
        connection, message = fetch(name)
        assert message == b"x"
    finally:
        holder.kill()
        holder.wait()
    wait_for_end(connection)
    connection.close()


def test_without_a_holder_there_is_nothing():
    with pytest.raises(NotShared, match="no process holds them"):
        fetch(f"relay-test-{secrets.token_hex(8)}", connect_s=0.1)


def test_a_holder_does_not_outlive_its_launcher():
    """One that came too late ends at once; the kernel ends any other with the thread that started it."""
    spec = '{"worker": "d", "incarnation": 1, "gateways": [], "pack_path": "none", "weights_socket": "%s"}'
    command = [sys.executable, "-m", "relay.worker.weights_process", "--spec", spec % secrets.token_hex(8)]
    late = subprocess.run(
        [*command, "--launcher", str(os.getppid())],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        timeout=30,
    )
    assert late.returncode == 7
    assert late.stderr == "the launcher ended before the holder of its weights started\n"


@pytest.mark.parametrize("moment", ["loading", "answering"])
@pytest.mark.parametrize("text", ["CUDA error: out of luck\nCompile with TORCH_USE_CUDA_DSA", ""])
def test_a_cuda_error_is_one_line_and_a_worker_s_exit_code(moment, text):
    """``serve`` runs in the main thread, so the error is torch's own where a user is answered as where weights are loaded."""
    name = f"relay-test-{secrets.token_hex(8)}"
    fail = f"def fail(*_): raise RuntimeError({text!r})\n"
    script = "from relay.worker import weights_process as p\n" + fail
    script += "p._load = fail\n" if moment == "loading" else "p._load = lambda spec: fail\n"
    spec = f'{{"worker": "d", "incarnation": 1, "gateways": [], "pack_path": "none", "weights_socket": "{name}"}}'
    holder = subprocess.Popen(
        [sys.executable, "-c", script + "p.main()", "--spec", spec],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stderr=subprocess.PIPE,
        text=True,
    )
    if moment == "answering":
        with pytest.raises(NotShared):
            fetch(name)
    _, said = holder.communicate(timeout=30)
    reason = text.partition("\n")[0] or "RuntimeError"
    assert said.startswith(f"the weights that workers of cuda:0 share cannot be held: {reason}; see with nvidia-smi")
    assert said.count("\n") == 1
    assert holder.returncode == DeviceLostError.exit_code
