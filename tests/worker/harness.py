"""Worker cores over hash backends on an in-process network: the shell without threads. A test is the gateway."""

from collections import deque

from relay.clock import MonotonicClock
from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler, SchedulerLimits
from relay.ids import SequenceKey
from relay.protocol.messages import Accept, CacheChanged, Load, Orphans, Prefill, Reserve, SequenceFailed, Tokens, Work
from relay.protocol.sampling import SamplingParams
from relay.transfer.checksum import crc32c
from relay.transfer.contract import Identity, Layout, TransferLimits
from relay.transfer.inproc import InprocTransport, Network
from relay.worker.commands import (
    AbortTransfer,
    CloseGateway,
    Exit,
    ForgetUnsent,
    OpenReceive,
    OpenSend,
    SendHandoff,
    SendToGateway,
    SetTimer,
    StartStep,
)
from relay.worker.core import WorkerConfig, WorkerCore
from relay.worker.events import GatewayConnected, OrderReceived, StepFinished, TimerFired
from relay.worker.status_page import StatusPage
from relay.worker.step_thread import StepThread
from relay.worker.transfer_commands import carry_out
from tests.engine.hash_backend import LAYERS, HashBackend, oracle, program

MAX_MODEL_LEN = 256
LAYOUT = Layout(num_layers=LAYERS, num_kv_heads=1, head_dim=2, dtype="float32")  # 8 bytes of K, 8 of V
TINY = TransferLimits(min_frame_bytes=64, max_frame_bytes=256, window_bytes=1024)


def params(**values) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "seed": 5} | values))


def work(prompt, request=1, attempt=1, committed=(), capture=False, **values) -> Work:
    return Work(request, 0, attempt, [*prompt, *committed], len(prompt), params(**values), capture=capture)


def expected(of: Work):
    """What a run alone yields: (tokens, finish, logits rows, KV units), committed tokens included."""
    prompt = of.token_ids[: of.num_prompt]
    return oracle(prompt, of.num_prompt, of.params, of.choice, MAX_MODEL_LEN)


class FakeWorker:
    def __init__(self, world, name, incarnation=1, config=None, **limits):
        sizes = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 24,
            "block_size": 16,
            "num_blocks": 64,
            "max_model_len": MAX_MODEL_LEN,
        } | limits
        self.limits = SchedulerLimits(**sizes)
        self.world = world
        self.name = name
        self.backend = HashBackend()
        self.backend.allocate_kv(self.limits.num_blocks, self.limits.block_size)
        self.runner = Runner(self.backend, program(), self.limits)
        self.scheduler = Scheduler(self.limits, "hash")
        self.core = WorkerCore(config or WorkerConfig(), self.scheduler, self.runner.kv_digests)
        identity = Identity(name, incarnation, "model", "hash", LAYOUT)
        self.incarnation = incarnation
        self.events = deque()
        self.transport = InprocTransport(world.network, identity, self.backend, self.events.append, TINY)
        self.steps = deque()
        page = StatusPage.open("")
        self.step_thread = StepThread(
            self.runner, self.transport, LAYERS, page, self.events.append, MonotonicClock()
        )  # never started: ``compute`` is its loop
        self.timers = {}
        self.outbox = []
        self.heard = {}  # connection → what was sent to it alone
        self.closed = []  # connections
        self.exited = None
        world.workers[name] = self
        self.connect(0)

    def connect(self, connection, gateway="gateway-0", epoch=1):
        self.events.append(GatewayConnected(connection, gateway, epoch))

    def order(self, message, connection=0):
        self.events.append(OrderReceived(connection, message))

    def think(self):
        """Handle what has happened, then plan."""
        while self.events:
            self._carry_out(self.core.handle(self.events.popleft(), self.world.now_ns))
        self._carry_out(self.core.advance(self.world.now_ns))
        self.core.held.check()
        self.core.orphans.check()

    def compute(self):
        """Run the oldest started step."""
        self.events.append(StepFinished(self.step_thread.execute(self.steps.popleft())))

    def fire_timers(self):
        for name, at_ns in list(self.timers.items()):
            if at_ns <= self.world.now_ns:
                del self.timers[name]
                self.events.append(TimerFired(name))
        self.transport.tick(self.world.now_ns)

    def sent(self, kind):
        """Messages of one type to the gateway, taken out."""
        found = [m for m in self.outbox if isinstance(m, kind)]
        self.outbox = [m for m in self.outbox if not isinstance(m, kind)]
        return found

    def _carry_out(self, commands):
        for command in commands:
            match command:
                case SendToGateway(connection, message):
                    self.outbox.append(message)
                    self.heard.setdefault(connection, []).append(message)
                case CloseGateway(connection):
                    self.closed.append(connection)
                case StartStep():
                    self.steps.append(command)
                case OpenSend() | ForgetUnsent() | SendHandoff() | OpenReceive() | AbortTransfer():
                    carry_out(self.transport, command)
                case SetTimer(name, at_ns):
                    self.timers[name] = at_ns
                case Exit(status, reason):
                    self.exited = (status, reason)

    def idle(self):
        return not (self.events or self.steps)

    def check_empty(self):
        """Nothing is held: no block, no sequence, no transfer."""
        assert len(self.core.held) == 0
        assert len(self.core.orphans) == 0
        assert not self.core.held.by_transfer
        assert not self.core.held.by_slot
        assert self.scheduler.load().kv_used == 0
        assert not self.scheduler.has_work()
        assert not self.transport._senders
        assert not self.transport._receivers
        assert not self.transport._tables


