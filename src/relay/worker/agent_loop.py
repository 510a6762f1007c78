"""The agent's loop: one selector over the engine's pidfd, the gateways and signals."""

import os
import selectors
import signal
import sys
from collections.abc import Callable
from types import FrameType

from relay.protocol.messages import Drain, EngineExited, GatewayToAgent, Heartbeat, Hello
from relay.worker.agent import FLUSH_S, HEARTBEAT_NS, engine_state
from relay.worker.control_link import ControlLink, LinkLost
from relay.worker.gateway_links import GatewayLinks, Received
from relay.worker.host import host_identity
from relay.worker.last_word import ended_by_itself, last_word
from relay.worker.spec import WorkerSpec
from relay.worker.status_page import StatusPage, manifest_of
from relay.worker.step_age import LONG_STEP_MS, StepAge, thread_waits

DYING = "X"  # what the kernel calls a dead process


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
        self._links = GatewayLinks(spec.gateways, GatewayToAgent, self._hello, now_ns, again=spec.orphan_hold_s > 0)
        self._alone_since_ns: int | None = None
        self._terminations = 0
        self._watching = self._dying = self._told = False

    def run(self) -> int:
        """The process's exit status: the engine's own, 128 + signal for one that was killed, 1 without a gateway."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._links.dial_first()
            self._loop()
            lost = ""
        except LinkLost as error:
            lost = str(error)
            self._kill()
        status, number = self._reap()
        message = EngineExited(status, number, *manifest_of(self._page.manifest()))
        self._links.send(None, message)
        self._links.finish(FLUSH_S)
        if ended_by_itself(message) and not lost:
            print(last_word(message), flush=True)
        if lost:
            print(f"{self._spec.worker}: {lost}", file=sys.stderr, flush=True)
            return 1
        if number == signal.SIGTERM and self._terminations:
            return 0  # asked to end before it had anything to drain
        return status if status is not None else 128 + (number or 0)

    def _hello(self) -> Hello:
        spec = self._spec
        return Hello(
            process="agent",
            worker=spec.worker,
            incarnation=spec.incarnation,
            pid=os.getpid(),
            role=spec.role,
            host=host_identity(),
        )

    def _loop(self) -> None:
        links = self._links
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            links.attach(selector)
            beat_ns = self._now_ns()
            while True:
                now_ns = self._now_ns()
                if not self._watching and self._page.held:
                    self._watching = True
                    self._page.watch(self._engine_dies)
                if now_ns >= beat_ns or (self._dying and not self._told):
                    self._beat(now_ns)
                    beat_ns = now_ns + HEARTBEAT_NS
                links.tick()
                self._check_alone(now_ns)
                links.update()
                wait_ns = min(beat_ns, links.next_ns() or beat_ns) - self._now_ns()
                for key, mask in selector.select(max(0, wait_ns) / 1e9):
                    if key.fileobj == self._pidfd:
                        return
                    if key.fileobj == self._wakeup:
                        os.eventfd_read(self._wakeup)
                    elif isinstance(key.fileobj, ControlLink):
                        self._serve(key.fileobj, mask)

    def _check_alone(self, now_ns: int) -> None:
        """Raises LinkLost when there has been no gateway for as long as the engine keeps orphans."""
        lost = self._links.take_lost()
        if self._links.num_welcomed or not (lost or self._alone_since_ns is not None):
            self._alone_since_ns = None
            return
        if self._alone_since_ns is None:
            self._alone_since_ns = now_ns
        if now_ns - self._alone_since_ns >= int(self._spec.orphan_hold_s * 1e9):
            raise LinkLost(lost[-1].reason if lost else "no gateway came back")

    def _serve(self, link: ControlLink, mask: int) -> None:
        for happened in self._links.serve(link, mask):
            if isinstance(happened, Received) and isinstance(happened.message, Drain):
                self._signal(signal.SIGTERM)

    def _beat(self, now_ns: int) -> None:
        step, phase, age_ms = self._page.read(now_ns)
        state = DYING if self._dying else engine_state(self._engine)
        self._told = self._dying
        age_ms = self._step_age.own_ms(step, phase, age_ms, state, now_ns)
        rows = self._page.manifest() if phase == "stepping" and age_ms >= LONG_STEP_MS else []
        self._links.send(None, Heartbeat(step, phase, age_ms, state, *manifest_of(rows)))

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminations += 1
        if self._terminations == 1:
            self._signal(signal.SIGTERM)
        else:
            self._kill()
        os.eventfd_write(self._wakeup, 1)

    def _engine_dies(self) -> None:
        """On another thread: gateways need not wait until the kernel has taken its memory down."""
        self._dying = True
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
