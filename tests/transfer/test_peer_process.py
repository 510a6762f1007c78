"""The other engine is a process: killed, it leaves nothing; stopped, the lease ends the transfer; continued, it hears of that."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relay.transfer.contract import ReceiveCompleted, ReceiveFailed, SendFailed, TransferLimits
from relay.transfer.frame import Handoff
from tests.transfer.nodes import PROCESS_WIRES, Node, announce, eventually, receive_order, send_order

ROOT = Path(__file__).parent.parent.parent
QUICK = TransferLimits(512, 1024, 4096, probe_ns=100_000_000, lease_ns=800_000_000, open_lease_ns=20_000_000_000)


@pytest.fixture(params=PROCESS_WIRES)
def scheme(request):
    return request.param


class Peer:
    def __init__(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        command = [sys.executable, "-m", "tests.transfer.peer", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)

    def line(self):
        return self.process.stdout.readline().strip()

    def send(self, number):
        self.process.send_signal(number)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def leftovers():
    return sorted(os.listdir("/dev/shm")), sorted(n for n in os.listdir("/tmp") if "relay" in n)


def test_kill_of_the_source(scheme):
    before = leftovers()
    node = Node("d", scheme)
    node.transport.open_receive(receive_order())
    peer = Peer("source", scheme, node.wire.address)
    try:
        assert peer.line() == "streaming"
        eventually(node.got)
        peer.end()
        event = node.event()
        assert isinstance(event, ReceiveFailed)
        assert event.transfer == 7
        assert leftovers() == before
    finally:
        peer.end()
        node.transport.close()


def test_kill_of_the_target_and_another_life_of_it(scheme):
    before = leftovers()
    node = Node("p", scheme, seed=1)
    peer = Peer("target", scheme)
    heir = None
    try:
        node.transport.open_send(send_order(None, addresses=[peer.line()]))
        announce(node)
        assert peer.line() == "heard"
        peer.end()
        event = node.event()
        assert isinstance(event, SendFailed)
        assert not event.handed_off
        assert leftovers() == before
        heir = Node("d", scheme, incarnation=2)
        heir.transport.open_receive(receive_order(transfer=8))
        node.transport.open_send(send_order(heir, transfer=8, incarnation=2))
        announce(node, transfer=8)
        node.transport.send_handoff(8, Handoff(token_id=1))
        assert isinstance(heir.event(), ReceiveCompleted)
    finally:
        peer.end()
        node.transport.close()
        if heir is not None:
            heir.transport.close()


def test_a_frozen_target_ends_by_lease_and_then_hears_of_it(scheme):
    node = Node("p", scheme, seed=1, limits=QUICK)
    peer = Peer("target", scheme)
    try:
        node.transport.open_send(send_order(None, addresses=[peer.line()]))
        announce(node)
        assert peer.line() == "heard"
        peer.send(signal.SIGSTOP)
        started = time.monotonic()
        while node.events.empty():
            node.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
            assert time.monotonic() < started + 20
        event = node.event()
        assert isinstance(event, SendFailed)
        assert "silent" in event.reason
        peer.send(signal.SIGCONT)
    finally:
        peer.end()
        node.transport.close()


def test_a_frozen_source_ends_by_lease(scheme):
    node = Node("d", scheme, limits=QUICK)
    node.transport.open_receive(receive_order())
    peer = Peer("source", scheme, node.wire.address)
    try:
        assert peer.line() == "streaming"
        eventually(node.got)
        peer.send(signal.SIGSTOP)
        started = time.monotonic()
        while node.events.empty():
            node.transport.tick(time.monotonic_ns())
            time.sleep(0.02)
            assert time.monotonic() < started + 20
        event = node.event()
        assert isinstance(event, ReceiveFailed)
        assert "source silent" in event.reason
        node.store.blocks[:] = -1.0
        peer.send(signal.SIGCONT)  # what it had under way is stale now
        time.sleep(0.3)
        assert (node.store.blocks == -1.0).all()
    finally:
        peer.end()
        node.transport.close()
