"""A whole cluster for one path of ``relay verify``: the production gateway in this process, real workers beside it."""

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from relay.config import WorkerConfig, control_for
from relay.control.contract import Delivery, ModelInfo, RequestFailure, Submission, SubmissionRefused
from relay.control.core import GatewayCore
from relay.control.shell import GatewayShell
from relay.control_config import ControlConfig
from relay.errors import StartupError
from relay.local.workers import LocalWorkers
from relay.models.store import LoadedModel
from relay.protocol.messages import Role
from relay.verify.compare import SequenceOutput
from relay.verify.requests import VerifyRequest

STOP_GRACE_S = 2.0
RUN_DEADLINE_S = 300.0


class _Collector:
    """Gathers one request's deliveries; ``done`` is set at its end."""

    def __init__(self, request: VerifyRequest, on_tokens: Callable[[int], None]) -> None:
        self.outputs = [SequenceOutput() for _ in range(request.n)]
        self.failure: RequestFailure | None = None
        self.done = asyncio.Event()
        self._on_tokens = on_tokens

    def tokens(self, delivery: Delivery) -> None:
        output = self.outputs[delivery.choice]
        output.cached_tokens = output.cached_tokens or delivery.cached_tokens
        output.token_ids += delivery.token_ids
        output.logprobs += delivery.logprobs or []
        output.logit_digests += delivery.logit_digests or []
        output.kv_digests += delivery.kv_digests or []
        output.finish = delivery.finish or output.finish
        if all(one.finish for one in self.outputs):
            self.done.set()
        self._on_tokens(len(delivery.token_ids))

    def failed(self, failure: RequestFailure) -> None:
        self.failure = failure
        self.done.set()


class VerifyCluster:
    """Use as ``async with``: workers are ready inside the block and gone after it. ``slots``: (worker id, role)."""

    def __init__(
        self,
        model: LoadedModel,
        config: WorkerConfig,
        slots: list[tuple[str, Role]],
        *,
        control: ControlConfig | None = None,
        perturb: Mapping[str, str] | None = None,
    ) -> None:
        self._log: deque[str] = deque(maxlen=50)
        self.tokens_seen = 0
        self._watchers: list[tuple[int, Callable[[], None]]] = []
        info = ModelInfo(
            name=model.name,
            model_digest=model.digest,
            numerics_id="",
            vocab_size=model.config.vocab,
            max_model_len=config.max_model_len or model.max_model_len,
            created=int(time.time()),
            eos_token_ids=model.config.eos_token_ids,
        )
        self._workers = LocalWorkers(
            config,
            str(model.pack.path),
            model.digest,
            lambda name, line: self._log.append(f"{name}: {line}"),
            slots=slots,
            perturb=perturb,
        )
        self._core = GatewayCore(control_for(config.backend, control or ControlConfig()), info, slots)
        self._shell = GatewayShell(self._core, self._workers)
        self._workers.attach(self._shell)

    async def __aenter__(self) -> "VerifyCluster":
        self._workers.gateway = await self._shell.listen()
        self._shell.start()
        gave_up = await self._shell.wait_complete()
        if gave_up is not None:
            await self.__aexit__(None, None, None)
            raise self._workers.explain(gave_up.worker, gave_up.status, gave_up.reason)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.stop()
        await self._workers.close(STOP_GRACE_S)
        await self._shell.close()

    async def run(
        self, requests: Iterable[VerifyRequest], *, salt: Callable[[VerifyRequest], str], together: bool
    ) -> dict[str, SequenceOutput]:
        """Run ``requests`` (all at once, or one after the other); outputs by "request/choice", failures included."""
        outputs: dict[str, SequenceOutput] = {}
        waiting: list[tuple[VerifyRequest, _Collector]] = []
        for request in requests:
            collector = _Collector(request, self._count)
            submission = Submission(
                request.token_ids, request.params, n=request.n, cache_salt=salt(request), capture=True
            )
            try:
                self._shell.submit(submission, collector)
            except SubmissionRefused as refusal:
                collector.failed(refusal.failure)
            waiting.append((request, collector))
            if not together:
                await self._finish(request, collector)
        for request, collector in waiting:
            await self._finish(request, collector)
            outputs |= {f"{request.name}/{choice}": output for choice, output in enumerate(collector.outputs)}
        return outputs

    def when_tokens(self, count: int, action: Callable[[], None]) -> None:
        """Call ``action`` once ``count`` more tokens were delivered."""
        self._watchers.append((self.tokens_seen + count, action))

    def kill(self, worker: str) -> None:
        """SIGKILL the engine of ``worker``, as the kernel or an operator would."""
        pid = self.worker(worker)["pid"]
        if pid is None:
            raise StartupError(f"{worker} has no engine to kill")
        os.kill(pid, signal.SIGKILL)

    def worker(self, worker: str) -> dict[str, Any]:
        """The status row of ``worker``."""
        rows: Any = self._shell.status()["workers"]
        return next(row for row in rows if row["id"] == worker)

    def counter(self, name: str) -> int:
        """A metric's value, summed over its labels."""
        return int(sum(value for metric, _, value in self._shell.metrics() if metric == name))

    async def until_counter(self, name: str, least: int, timeout_s: float = 2.0) -> int:
        """``counter`` once it is at least ``least``: workers report theirs with a delay. Returns what it is in the end."""
        deadline = time.monotonic() + timeout_s
        while self.counter(name) < least and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self.counter(name)

    async def _finish(self, request: VerifyRequest, collector: _Collector) -> None:
        problem = ""
        try:
            await asyncio.wait_for(collector.done.wait(), RUN_DEADLINE_S)
        except TimeoutError:
            problem = f"no end after {RUN_DEADLINE_S:.0f} s"
        if collector.failure is not None:
            problem = collector.failure.message
        if problem:
            last = f"; the workers' last words: {' | '.join(list(self._log)[-3:])}" if self._log else ""
            for output in collector.outputs:
                output.failure = problem + last

    def _count(self, tokens: int) -> None:
        self.tokens_seen += tokens
        for watcher in [w for w in self._watchers if w[0] <= self.tokens_seen]:
            self._watchers.remove(watcher)
            asyncio.get_running_loop().call_soon(watcher[1])
