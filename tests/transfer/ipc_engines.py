"""P and D in processes of their own whose KV goes through memory of D's device, of which either is killed.

``python -m tests.transfer.ipc_engines GROUND ROLE INCARNATION`` is one of them; it obeys lines on standard input. GROUND is "cuda",
or a folder whose files stand for a device's memory: any process maps one by its name and writes to it as kernels would.
"""

import hashlib
import json
import mmap
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from relay.transfer.contract import (
    Identity,
    Layout,
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveOrder,
    SendAcknowledged,
    SendFailed,
    SendOrder,
    TransferLimits,
)
from relay.transfer.frame import Handoff
from relay.transfer.ipc import IpcWire
from relay.transfer.transport import WiredTransport
from tests.transfer.nodes import SMALL
from tests.transfer.stores import LAYOUT
from tests.transfer.test_staged import FakeStream

ROOT = Path(__file__).parent.parent.parent
LIFE_S = 120  # of a child, at most
WAIT_S = 60
STRIKES = (0.1, 0.5)  # shares of a transfer after which the peer is killed


class FileArea(mmap.mmap):
    name = b""


class FileMemory:
    """Stands for ``relay.kernels.cuda.ipc.DeviceMemory``."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def allocate(self, size):
        name = secrets.token_hex(16)
        (self.folder / name).write_bytes(bytes(size))
        return self._map(name, size)

    def handle(self, area):
        return area.name.ljust(64, b"\0")

    def open(self, handle, size):
        return self._map(handle.rstrip(b"\0").decode(), size)

    def close(self, area):
        """It ends with the last view of it."""

    def _map(self, name, size):
        with (self.folder / name).open("r+b") as file:
            area = FileArea(file.fileno(), size)
        area.name = name.encode()
        return area


class FileGround:
    """Blocks are numpy arrays; a copy takes 2 ms."""

    layout, limits, tokens = LAYOUT, SMALL, 100
    source_table, target_table = [3, 1, 0, 5, 2, 7, 9], [11, 4, 6, 2, 0, 1, 15]
    area_bytes, grace_s = 1 << 18, 0.3

    def __init__(self, folder):
        self.name = str(folder)

    def memory(self):
        return FileMemory(self.name)

    def store(self, seed):
        return FakeStream(4, seed=seed)

    def of(self, store, table):
        """The bytes of ``tokens`` positions in these blocks."""
        return store.tokens(table, self.tokens).tobytes()

    def outside(self, store, table):
        """All bytes in other blocks."""
        return np.delete(store.blocks, table, axis=1).tobytes()


class CudaGround:
    """The backend's own KV cache and copies; 8 layers of 8B's width, 128 MiB a transfer."""

    tokens, block = 4096, 64
    source_table, target_table = list(range(64))[::-1], list(range(20, 84))
    area_bytes, grace_s = 64 << 20, 2.0
    name = "cuda"

    def __init__(self):
        from relay.models.config import ModelConfig, RopeConfig

        self.config = ModelConfig(
            architecture="llama", vocab=256, hidden=1024, intermediate=1024, num_layers=8, num_heads=8, num_kv_heads=8,
            head_dim=128, rms_eps=1e-5, max_positions=4096, rope=RopeConfig(theta=1e4), tied_embeddings=False,
        )  # fmt: skip
        self.layout = Layout(8, 8, 128, "bfloat16")
        patience = dict.fromkeys(
            ("lease_ns", "open_lease_ns", "stall_ns"), 30_000_000_000
        )  # kernels are compiled meanwhile
        self.limits = TransferLimits(max_frame_bytes=4 << 20, window_bytes=32 << 20, join_bytes=2 << 20, **patience)

    def memory(self):
        from relay.kernels.cuda.ipc import DeviceMemory

        return DeviceMemory("cuda:0")

    def store(self, seed):
        """A backend without weights: nothing is computed. The same seed gives the same KV in every process."""
        import torch

        from relay.kernels.cuda.backend import CudaBackend
        from relay.models.llama import build_program

        backend = CudaBackend("cuda:0", max_rows=4, max_tokens=64, graphs=False)
        backend._program = build_program(self.config)
        backend.allocate_kv(96, self.block, "bfloat16")
        backend._device.kv.zero_()
        if seed is not None:
            chance = torch.Generator(device="cuda:0").manual_seed(seed)
            backend._device.kv.normal_(generator=chance)
        torch.cuda.synchronize()
        return backend

    def of(self, store, table):
        return self._bytes(store._device.kv[:, :, [int(block) for block in table]])

    def outside(self, store, table):
        return self._bytes(store._device.kv[:, :, [block for block in range(96) if block not in table]])

    @staticmethod
    def _bytes(blocks):
        import torch

        torch.cuda.synchronize()
        return blocks.contiguous().view(torch.int16).cpu().numpy().tobytes()


def ground_of(name):
    return CudaGround() if name == "cuda" else FileGround(name)


class Struck:
    """A store that does something at a given byte, while the copy of its frame is under way."""

    def __init__(self, store, token_bytes):
        self.inner, self._token_bytes = store, token_bytes
        self._left, self._deed = {"stage": 0, "collect": 0}, None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def at(self, what, byte, deed):
        self._left[what], self._deed = int(byte), deed

    def stage(self, frames):
        copying = self.inner.stage(frames)
        self._count("stage", [one for one, _ in frames])
        return copying

    def collect(self, frames):
        copying = self.inner.collect(frames)
        self._count("collect", [one for one, _ in frames])
        return copying

    def _count(self, what, ranges):
        if self._left[what]:
            moved = sum(one.layers * one.count for one in ranges) * self._token_bytes
            self._left[what] = max(0, self._left[what] - moved)
            if not self._left[what]:
                self._deed()


class Engine:
    """One end: "p" has KV in ``source_table``, "d" has room in ``target_table``."""

    def __init__(self, ground, name, incarnation=1):
        self.ground = ground
        self.table = np.array(ground.source_table if name == "p" else ground.target_table, np.int32)
        self.store = Struck(ground.store(1 if name == "p" else None), ground.layout.token_bytes)
        self.events = queue.Queue()
        self.wire = IpcWire("here", ground.memory(), ground.area_bytes)
        self.wire._pool._grace_s = ground.grace_s
        identity = Identity(name, incarnation, "m" * 8, "n" * 8, ground.layout)
        self.transport = WiredTransport(identity, self.store, self.events.put, [self.wire], limits=ground.limits)
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self):
        while True:
            self.transport.tick(time.monotonic_ns())
            time.sleep(0.1)

    @property
    def bytes(self):
        """Of a transfer."""
        return self.ground.tokens * self.ground.layout.num_layers * self.ground.layout.token_bytes

    def event(self):
        return self.events.get(timeout=WAIT_S)

    def send(self, transfer, incarnation, addresses):
        ground = self.ground
        self.transport.open_send(SendOrder(transfer, 1, "d", incarnation, tuple(addresses), 0, ground.tokens))
        for layer in range(ground.layout.num_layers):
            self.transport.layer_written(transfer, layer, 0, ground.tokens, self.table)
        self.transport.send_handoff(transfer, Handoff(token_id=1))

    def receive(self, transfer, incarnation):
        table = tuple(self.table.tolist())
        self.transport.open_receive(ReceiveOrder(transfer, 1, "p", incarnation, 0, self.ground.tokens, table))

    def digest(self):
        return hashlib.blake2b(self.ground.of(self.store.inner, self.table)).hexdigest()

    def outside(self):
        return hashlib.blake2b(self.ground.outside(self.store.inner, self.table.tolist())).hexdigest()

    def close(self):
        self.transport.close()


class Child:
    """An engine in a process of its own."""

    def __init__(self, ground, role, incarnation):
        self.incarnation = incarnation
        command = [sys.executable, "-m", "tests.transfer.ipc_engines", ground.name, role, str(incarnation)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self._alarm = threading.Timer(LIFE_S, self.process.kill)
        self._alarm.start()

    def tell(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}"
        return json.loads(line)

    def end(self):
        self._alarm.cancel()
        self.process.kill()
        status = self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        return status


def p_is_killed(ground):
    """Twice while it writes to D's area: D keeps what it had, and the area serves the next P, after the pause and not before."""
    children = [Child(ground, "p", number) for number in (1, 2, 3)]
    want = hashlib.blake2b(ground.of(ground.store(1), np.array(ground.source_table))).hexdigest()
    engine = Engine(ground, "d")
    pool = engine.wire._pool
    try:
        for child, share in zip(children, (*STRIKES, 0), strict=True):
            assert child.hear() == "ready"
            first, second = 10 * child.incarnation, 10 * child.incarnation + 1
            engine.receive(first, child.incarnation)
            child.tell(first, 1, engine.transport.addresses)
            event = engine.event()
            assert isinstance(event, ReceiveCompleted), event
            assert event.stats.scheme == "ipc"
            assert child.hear() == "SendAcknowledged"
            assert engine.digest() == want
            if not share:
                break
            before = engine.outside()
            engine.store.at("collect", share * engine.bytes, child.process.kill)
            engine.receive(second, child.incarnation)
            child.tell(second, 1, engine.transport.addresses)
            event = engine.event()
            assert isinstance(event, ReceiveFailed), event
            assert child.end() == -9
            assert engine.outside() == before
            deadline = time.monotonic() + WAIT_S
            while not pool._quarantined:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert pool._proven_free(time.monotonic()) is None, "what it had queued may still run"
            time.sleep(ground.grace_s + 0.1)
        assert pool._areas == 1, "each P had the same area"
    finally:
        engine.close()
        for child in children:
            child.end()


