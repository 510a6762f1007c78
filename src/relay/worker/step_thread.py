"""The thread that computes: takes planned steps in order, runs them, posts their results."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from relay.clock import Clock
from relay.engine.runner import StartedStep
from relay.engine.step import StepPlan, StepResult
from relay.kernels.backend import LayerSink
from relay.transfer.contract import Transport
from relay.worker.commands import StartStep
from relay.worker.events import StepFinished
from relay.worker.sink import TransferSink
from relay.worker.status_page import StatusPage

POLL_S = 50e-6  # between looks at a step that computes while no other is there to be started


class StepRunner(Protocol):
    """What is needed of ``engine.runner.Runner``."""

    def start(self, plan: StepPlan, sink: LayerSink | None = None) -> StartedStep: ...

    def ended(self, started: StartedStep) -> bool: ...

    def finish(self, started: StartedStep) -> StepResult: ...


class StepThread:
    """``post`` is called on this thread with each result and must not block.

    ``overlapped``: the backend queues its work, so step n + 1 is started before step n is finished and the device never waits.
    """

    def __init__(
        self,
        runner: StepRunner,
        transport: Transport,
        num_layers: int,
        page: StatusPage,
        post: Callable[[StepFinished], None],
        clock: Clock,
        *,
        overlapped: bool = False,
    ) -> None:
        self._runner = runner
        self._transport = transport
        self._num_layers = num_layers
        self._page = page
        self._post = post
        self._clock = clock
        self._overlapped = overlapped
        self._failures = 0  # steps that raised
        self._steps: queue.SimpleQueue[StartStep] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: StartStep) -> None:
        self._steps.put(step)

    def execute(self, step: StartStep) -> StepResult:
        """Run one step now."""
        return self._finish(self._begin(step))

    def _begin(self, step: StartStep) -> StartedStep:
        """What builds on a failed step is not streamed: it was computed from what is not there. (A step whose draw fails has
        computed its KV, so one that was begun before that was known may stream.)"""
        streamed = step.sinks and step.failures == self._failures
        sink = TransferSink(self._transport, self._num_layers, step.sinks) if streamed else None
        started = self._runner.start(step.plan, sink)
        self._failures += started.failure is not None
        return started

    def _finish(self, started: StartedStep) -> StepResult:
        result = self._runner.finish(started)
        self._failures += result.error is not None and started.failure is None
        return result

    def _run(self) -> None:
        page, clock = self._page, self._clock
        running: StartedStep | None = None
        while True:
            step = self._next(running)
            before = running
            if step is not None:
                page.begin_step(step.manifest, clock.now_ns())
                running = self._begin(step)
                if not self._overlapped:
                    before = running
            if before is not None:
                result = self._finish(before)
                if before is running:
                    running = None
                page.finish_step()
                if running is None and self._steps.empty():
                    page.set_phase("ready", clock.now_ns())
                self._post(StepFinished(result))

    def _next(self, running: StartedStep | None) -> StartStep | None:
        """The next step to begin; None once ``running`` has ended without another to begin."""
        if running is None:
            return self._steps.get()
        while not self._runner.ended(running):
            with contextlib.suppress(queue.Empty):
                return self._steps.get(timeout=POLL_S)
        return None
