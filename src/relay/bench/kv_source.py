"""P of the KV benchmark: a real engine that prefills prompts of random ids, streaming them or not, and its link to the target."""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from relay.bench.kv_target import TICK_S, Command, Report
from relay.bench.stamps import LayerStamps, StampedSink, StampedStore
from relay.errors import RelayError
from relay.kernels.backend import SampledToken
from relay.models.loaded import LoadedModel
from relay.protocol.messages import Work
from relay.protocol.sampling import SamplingParams
from relay.transfer.contract import SendFailed, SendOrder, TransferEvent, TransferLimits
from relay.transfer.frame import Handoff
from relay.transfer.nixl.wire import NixlWire
from relay.transfer.sender import frame_tokens
from relay.transfer.transport import WiredTransport
from relay.transfer.wire import ShmWire, TcpWire, Wire
from relay.worker.assembly import assemble
from relay.worker.commands import SinkRow
from relay.worker.host import host_identity
from relay.worker.sink import TransferSink
from relay.worker.spec import WorkerSpec, encode_spec

REPORT_TIMEOUT_S = 120.0
INCARNATION = 1
HANDOFF = Handoff(token_id=0)


class BenchFailed(RelayError):
    """A transfer of the benchmark did not arrive."""


class TargetProcess:
    """The child that plays D."""

    def __init__(self, spec: WorkerSpec, descriptors: tuple[int, ...]) -> None:
        command = [sys.executable, "-m", "relay.bench.kv_target", encode_spec(spec)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors)
        self._reports: deque[Report] = deque()
        self._arrived = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, name="bench-reports", daemon=True).start()
        self.addresses = self.wait("ready").addresses

    def tell(self, command: Command) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def wait(self, name: str, transfer: int = 0) -> Report:
        """The next report of this name (and transfer). Raises BenchFailed for a failure instead of it, or silence."""

        def find() -> Report | None:
            for report in self._reports:
                if report.name == name and report.transfer == transfer:
                    self._reports.remove(report)
                    return report
                if report.name == "failed":
                    raise BenchFailed(f"transfer {report.transfer}: {report.reason}")
            return None

        deadline = time.monotonic() + REPORT_TIMEOUT_S
        with self._arrived:
            while (found := find()) is None:
                if self._ended or not self._arrived.wait(max(0.0, deadline - time.monotonic())):
                    raise BenchFailed(f"the target process said no {name!r}")
            return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(Report)
        for line in self._process.stdout:
            with self._arrived:
                self._reports.append(decoder.decode(line))
                self._arrived.notify_all()
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()


@dataclass(slots=True)
class Prefilled:
    """Times of one prefill: begin, end of the last layer, and what it announced for whoever sends it afterwards."""

    start_ns: int
    last_layer_ns: int
    announced: list[SinkRow]
    layers_ns: list[tuple[int, int]]
    release: Callable[[], None]


