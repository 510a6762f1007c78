"""The thread that computes: takes planned steps in order, runs them, posts their results."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from relay.clock import Clock
from relay.engine.step import StepPlan, StepResult
from relay.kernels.backend import LayerSink
from relay.transfer.contract import Transport
from relay.worker.commands import StartStep
from relay.worker.events import StepFinished
from relay.worker.sink import TransferSink
from relay.worker.status_page import StatusPage


class StepRunner(Protocol):
    """What is needed of ``engine.runner.Runner``."""

    def execute(self, plan: StepPlan, sink: LayerSink | None = None) -> StepResult: ...


class StepThread:
    """``post`` is called on this thread with each result and must not block."""

    def __init__(
        self,
        runner: StepRunner,
        transport: Transport,
        num_layers: int,
        page: StatusPage,
        post: Callable[[StepFinished], None],
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._transport = transport
        self._num_layers = num_layers
        self._page = page
        self._post = post
        self._clock = clock
        self._failures = 0  # steps that raised
        self._steps: queue.SimpleQueue[StartStep] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: StartStep) -> None:
        self._steps.put(step)

    def execute(self, step: StartStep) -> StepResult:
        """Run one step now. What builds on a failed step is not streamed: it was computed from what is not there."""
        streamed = step.sinks and step.failures == self._failures
        sink = TransferSink(self._transport, self._num_layers, step.sinks) if streamed else None
        result = self._runner.execute(step.plan, sink)
        self._failures += result.error is not None
        return result

    def _run(self) -> None:
        page, clock = self._page, self._clock
        while True:
            step = self._steps.get()
            page.begin_step(step.manifest, clock.now_ns())
            result = self.execute(step)
            page.finish_step()
            if self._steps.empty():
                page.set_phase("ready", clock.now_ns())
            self._post(StepFinished(result))
