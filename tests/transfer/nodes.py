"""Two engines' transports joined by any wire, and the orders the transfer tests give them."""

import queue
import time

import numpy as np
import pytest

from relay.kernels.kv_frames import SharingFailed
from relay.transfer.channel import read_frame
from relay.transfer.checksum import crc32c
from relay.transfer.contract import ReceiveOrder, SendOrder, TransferLimits
from relay.transfer.frame import Header, Kind
from relay.transfer.handshake import greet
from relay.transfer.inproc import InprocTransport, Network
from relay.transfer.ipc import IpcWire
from relay.transfer.nixl.agent import installed
from relay.transfer.nixl.wire import MISSING, NixlWire
from relay.transfer.transport import WiredTransport
from relay.transfer.wire import ShmWire, TcpWire
from tests.transfer.fake_nixl import Fabric, fake_wire
from tests.transfer.stores import LAYOUT, ArrayStore, identity

TOKENS = 100
SOURCE_TABLE = np.array([3, 1, 0, 5, 2, 7, 9], np.int32)
TARGET_TABLE = (11, 4, 6, 2, 0, 1, 15)
SMALL = TransferLimits(min_frame_bytes=512, max_frame_bytes=1024, window_bytes=4096, probe_ns=200_000_000)


class FakeDevices:
    """Memory of devices that any process of this machine could map; here all are one process."""

    def __init__(self):
        self.areas = {}
        self.opened = []
        self.problem = ""

    def allocate(self, size):
        if self.problem == "allocate":
            raise SharingFailed("out of memory (2)")
        name = len(self.areas).to_bytes(64, "little")
        self.areas[name] = bytearray(size)
        return self.areas[name]

    def handle(self, area):
        return next(name for name, other in self.areas.items() if other is area)

    def open(self, handle, size):
        if self.problem == "open":
            raise SharingFailed("peer access is not supported (217)")
        assert len(self.areas[handle]) == size
        self.opened.append(handle)
        return self.areas[handle]

    def close(self, area):
        if self.problem == "close":
            raise SharingFailed("invalid argument (1)")
        self.opened.remove(self.handle(area))


DEVICES = FakeDevices()
FABRIC = Fabric()
WIRES = {"tcp": TcpWire, "shm": lambda: ShmWire("here"), "nixl-fake": lambda: fake_wire(FABRIC), "nixl": NixlWire}
NO_NIXL = pytest.mark.skipif(installed() is None, reason=MISSING)
EVERY_WIRE = [pytest.param(name, marks=NO_NIXL) if name == "nixl" else name for name in WIRES]
PROCESS_WIRES = [name for name in EVERY_WIRE if name != "nixl-fake"]  # between processes
WIRES["ipc"] = lambda: IpcWire("here", DEVICES, area_bytes=1 << 18)  # for engines with devices alone
WAIT_S = 20


class Node:
    """One engine: its store, its transport, the events it told."""

    def __init__(self, name, scheme, network=None, seed=None, incarnation=1, limits=SMALL, store=None, **other):
        self.store = store or ArrayStore(seed=seed)
        self.events = queue.Queue()
        self.network = network
        who = identity(name, incarnation, **other)
        if scheme == "inproc":
            self.transport = InprocTransport(network, who, self.store, self.events.put, limits)
        else:
            self.wire = (scheme if callable(scheme) else WIRES[scheme])()
            self.transport = WiredTransport(who, self.store, self.events.put, [self.wire], limits=limits)

    def pump(self):
        if self.network is not None:
            self.network.deliver_all()

    def event(self):
        self.pump()
        return self.events.get(timeout=WAIT_S if self.network is None else 0.001)

    def quiet(self):
        self.pump()
        return self.events.empty()

    def tick(self, now_ns):
        if self.network is not None:
            self.network.now_ns = now_ns
        self.transport.tick(now_ns)
        self.pump()

    def got(self):
        """Whether any KV has come."""
        self.pump()
        return bool(self.store.blocks.any())


class Pair:
    """P, D and what joins them."""

    def __init__(self, scheme, limits=SMALL, source=None, target=None):
        self.network = Network(crc32c) if scheme == "inproc" else None
        self.source = Node("p", scheme, self.network, seed=1, limits=limits, **(source or {}))
        self.target = Node("d", scheme, self.network, limits=limits, **(target or {}))

    def close(self):
        self.source.transport.close()
        self.target.transport.close()

    def start(self, first=0, transfer=7):
        self.target.transport.open_receive(receive_order(first, transfer))
        self.source.transport.open_send(send_order(self.target, first, transfer))

    def whole(self, first=0):
        """Everything P has of the tokens that were sent, and everything D has of them."""
        return (node.store.tokens(table, TOKENS)[:, first:] for node, table in self.ends())

    def ends(self):
        return (self.source, SOURCE_TABLE), (self.target, TARGET_TABLE)


def send_order(target, first=0, transfer=7, attempt=1, incarnation=1, addresses=None):
    return SendOrder(transfer, attempt, "d", incarnation, tuple(addresses or target.transport.addresses), first, TOKENS)


def receive_order(first=0, transfer=7, attempt=1):
    return ReceiveOrder(transfer, attempt, "p", 1, first, TOKENS, TARGET_TABLE)


def announce(source, first=0, transfer=7, chunk=33):
    for start in range(first, TOKENS, chunk):
        for layer in range(LAYOUT.num_layers):
            source.transport.layer_written(transfer, layer, start, min(chunk, TOKENS - start), SOURCE_TABLE)


def raw_peer(target, name="p", **other):
    """The channel of a hand-driven P that has said hello."""
    stream = target.wire.dial(target.wire.address)
    stream.set_timeout(WAIT_S)
    greet(stream, identity(name, **other), crc32c, "d", 1)
    channel = target.wire.upgrade(stream, dialled=True, lane=target.wire.connections - 1)
    channel.set_timeout(WAIT_S)
    return channel


def answer(channel):
    """The next frame from D, with its payload."""
    header, payload, _ = read_frame(channel, crc32c)
    return header, bytes(payload)


def send_raw(channel, head, payload):
    """A frame as it is, right or wrong."""
    channel.await_room(len(payload))
    channel.reserve(len(payload))[:] = payload
    channel.commit(bytes(head))


def kv_header(first=0, count=4, transfer=7, epoch=1, attempt=1, layer=0):
    size = count * LAYOUT.token_bytes
    return Header(Kind.KV, transfer, epoch, attempt, layer, 0, LAYOUT.num_kv_heads, first, count, 0, size)


def eventually(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.005)
