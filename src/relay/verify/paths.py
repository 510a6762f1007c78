"""The paths that ``relay verify`` compares with running alone. Each returns its outputs and the evidence that it was taken."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from relay.config import TRANSPORTS, BackendName, WorkerConfig
from relay.control_config import ControlConfig
from relay.models.store import LoadedModel
from relay.protocol.messages import Role
from relay.verify.cluster import VerifyCluster
from relay.verify.compare import SequenceOutput
from relay.verify.requests import VerifyRequest

COLOCATED: list[tuple[str, Role]] = [("worker-0", "both")]
SPLIT: list[tuple[str, Role]] = [("prefill-0", "prefill"), ("decode-0", "decode")]
ALWAYS_SPLIT = ControlConfig(short_prompt_tokens=0)

Outputs = tuple[dict[str, SequenceOutput], str]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a path runs: the model, the request set, the workers' settings, and which worker is made wrong on purpose."""

    model: LoadedModel
    requests: list[VerifyRequest]
    worker: WorkerConfig
    perturb: str = ""

    def cluster(
        self, slots: list[tuple[str, Role]], *, control: ControlConfig | None = None, **worker: int | None
    ) -> VerifyCluster:
        wrong = {slots[-1][0]: self.perturb} if self.perturb else {}
        return VerifyCluster(
            self.model,
            replace(self.worker, **worker),  # type: ignore[arg-type]
            slots,
            control=control,
            perturb=wrong,
        )


def own_salt(request: VerifyRequest) -> str:
    """No two requests share cached prefixes."""
    return request.name


def shared_salt(request: VerifyRequest) -> str:
    return ""


async def alone(setting: Setting) -> Outputs:
    """The baseline: one request at a time on one worker, nothing cached."""
    async with setting.cluster(COLOCATED) as cluster:
        outputs = await cluster.run(setting.requests, salt=own_salt, together=False)
    return outputs, f"{len(outputs)} sequences, one at a time"


async def batched(setting: Setting) -> Outputs:
    async with setting.cluster(COLOCATED) as cluster:
        outputs = await cluster.run(setting.requests, salt=own_salt, together=True)
        steps = await cluster.until_counter("relay_worker_steps_total", 1)
    tokens = sum(len(output.token_ids) for output in outputs.values())
    return outputs, f"{tokens} tokens in {steps} steps" if 0 < steps < tokens else ""


def chunked(chunk: int) -> Callable[[Setting], Awaitable[Outputs]]:
    async def path(setting: Setting) -> Outputs:
        async with setting.cluster(COLOCATED, max_num_batched_tokens=chunk, max_num_seqs=min(4, chunk)) as cluster:
            outputs = await cluster.run(setting.requests, salt=own_salt, together=True)
        longest = max(len(request.token_ids) for request in setting.requests)
        return outputs, f"prompts of up to {longest} tokens in chunks of {chunk}" if longest > chunk else ""

    return path


async def one_thread(setting: Setting) -> Outputs:
    async with setting.cluster(COLOCATED, threads=1) as cluster:
        outputs = await cluster.run(setting.requests, salt=own_salt, together=True)
    return outputs, "1 thread"


def blocks(size: int) -> Callable[[Setting], Awaitable[Outputs]]:
    async def path(setting: Setting) -> Outputs:
        async with setting.cluster(COLOCATED, block_size=size) as cluster:
            outputs = await cluster.run(setting.requests, salt=own_salt, together=True)
        return outputs, f"blocks of {size} tokens" if size != setting.worker.block_size else ""

    return path


async def prefix_cached(setting: Setting) -> Outputs:
    async with setting.cluster(COLOCATED) as cluster:
        await cluster.run(setting.requests, salt=shared_salt, together=True)
        outputs = await cluster.run(setting.requests, salt=shared_salt, together=True)
    cached = sum(output.cached_tokens for output in outputs.values())
    return outputs, f"{cached} prompt tokens from the cache" if cached else ""


async def preempted(setting: Setting) -> Outputs:
    longest = max(len(request.token_ids) + request.params.max_tokens for request in setting.requests)
    geometry = setting.model.program.geometry
    tokens = longest + 6 * setting.worker.block_size
    memory = tokens * geometry.num_layers * 2 * geometry.kv_width * setting.worker.kv_bytes_per_value
    async with setting.cluster(COLOCATED, kv_cache_memory_bytes=memory, growth_tokens=0) as cluster:
        outputs = await cluster.run(setting.requests, salt=own_salt, together=True)
        preemptions = await cluster.until_counter("relay_worker_preemptions_total", 1)
    return outputs, f"{preemptions} preemptions" if preemptions else ""


async def split(setting: Setting) -> Outputs:
    async with setting.cluster(SPLIT, control=ALWAYS_SPLIT) as cluster:
        outputs = await cluster.run(setting.requests, salt=own_salt, together=True)
        received = await cluster.until_counter("relay_worker_kv_tokens_received_total", 1)
        ways = [way for way in TRANSPORTS if cluster.counter(f"relay_worker_kv_transfers_received_{way}_total")]
    return outputs, f"KV of {received} tokens streamed over {' and '.join(ways)}" if received else ""


async def split_cached(setting: Setting) -> Outputs:
    async with setting.cluster(SPLIT, control=ALWAYS_SPLIT) as cluster:
        await cluster.run(setting.requests, salt=shared_salt, together=True)
        outputs = await cluster.run(setting.requests, salt=shared_salt, together=True)
    cached = sum(output.cached_tokens for output in outputs.values())
    return outputs, f"{cached} prompt tokens from the caches" if cached else ""


def killed(worker: str, after_tokens: int) -> Callable[[Setting], Awaitable[Outputs]]:
    async def path(setting: Setting) -> Outputs:
        async with setting.cluster(SPLIT, control=ALWAYS_SPLIT) as cluster:
            cluster.when_tokens(after_tokens, lambda: cluster.kill(worker))
            outputs = await cluster.run(setting.requests, salt=own_salt, together=True)
            resumed = cluster.counter("relay_resumed_total")
            lost = cluster.counter("relay_workers_lost_total")
        return outputs, f"{worker} killed, {resumed} sequences resumed" if lost and resumed else ""

    return path


PATHS: dict[str, Callable[[Setting], Awaitable[Outputs]]] = {
    "batched": batched,
    "chunks of 16": chunked(16),
    "chunks of 50": chunked(50),
    "chunks of 128": chunked(128),
    "one thread": one_thread,
    "blocks of 16": blocks(16),
    "blocks of 64": blocks(64),
    "prefix cache": prefix_cached,
    "preempted": preempted,
    "split": split,
    "split, cached": split_cached,
    "resumed, P killed": killed("prefill-0", 2),
    "resumed, D killed": killed("decode-0", 60),
}
_ELSEWHERE = {"cpu": ("blocks of 16",), "reference": ("blocks of 16",), "cuda": ("one thread", "blocks of 64")}


def paths_of(backend: BackendName) -> list[str]:
    """The paths that differ from the baseline on ``backend``: its own block size and threads it does not have are none."""
    return [name for name in PATHS if name not in _ELSEWHERE[backend]]


QUICK = ("batched", "chunks of 16", "split", "resumed, D killed")