class World:
    """Some workers, their network, and what the gateway has heard: ``streams[key]`` = tokens by position."""

    def __init__(self, **limits):
        self.network = Network(crc32c)
        self.workers = {}
        self.now_ns = 0
        self.streams = {}
        self.finishes = {}
        self.entries = {}
        self.failures = []
        self.limits = limits

    def worker(self, name, **values):
        return FakeWorker(self, name, **(self.limits | values))

    def settle(self, limit=10_000):
        """Until nothing moves."""
        for _ in range(limit):
            moved = False
            for worker in list(self.workers.values()):
                worker.think()
                self.collect(worker)
                if worker.steps:
                    worker.compute()
                    moved = True
                moved |= bool(worker.events)
            if self.network.parcels:
                self.network.deliver()
                moved = True
            if not moved:
                return
        raise AssertionError("the world does not settle")

    def pass_time(self, seconds):
        self.now_ns += int(seconds * 1e9)
        self.network.now_ns = self.now_ns
        for worker in self.workers.values():
            worker.fire_timers()

    def collect(self, worker):
        for message in worker.sent(Tokens):
            for entry in message.entries:
                key = SequenceKey(entry.request, entry.choice, entry.attempt)
                stream = self.streams.setdefault(key, {})
                for offset, token in enumerate(entry.token_ids):
                    known = stream.setdefault(entry.position + offset, token)
                    assert known == token, f"{key} position {entry.position + offset}: {known} and {token}"
                self.entries.setdefault(key, []).append(entry)
                if entry.finish is not None:
                    self.finishes[key] = entry.finish
        self.failures += worker.sent(SequenceFailed)
        worker.sent(Load)
        worker.sent(CacheChanged)
        worker.sent(Orphans)

    def tokens(self, of: Work):
        """All tokens heard of an attempt, in order; positions must have no hole."""
        stream = self.streams.get(SequenceKey(of.request, of.choice, of.attempt), {})
        first = len(of.token_ids) - of.num_prompt
        assert sorted(stream) == list(range(first, first + len(stream)))
        return [stream[position] for position in sorted(stream)]

    def finish(self, of: Work):
        return self.finishes.get(SequenceKey(of.request, of.choice, of.attempt))

    def split(self, source, target, of: Work, transfer=1):
        """Reserve on ``target``, then prefill on ``source``."""
        target.order(Reserve(of, transfer, source.name, source.incarnation))
        target.think()
        (accept,) = target.sent(Accept)
        self.prefill(source, target, of, transfer, accept.cached_tokens)
        return accept

    def prefill(self, source, target, of, transfer, first_token):
        addresses = target.transport.addresses
        source.order(Prefill(of, transfer, first_token, addresses, target.name, target.incarnation))
