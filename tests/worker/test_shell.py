"""Two engine shells in threads over real sockets and hash backends; the test is the gateway."""

import threading

import pytest

from relay.clock import MonotonicClock
from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler, SchedulerLimits
from relay.protocol.messages import (
    Accept,
    Drain,
    Drained,
    GatewayToEngine,
    Hello,
    Prefill,
    Reserve,
    Tokens,
)
from relay.transfer.contract import Identity
from relay.transfer.transport import WiredTransport
from relay.transfer.wire import TcpWire
from relay.worker.core import WorkerConfig, WorkerCore
from relay.worker.engine_shell import EngineShell
from relay.worker.gateway_links import GatewayLinks
from relay.worker.inbox import Inbox
from relay.worker.status_page import StatusPage
from relay.worker.step_thread import StepThread
from tests.engine.hash_backend import LAYERS, HashBackend, program
from tests.worker.gateway_side import accept_hello, address_of, listen
from tests.worker.harness import LAYOUT, MAX_MODEL_LEN, TINY, expected, work


class LiveWorker:
    def __init__(self, listener, name):
        clock = MonotonicClock()
        limits = SchedulerLimits(8, 24, 16, 64, MAX_MODEL_LEN)
        backend = HashBackend()
        backend.allocate_kv(64, 16)
        runner = Runner(backend, program(), limits)
        inbox = Inbox()
        page = StatusPage.open("")
        identity = Identity(name, 1, "model", "hash", LAYOUT)
        self.transport = WiredTransport(identity, backend, inbox.post, [TcpWire()], limits=TINY)
        core = WorkerCore(WorkerConfig(), Scheduler(limits, "hash"), runner.kv_digests)
        self.shell = EngineShell(core, self.transport, inbox, page, clock)
        steps = StepThread(runner, self.transport, LAYERS, page, inbox.post, clock)
        steps.start()
        hello = Hello(process="engine", worker=name, incarnation=1, pid=1)
        links = GatewayLinks([address_of(listener)], GatewayToEngine, lambda: hello, clock.now_ns, again=False)
        links.dial_first()
        _, self.gateway = accept_hello(listener)
        self.ended = None
        self.thread = threading.Thread(target=self._run, args=(links, steps))
        self.thread.start()

    def _run(self, links, steps):
        self.ended = self.shell.run(links, steps.submit)

    def drain(self):
        self.gateway.send(Drain())
        self.gateway.expect(Drained)
        self.thread.join(20)
        self.gateway.socket.close()
        assert self.ended is not None
        assert self.ended.status == 0


@pytest.fixture
def listener():
    with listen() as server:
        yield server


def test_split_over_tcp_equals_a_run_alone(listener):
    p, d = LiveWorker(listener, "p"), LiveWorker(listener, "d")
    request = work([5, 8, 2, 9] * 15)
    d.gateway.send(Reserve(request, 1, "p", 1))
    accept = d.gateway.expect(Accept)
    p.gateway.send(Prefill(request, 1, accept.cached_tokens, d.transport.addresses, "d", 1))
    tokens, finish, _, _ = expected(request)
    (first,) = p.gateway.expect(Tokens).entries
    assert (first.position, first.token_ids, first.finish) == (0, tokens[:1], None)
    assert d.gateway.stream(1) == (tokens, finish)
    p.drain()
    d.drain()