def d_is_killed(ground):
    """Twice while P writes to its area: P keeps its KV and its device, and serves the next D."""
    children = [Child(ground, "d", number) for number in (1, 2, 3)]
    engine = Engine(ground, "p")
    want = engine.digest()
    try:
        for child, share in zip(children, (*STRIKES, 0), strict=True):
            addresses = child.hear()
            first, second = 10 * child.incarnation, 10 * child.incarnation + 1
            child.tell(first, 1)
            assert child.hear() == "open"
            engine.send(first, child.incarnation, addresses)
            assert child.hear() == ["ReceiveCompleted", want]
            event = engine.event()
            assert isinstance(event, SendAcknowledged), event
            assert event.stats.scheme == "ipc"
            if not share:
                break
            child.tell(second, 1)
            assert child.hear() == "open"
            engine.store.at("stage", share * engine.bytes, child.process.kill)
            engine.send(second, child.incarnation, addresses)
            event = engine.event()
            assert isinstance(event, SendFailed), event
            assert child.end() == -9
            assert engine.digest() == want
    finally:
        engine.close()
        for child in children:
            child.end()


def main(ground_name, role, incarnation):
    engine = Engine(ground_of(ground_name), role, int(incarnation))

    def say(what):
        print(json.dumps(what), flush=True)

    say("ready" if role == "p" else engine.transport.addresses)
    for line in sys.stdin:
        if role == "p":
            engine.send(*json.loads(line))
            say(type(engine.event()).__name__)
        else:
            engine.receive(*json.loads(line))
            say("open")
            say([type(engine.event()).__name__, engine.digest()])


if __name__ == "__main__":
    main(*sys.argv[1:])
