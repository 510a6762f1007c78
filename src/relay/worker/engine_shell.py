"""The engine's main loop: one selector over gateway sockets and a wake-up, the pure core inside.

Other threads (steps, transfers) only post events. Commands are carried out before the next event is handled, so a transfer is
stopped before its blocks can be given to anybody else.
"""

import selectors
from collections.abc import Callable

from relay.clock import Clock
from relay.record.recorder import decide
from relay.transfer.contract import Transport
from relay.worker.commands import (
    AbortTransfer,
    CloseGateway,
    Command,
    Exit,
    ForgetUnsent,
    OpenReceive,
    OpenSend,
    SendHandoff,
    SendToGateway,
    SetTimer,
    StartStep,
)
from relay.worker.control_link import ControlLink
from relay.worker.core import WorkerCore
from relay.worker.events import Event, GatewayConnected, GatewayLost, OrderReceived, TimerFired
from relay.worker.gateway_links import GatewayLinks, Received, Welcomed
from relay.worker.inbox import Inbox
from relay.worker.record import Advanced, WorkerRecorder
from relay.worker.status_page import StatusPage
from relay.worker.transfer_commands import carry_out

TICK_NS = 250_000_000
FLUSH_S = 1.0


class EngineShell:
    """Runs until the core says Exit. Everything that happens elsewhere comes through ``inbox``."""

    def __init__(
        self,
        core: WorkerCore,
        transport: Transport,
        inbox: Inbox,
        page: StatusPage,
        clock: Clock,
        recorder: WorkerRecorder | None = None,
    ) -> None:
        """``recorder`` is closed when ``run`` returns."""
        self._core = core
        self._recorder = recorder
        self._transport = transport
        self._inbox = inbox
        self._page = page
        self._clock = clock
        self._submit: Callable[[StartStep], None] | None = None
        self._timers: dict[str, int] = {}
        self._exit: Exit | None = None

    def run(self, links: GatewayLinks, submit: Callable[[StartStep], None]) -> Exit:
        """Serve ``links`` (already dialled) until the end; returns why. ``submit`` starts a step."""
        self._submit = submit
        with selectors.DefaultSelector() as selector:
            selector.register(self._inbox, selectors.EVENT_READ)
            links.attach(selector)
            next_tick_ns = self._clock.now_ns() + TICK_NS
            while self._exit is None:
                due_ns = min([next_tick_ns, links.next_ns() or next_tick_ns, *self._timers.values()])
                for key, mask in selector.select(max(0, due_ns - self._clock.now_ns()) / 1e9):
                    if isinstance(key.fileobj, ControlLink):
                        self._serve(links, key.fileobj, mask)
                    else:
                        self._inbox.clear_wakeup()
                now_ns = self._clock.now_ns()
                if now_ns >= next_tick_ns:
                    self._transport.tick(now_ns)
                    next_tick_ns = now_ns + TICK_NS
                links.tick()
                self._turn(links, now_ns)
                links.update()
        links.finish(FLUSH_S)
        self._transport.close()
        if self._recorder is not None:
            self._recorder.close(self._exit.reason or "exit")
        return self._exit

    def _turn(self, links: GatewayLinks, now_ns: int) -> None:
        for name in [name for name, at_ns in self._timers.items() if at_ns <= now_ns]:
            del self._timers[name]
            self._inbox.post(TimerFired(name))
        while self._exit is None:
            for lost in links.take_lost():
                self._inbox.post(GatewayLost(lost.connection, lost.reason))
            event = self._inbox.take()
            if event is None:
                break
            self._carry_out(links, self._handle(event, now_ns))
        if self._exit is None:
            self._carry_out(links, self._advance(now_ns))
        if self._core.draining:
            self._page.set_draining()

    def _handle(self, event: Event, now_ns: int) -> list[Command]:
        return decide(self._recorder, self._core.handle, event, now_ns)

    def _advance(self, now_ns: int) -> list[Command]:
        return decide(self._recorder, lambda _, at_ns: self._core.advance(at_ns), Advanced(), now_ns)

    def _serve(self, links: GatewayLinks, link: ControlLink, mask: int) -> None:
        for happened in links.serve(link, mask):
            match happened:
                case Welcomed(connection, welcome):
                    self._inbox.post(GatewayConnected(connection, welcome.gateway, welcome.epoch))
                case Received(connection, message):
                    self._inbox.post(OrderReceived(connection, message))  # type: ignore[arg-type] # the decoder's union

    def _carry_out(self, links: GatewayLinks, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SendToGateway(gateway, message):
                    links.send(gateway, message)
                case CloseGateway(gateway):
                    links.close(gateway)
                case StartStep():
                    assert self._submit is not None
                    self._submit(command)
                case OpenSend() | ForgetUnsent() | SendHandoff() | OpenReceive() | AbortTransfer():
                    carry_out(self._transport, command)
                case SetTimer(name, at_ns):
                    self._timers[name] = at_ns
                case Exit():
                    self._exit = command
