"""The agent's loop: one selector over the engine's pidfd, the gateways and signals."""

import os
import selectors
import signal
import sys
from collections.abc import Callable
from types import FrameType

from relay.protocol.messages import Drain, EngineExited, GatewayToAgent, Heartbeat, Hello, Rejected
from relay.worker.agent import FLUSH_S, HEARTBEAT_NS, engine_state
from relay.worker.control_link import ControlLink, LinkLost
from relay.worker.host import host_identity
from relay.worker.last_word import last_word
from relay.worker.spec import WorkerSpec
from relay.worker.status_page import StatusPage, manifest_for
from relay.worker.step_age import LONG_STEP_MS, StepAge, thread_waits

KILL_SIGNALS = (signal.SIGKILL, signal.SIGTERM)


class AgentLoop:
    """Watches the engine with pid ``engine`` and reports until either end is gone."""

    def __init__(self, spec: WorkerSpec, engine: int, page: StatusPage, now_ns: Callable[[], int]) -> None:
        self._spec = spec
        self._engine = engine
        self._page = page
        self._now_ns = now_ns
        self._pidfd = os.pidfd_open(engine)
        self._step_age = StepAge(lambda: thread_waits(engine))
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._links: list[ControlLink] = []
        self._terminations = 0

    def run(self) -> int:
        """The process's exit status: the engine's own, 128 + signal for one that was killed, 1 when a gateway was lost."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._connect()
            self._loop()
            lost = ""
        except LinkLost as error:
            lost = str(error)
            self._kill()
        status, number = self._reap()
        rows = self._page.manifest()
        for index, link in enumerate(self._links):
            message = EngineExited(status, number, *manifest_for(rows, index))
            self._say_exited(link, message)
            if message.manifest and not lost and number not in KILL_SIGNALS:
                print(last_word(index, message), flush=True)
        if lost:
            print(f"{self._spec.worker}: {lost}", file=sys.stderr, flush=True)
            return 1
        if number == signal.SIGTERM and self._terminations:
            return 0  # asked to end before it had anything to drain
        return status if status is not None else 128 + (number or 0)

    def _connect(self) -> None:
        spec = self._spec
        hello = Hello(
            process="agent",
            worker=spec.worker,
            incarnation=spec.incarnation,
            pid=os.getpid(),
            role=spec.role,
            host=host_identity(),
        )
        for address in spec.gateways:
            link = ControlLink(address, GatewayToAgent)
            self._links.append(link)
            link.send(hello)

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            for link in self._links:
                selector.register(link, selectors.EVENT_READ)
            beat_ns = self._now_ns()
            while True:
                now_ns = self._now_ns()
                if now_ns >= beat_ns:
                    self._beat(now_ns)
                    beat_ns = now_ns + HEARTBEAT_NS
                for key, mask in selector.select((beat_ns - self._now_ns()) / 1e9):
                    if key.fileobj == self._pidfd:
                        return
                    if key.fileobj == self._wakeup:
                        os.eventfd_read(self._wakeup)
                    elif isinstance(key.fileobj, ControlLink):
                        self._serve(key.fileobj, mask)
                for link in self._links:
                    writing = selectors.EVENT_WRITE if link.wants_write else 0
                    selector.modify(link, selectors.EVENT_READ | writing)

    def _serve(self, link: ControlLink, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            link.flush()
        for message in link.receive() if mask & selectors.EVENT_READ else []:
            if isinstance(message, Rejected):
                raise LinkLost(f"refused by {link.address}: {message.reason}")
            if isinstance(message, Drain):
                self._signal(signal.SIGTERM)

    def _beat(self, now_ns: int) -> None:
        step, phase, age_ms = self._page.read(now_ns)
        state = engine_state(self._engine)
        age_ms = self._step_age.own_ms(step, phase, age_ms, state, now_ns)
        rows = self._page.manifest() if phase == "stepping" and age_ms >= LONG_STEP_MS else []
        for index, link in enumerate(self._links):
            link.send(Heartbeat(step, phase, age_ms, state, *manifest_for(rows, index)))

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminations += 1
        if self._terminations == 1:
            self._signal(signal.SIGTERM)
        else:
            self._kill()
        os.eventfd_write(self._wakeup, 1)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return  # it has ended; the pidfd says so to the loop

    def _reap(self) -> tuple[int | None, int | None]:
        """(exit status, signal) of the engine; one of them is None."""
        _, raw = os.waitpid(self._engine, 0)
        code = os.waitstatus_to_exitcode(raw)
        return (code, None) if code >= 0 else (None, -code)

    def _say_exited(self, link: ControlLink, message: EngineExited) -> None:
        try:
            link.send(message)
        except LinkLost:
            return  # that gateway is gone, which ends this process anyway
        link.finish(FLUSH_S)