class Source:
    """P's side; prompts never repeat, so nothing comes from the prefix cache."""

    def __init__(self, model: LoadedModel, spec: WorkerSpec) -> None:
        self._engine = engine = assemble(spec)
        self._stamps = LayerStamps(engine.backend, model.program)
        self._vocab = model.program.geometry.vocab
        self.store = StampedStore(engine.backend)
        self.num_layers = engine.num_layers
        self.token_bytes = engine.identity.layout.token_bytes * engine.num_layers
        self.checksum = engine.checksum
        self._random = np.random.default_rng(0)
        self._transports: dict[str, WiredTransport] = {}
        self._transfer = 0
        threading.Thread(target=self._tick, name="bench-tick", daemon=True).start()
        self.failures: list[SendFailed] = []

    def transport(self, scheme: str) -> WiredTransport:
        if scheme not in self._transports:
            self._transports[scheme] = WiredTransport(
                self._engine.identity, self.store, self._ended, [_wire(scheme)], checksum=self.checksum
            )
        return self._transports[scheme]

    def open(self, scheme: str, target: TargetProcess, tokens: int, first: int = 0, *, echo: bool = False) -> int:
        """Reserve at the target and open the transfer; its number."""
        self._transfer += 1
        target.tell(Command("receive", self._transfer, first, tokens, echo))
        target.wait("reserved", self._transfer)
        order = SendOrder(self._transfer, 1, "bench-d", INCARNATION, tuple(target.addresses), first, tokens)
        self.transport(scheme).open_send(order)
        return self._transfer

    def prefill(self, tokens: int, scheme: str = "", transfer: int = 0) -> Prefilled:
        """Compute a new prompt; with ``transfer`` stream it and hand it off at its first token."""
        engine = self._engine
        ids = self._random.integers(0, self._vocab, tokens).tolist()
        work = Work(self._transfer, 0, 1, ids, tokens, SamplingParams(max_tokens=2, temperature=0.0))
        transport = self.transport(scheme) if transfer else None
        announced: list[SinkRow] = []
        layers: list[tuple[int, int]] = []
        begin = time.monotonic_ns()
        engine.scheduler.add(work, prefill_only=True)
        token: SampledToken | None = None
        while token is None:
            plan = engine.scheduler.plan()
            assert plan is not None
            row = plan.rows[0]
            key = engine.scheduler.key_of_slot(row.slot)
            table = np.array(engine.scheduler.block_table(key), np.int32)
            announced.append(SinkRow(transfer, row.start, row.start, row.count, table))
            inner = TransferSink(transport, self.num_layers, {0: announced[-1]}) if transport is not None else None
            sink = StampedSink(inner)
            result = engine.runner.execute(plan, sink)
            if result.error is not None:
                raise BenchFailed(result.error)
            layers += sink.written_ns
            for update in engine.scheduler.update(result):
                token = update.tokens[0] if update.tokens else token
        if transport is not None:
            transport.send_handoff(transfer, Handoff(token_id=token.token_id))
        return Prefilled(begin, self._stamps.last_layer_ns, announced, layers, lambda: engine.scheduler.release(key))

    def send(self, scheme: str, transfer: int, prefilled: Prefilled) -> int:
        """Send what was computed before, as fast as it goes; when that began."""
        transport = self.transport(scheme)
        begin = time.monotonic_ns()
        last = prefilled.announced[-1]
        for layer in range(self.num_layers):
            transport.layer_written(transfer, layer, 0, last.first + last.count, last.block_table)
        transport.send_handoff(transfer, HANDOFF)
        return begin

    def send_slowly(self, scheme: str, transfer: int, prefilled: Prefilled, await_frame: Callable[[], object]) -> int:
        """Send the frames that streaming sends, each after ``await_frame`` returned for the one before; their number."""
        transport, limits = self.transport(scheme), TransferLimits()
        token_bytes = self.token_bytes // self.num_layers
        last = prefilled.announced[-1].first + prefilled.announced[-1].count
        pending = [0] * self.num_layers
        frames = 0
        for row in prefilled.announced:
            for layer in range(self.num_layers):
                transport.layer_written(transfer, layer, row.first, row.count, row.block_table)
                pending[layer] += row.count
                if pending[layer] * token_bytes >= limits.min_frame_bytes or row.first + row.count == last:
                    count = -(-pending[layer] // frame_tokens(limits.max_frame_bytes, token_bytes))
                    pending[layer] = 0
                    frames += count
                    for _ in range(count):
                        await_frame()
        transport.send_handoff(transfer, HANDOFF)
        return frames

    def hand_off(self, scheme: str, transfer: int) -> int:
        """Hand off a transfer of no bytes; when."""
        begin = time.monotonic_ns()
        self.transport(scheme).send_handoff(transfer, HANDOFF)
        return begin

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            for transport in list(self._transports.values()):
                transport.tick(time.monotonic_ns())

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _ended(self, event: TransferEvent) -> None:
        if isinstance(event, SendFailed):
            self.failures.append(event)


def _wire(scheme: str) -> Wire:
    if scheme == "nixl":
        return NixlWire()
    return ShmWire(host_identity()) if scheme == "shm" else TcpWire()
