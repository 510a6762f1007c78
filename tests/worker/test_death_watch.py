"""Deaths are told by the kernel through a mutex, whatever ends the process, and not before."""

import os
import subprocess
import sys
import threading

import pytest

from relay.protocol.messages import EngineExited, Heartbeat
from relay.worker.spec import WorkerSpec, encode_spec
from relay.worker.status_page import StatusPage
from tests.worker.gateway_side import accept_hello, address_of, listen

HOLDER = """
import os, sys, threading
sys.path[:0] = {path!r}
from relay.worker.status_page import StatusPage
page = StatusPage.open({page!r})
page.hold()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("held", flush=True)
sys.stdin.readline()
os._exit(0)
"""
PATIENCE_S = 30.0


@pytest.mark.parametrize("end", ["kill", "terminate", "leave"])
def test_the_end_of_the_holder_is_told_once(end: str) -> None:
    page, path = StatusPage.create()
    assert not page.held
    code = HOLDER.format(path=sys.path, page=path)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            assert page.held
            told: list[int] = []
            died = threading.Event()

            def tell() -> None:
                told.append(1)
                died.set()

            page.watch(tell)
            assert not died.wait(0.05)
            if end == "leave":
                process.communicate(b"\n")
            else:
                getattr(process, end)()
            assert died.wait(PATIENCE_S)
            assert told == [1]
        finally:
            process.kill()


ENGINE = """
import sys, threading
sys.path[:0] = {path!r}
from relay.worker.status_page import StatusPage
page = StatusPage.open(sys.argv[1])
end = threading.Event()
holder = threading.Thread(target=lambda: (page.hold(), end.wait()))
holder.start()
sys.stdin.readline()
end.set()
holder.join()
sys.stdin.readline()
"""
AGENT = """
import subprocess, sys, time
sys.path[:0] = {path!r}
from relay.worker.agent_loop import AgentLoop
from relay.worker.spec import decode_spec
from relay.worker.status_page import StatusPage
page, path = StatusPage.create()
engine = subprocess.Popen([sys.executable, "-c", {engine!r}, path])
sys.exit(AgentLoop(decode_spec({spec!r}), engine.pid, page, time.monotonic_ns).run())
"""


def test_an_agent_tells_that_its_engine_is_dying_before_it_has_ended() -> None:
    """The thread that the watch is on has ended, the process has not, as if the kernel were busy with its memory."""
    with listen() as listener:
        spec = WorkerSpec(worker="w", incarnation=1, gateways=[address_of(listener)], pack_path="/none")
        engine = ENGINE.format(path=sys.path)
        code = AGENT.format(path=sys.path, engine=engine, spec=encode_spec(spec))
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as agent:
            try:
                assert agent.stdin is not None
                _, side = accept_hello(listener)
                assert side.expect(Heartbeat).engine_state != "X"
                os.write(agent.stdin.fileno(), b"\n")
                assert side.expect(Heartbeat, lambda beat: beat.engine_state == "X").step == 0
                os.write(agent.stdin.fileno(), b"\n")
                assert side.expect(EngineExited) == EngineExited(status=0)
                side.socket.close()
            finally:
                agent.kill()
