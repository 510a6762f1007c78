"""D of the KV benchmark: an engine's pool and transport in a process of its own, told what to do by lines of JSON.

``python -m relay.bench.kv_target SPEC``. Each line on stdin is a ``Command``, each on stdout a ``Report``. It ends with its stdin.
"""

import os
import socket
import sys
import threading
import time

import msgspec
import numpy as np

from relay.bench.ceilings import PairEnd, receive_socket, region
from relay.bench.stamps import StampedStore, transfer_cpu_s
from relay.errors import RelayError
from relay.transfer.contract import ReceiveCompleted, ReceiveOrder, TransferEvent
from relay.transfer.nixl.agent import installed
from relay.transfer.nixl.wire import NixlWire
from relay.transfer.transport import WiredTransport
from relay.transfer.wire import ShmWire, TcpWire, Wire
from relay.worker.assembly import assemble
from relay.worker.engine_process import SWITCH_INTERVAL_S
from relay.worker.host import host_identity
from relay.worker.spec import decode_spec

TICK_S = 0.25


class Command(msgspec.Struct, omit_defaults=True):
    """``receive``: expect a transfer. ``copies``: report the copies since the last time. ``cpu``: report ``cpu_s``.
    ``pair``, ``socket``: ceilings."""

    name: str
    transfer: int = 0
    first: int = 0
    tokens: int = 0
    echo: bool = False  # report each frame when it is in the blocks
    frames: int = 0
    frame_bytes: int = 0
    checksum: bool = True
    descriptors: list[int] = []


class Report(msgspec.Struct, omit_defaults=True):
    """``at_ns``: when it happened. ``cpu_s``: what the transfer threads have used so far."""

    name: str
    at_ns: int = 0
    transfer: int = 0
    reason: str = ""
    addresses: list[str] = []
    copies: list[tuple[int, int, int, int]] = []  # layer, first, start, end
    cpu_s: float = 0.0


class Target:
    """The child's side."""

    def __init__(self, spec_text: str) -> None:
        spec = decode_spec(spec_text)
        self._engine = assemble(spec)
        self._store = _EchoStore(self, StampedStore(self._engine.backend))
        self._lock = threading.Lock()
        self.echo = False
        wires: list[Wire] = [ShmWire(host_identity()), TcpWire(), *([NixlWire()] if installed() else [])]
        self._transport = WiredTransport(
            self._engine.identity, self._store, self._ended, wires, checksum=self._engine.checksum
        )
        blocks = self._engine.limits.num_blocks
        self._blocks = np.random.default_rng(1).permutation(blocks).tolist()

    def run(self) -> None:
        self.say(Report("ready", addresses=self._transport.addresses))
        threading.Thread(target=self._tick, daemon=True).start()
        decoder = msgspec.json.Decoder(Command)
        for line in sys.stdin.buffer:
            self._obey(decoder.decode(line))

    def say(self, report: Report) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()

    def _obey(self, command: Command) -> None:
        if command.name == "receive":
            self.echo = command.echo
            needed = -(-command.tokens // self._engine.limits.block_size)
            order = ReceiveOrder(
                command.transfer, 1, "bench-p", 1, command.first, command.tokens, tuple(self._blocks[:needed])
            )
            self._transport.open_receive(order)
            self.say(Report("reserved", transfer=command.transfer))
        elif command.name == "copies":
            writes, self._store.stamped.writes = self._store.stamped.writes, []
            self.say(Report("copies", copies=[(c.layer, c.first, c.start_ns, c.end_ns) for c in writes]))
        elif command.name == "cpu":
            self.say(Report("cpu", cpu_s=transfer_cpu_s()))
        elif command.name == "pair":
            memory, filled, emptied = command.descriptors
            end = PairEnd(memory, filled, emptied, self._engine.checksum if command.checksum else None)
            region(command.frames * command.frame_bytes)
            self.say(Report("started"))
            end.receive(command.frames, command.frame_bytes)
            self.say(Report("done", at_ns=time.monotonic_ns()))
        elif command.name == "socket":
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.say(Report("listening", addresses=[str(server.getsockname()[1])]))
                peer, _ = server.accept()
            region(command.frames * command.frame_bytes)
            self.say(Report("started"))
            with peer:
                checksum = self._engine.checksum if command.checksum else None
                receive_socket(peer, command.frames, command.frame_bytes, checksum)
            self.say(Report("done", at_ns=time.monotonic_ns()))

    def _ended(self, event: TransferEvent) -> None:
        at_ns = time.monotonic_ns()
        if isinstance(event, ReceiveCompleted):
            self.say(Report("completed", at_ns, event.transfer))
        else:
            self.say(Report("failed", at_ns, event.transfer, getattr(event, "reason", "")))

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self._transport.tick(time.monotonic_ns())


class _EchoStore:
    """Says when a frame is in the blocks, if asked to."""

    def __init__(self, target: Target, stamped: StampedStore) -> None:
        self._target = target
        self.stamped = stamped
        self.read_kv, self.write_kv, self.read_kv_crc = stamped.read_kv, stamped.write_kv, stamped.read_kv_crc

    def write_kv_crc(self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview) -> int:
        checksum = self.stamped.write_kv_crc(layer, block_table, first, count, data)
        if self._target.echo:
            self._target.say(Report("frame", time.monotonic_ns()))
        return checksum


def main() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine does
    try:
        Target(sys.argv[1]).run()
        status = 0
    except RelayError as error:
        print(error, file=sys.stderr, flush=True)
        status = error.exit_code
    os._exit(status)  # transfer threads may be inside C calls


if __name__ == "__main__":
    main()
