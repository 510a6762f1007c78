"""One connection from an agent or an engine to the gateway's shell."""

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from relay.control.events import ProcessName
from relay.ids import WorkerKey
from relay.protocol.framing import MAX_FRAME_BYTES, FrameDecoder, FramingError, encode
from relay.protocol.messages import AgentToGateway, EngineToGateway, Hello, Message, Tokens

if TYPE_CHECKING:
    from relay.control.shell import GatewayShell

MAX_UNSENT_BYTES = 64 * 1024 * 1024
RECEIVE_BUFFER_BYTES = 32 * 1024  # some thousand tokens: a gateway that lags shows its engines so
TURN_EVENTS = 512
HELLO_DEADLINE_S = 10.0
MAX_HELLO_BYTES = 256 * 1024  # nothing longer is waited for from somebody who has not been let in
_INCOMING = AgentToGateway | EngineToGateway


class Connection(asyncio.Protocol):
    """Bytes to messages and back. No task and no queue of its own: what arrives is handled in ``data_received``."""

    def __init__(self, shell: "GatewayShell", number: int) -> None:
        self._shell = shell
        self.number = number
        self.worker: WorkerKey | None = None  # set when the hello was accepted
        self.process: ProcessName = "agent"
        self._decoder = FrameDecoder(_INCOMING, MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._received: deque[Any] = deque()
        self._paused = False
        self._problem = ""
        self._reason = "EOF"
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._deadline = asyncio.get_running_loop().call_later(HELLO_DEADLINE_S, self._no_hello)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            self._received += self._decoder.feed(data)
        except FramingError as error:
            self._problem = str(error)
        if not self._paused:
            self._handle_received()

    def _handle_received(self) -> None:
        """Handle what was decoded, in turns: a gateway that lags reads slowly, but lets everything else go on between."""
        received = self._received
        events = 0
        while received and not self.closed:
            if events >= TURN_EVENTS:
                self._take_turns()
                return
            message = received.popleft()
            events += len(message.entries) if type(message) is Tokens else 1
            if self.worker is not None:
                self._shell.message(self.worker, message)
            elif isinstance(message, Hello):
                self._shell.hello(self, message)
            else:
                self._problem = "the first message was no hello"
                received.clear()
        if self._problem:
            self.abort(self._problem)
        elif self._paused:
            self._paused = False
            if self._transport is not None and not self.closed:
                self._transport.resume_reading()

    def _take_turns(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._paused:
            self._handle_received()

    def bind(self, worker: WorkerKey, process: ProcessName) -> None:
        """The hello was accepted."""
        self.worker, self.process = worker, process
        self._decoder.limit = MAX_FRAME_BYTES
        if self._deadline is not None:
            self._deadline.cancel()

    def send(self, message: Message) -> None:
        """Queue ``message``; a peer that lets too much pile up is cut off."""
        if self._transport is None or self.closed:
            return
        self._transport.write(encode(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort("the peer does not read")

    def close(self) -> None:
        """Close after what is queued was sent; nothing received from now on counts."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Drop the connection now; the core hears of it as a loss."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        while self._received and not self.closed and self.worker is not None:  # said before the end: it counts
            self._shell.message(self.worker, self._received.popleft())
        self._transport = None
        self._paused = False
        if self._deadline is not None:
            self._deadline.cancel()
        if error is not None and self._reason == "EOF":
            self._reason = str(error) or type(error).__name__
        self._shell.lost(self, self._reason)

    def _no_hello(self) -> None:
        self.abort("no hello in time")
