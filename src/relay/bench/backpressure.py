"""What a full decode worker does to everybody else: first tokens of short prompts with D free and with D full, in one run.

Both phases have the same long streams decoding on D; with D full their prompts are so long that nothing else fits. Some of the
probes go on after their first token and must wait for room; when the streams end all of them must finish, and none may fail.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from relay.bench.kv import percentile
from relay.config import WorkerConfig
from relay.control.contract import Delivery, ModelInfo, RequestFailure, Submission, SubmissionRefused
from relay.control.core import GatewayCore
from relay.control.shell import GatewayShell
from relay.control_config import ControlConfig
from relay.errors import StartupError
from relay.local.workers import LocalWorkers
from relay.models.loaded import LoadedModel
from relay.protocol.messages import Role
from relay.protocol.sampling import SamplingParams

SLOTS: list[tuple[str, Role]] = [("prefill-0", "prefill"), ("decode-0", "decode")]
STREAMS = 3
BLOCK = 16
GOING_ON = 5  # every fifth probe goes on after its first token
DEADLINE_S = 300.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens. ``growth`` is what each stream decodes and D keeps free for it, so that a full pool stays full; three streams with
    ``long_prompt`` fit the pool in whole blocks and leave less than a probe needs, three with ``short_prompt`` leave plenty."""

    pool: int = 8192
    growth: int = 1000
    long_prompt: int = 1680
    short_prompt: int = 96
    probe: int = 200

    def __post_init__(self) -> None:
        long, short = (self.pool - STREAMS * (prompt + self.growth) for prompt in (self.long_prompt, self.short_prompt))
        if not STREAMS * BLOCK <= long < self.probe < short // 2:
            raise ValueError(f"a probe of {self.probe} tokens beside {long} left free, or {short}")


@dataclass(slots=True)
class _Client:
    """One request: when its first token came, and how it ended."""

    begun: float
    first: asyncio.Event
    done: asyncio.Event
    first_s: float = 0.0
    failure: RequestFailure | None = None

    def tokens(self, delivery: Delivery) -> None:
        if not self.first.is_set():
            self.first_s = time.monotonic() - self.begun
            self.first.set()
        if delivery.finish is not None:
            self.done.set()

    def failed(self, failure: RequestFailure) -> None:
        self.failure = failure
        self.first.set()
        self.done.set()


class Backpressure:
    """One cluster, two phases."""

    def __init__(self, model: LoadedModel, threads: int, load: Load) -> None:
        self._load = load
        self._random = np.random.default_rng(0)
        self._vocab = model.config.vocab
        geometry = model.program.geometry
        token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.num_layers * 4
        config = WorkerConfig(
            threads=threads,
            kv_cache_dtype="float32",
            kv_cache_memory_bytes=load.pool * token_bytes,
            growth_tokens=load.growth,
        )
        info = ModelInfo(
            name=model.name,
            model_digest=model.digest,
            numerics_id="",
            vocab_size=self._vocab,
            max_model_len=model.max_model_len,
            created=0,
            eos_token_ids=model.config.eos_token_ids,
        )
        self._workers = LocalWorkers(config, str(model.pack.path), model.digest, lambda name, line: None, slots=SLOTS)
        self._core = GatewayCore(ControlConfig(), info, SLOTS)
        self._shell = GatewayShell(self._core, self._workers)
        self._workers.attach(self._shell)

    async def run(self, probes: int) -> dict[str, Any]:
        """Raises StartupError if the cluster cannot start."""
        self._workers.gateway = await self._shell.listen()
        self._shell.start()
        gave_up = await self._shell.wait_complete()
        try:
            if gave_up is not None:
                raise self._workers.explain(gave_up.worker, gave_up.status, gave_up.reason)
            await self._phase(self._load.short_prompt, 3)  # warms up
            free, failed_free = await self._phase(self._load.short_prompt, probes)
            before = self._core.state.counters.copy()
            full, failed_full = await self._phase(self._load.long_prompt, probes)
        finally:
            self._shell.stop()
            await self._workers.close(2.0)
            await self._shell.close()
        counters = self._core.state.counters
        return {
            "probes": len(full),
            "probes_free": len(free),
            "ttft_p50_free_s": statistics.median(free),
            "ttft_p50_full_s": statistics.median(full),
            "ttft_p99_free_s": percentile(free, 0.99),
            "ttft_p99_full_s": percentile(full, 0.99),
            "ttft_p99_ratio": percentile(full, 0.99) / percentile(free, 0.99),
            "failed_requests": failed_free + failed_full,
            "refused_full": counters["refused_full"] - before["refused_full"],
            "parked": counters["parked"] - before["parked"],
        }

    async def _phase(self, stream_prompt: int, probes: int) -> tuple[list[float], int]:
        """(first-token times of up to ``probes``, failed requests) beside streams with such prompts, while all of them run."""
        streams = [self._submit(stream_prompt, self._load.growth) for _ in range(STREAMS)]
        await self._all([client.first for _, client in streams])
        clients = []
        for index in range(probes):
            if index and any(client.done.is_set() for _, client in streams):
                break  # D has room again
            request, client = self._submit(self._load.probe, 8 if index % GOING_ON == 0 else 1)
            clients.append((request, client))
            await self._all([client.first])
        for request, client in streams:
            if not client.done.is_set():
                self._shell.cancel(request)
        await self._all([client.done for _, client in clients])
        await self._empty()
        failed = sum(client.failure is not None for _, client in [*clients, *streams])
        return [client.first_s for _, client in clients if client.failure is None], failed

    async def _empty(self) -> None:
        """Wait until every engine says that it holds nothing: the next phase begins with all the room there is."""
        loads = [worker.load for worker in self._core.state.workers.values()]
        for _ in range(int(DEADLINE_S / POLL_S)):
            if all(load is not None and not load.running and not load.waiting for load in loads):
                return
            await asyncio.sleep(POLL_S)
            loads = [worker.load for worker in self._core.state.workers.values()]
        raise StartupError(f"an engine of the benchmark was not empty after {DEADLINE_S:.0f} s")

    def _submit(self, tokens: int, max_tokens: int) -> tuple[int, _Client]:
        client = _Client(time.monotonic(), asyncio.Event(), asyncio.Event())
        ids = self._random.integers(0, self._vocab, tokens).tolist()
        params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.0)
        try:
            return self._shell.submit(Submission(ids, params), client), client
        except SubmissionRefused as refusal:
            client.failed(refusal.failure)
            return 0, client

    @staticmethod
    async def _all(events: list[asyncio.Event]) -> None:
        try:
            await asyncio.wait_for(asyncio.gather(*[event.wait() for event in events]), DEADLINE_S)
        except TimeoutError as error:
            raise StartupError(f"a request of the benchmark did not end within {DEADLINE_S:.0f} s") from error


def measure_backpressure(model: LoadedModel, threads: int, probes: int, load: Load | None = None) -> dict[str, Any]:
    """See the module. Raises RelayError."""
    return asyncio.run(Backpressure(model, threads, load or Load()).run(probes))
