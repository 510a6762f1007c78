"""A worker without a model: both of a worker's processes in one, speaking the gateway's protocol and drawing tokens on a clock.

    python benchmarks/fake_engine.py --gateway tcp://127.0.0.1:PORT --worker worker-0 --incarnation 1 --rate 75

Every running sequence gets one token a step, ``rate`` steps a second, all in one Tokens message; a P's prefill takes no time. Token
ids walk through the vocabulary. Ends when its connection to the gateway does.
"""

import argparse
import asyncio
import os
import socket
from collections.abc import Callable

from relay.ids import SequenceKey
from relay.protocol.framing import FrameDecoder, encode
from relay.protocol.messages import (
    Accept,
    Cancel,
    GatewayToAgent,
    GatewayToEngine,
    Heartbeat,
    Hello,
    Load,
    Message,
    Prefill,
    Reserve,
    Run,
    TokenEntry,
    Tokens,
    Work,
)

Callback = Callable[[Message], None]


class Sequence:
    """One attempt: how many tokens it has, and the walk that names the next one."""

    __slots__ = ("key", "max_tokens", "position", "waiting", "word")

    def __init__(self, work: Work, *, waiting: bool) -> None:
        self.key = SequenceKey(work.request, work.choice, work.attempt)
        self.position = len(work.token_ids) - work.num_prompt
        self.max_tokens = work.params.max_tokens
        self.word = work.request * 7919
        self.waiting = waiting

    def entry(self, vocab: int) -> TokenEntry:
        position = self.position
        self.position += 1
        self.word = (self.word * 1103515245 + 12345) & 0x7FFFFFFF
        finish = "length" if self.position >= self.max_tokens else None
        return TokenEntry(*self.key, position, [1000 + self.word % (vocab - 1000)], finish)


class Peer(asyncio.Protocol):
    def __init__(self, hello: Hello, types: object, on_message: Callback, ended: asyncio.Event) -> None:
        self._hello, self._decoder, self._on_message, self._ended = hello, FrameDecoder(types), on_message, ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        self.send(self._hello)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()

    def send(self, message: Message) -> None:
        self.transport.write(encode(message))


class FakeEngine:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.engine: Peer | None = None
        self.first: list[TokenEntry] = []

    def hello(self, process: str) -> Hello:
        a = self.arguments
        return Hello(
            process=process,  # type: ignore[arg-type]
            worker=a.worker,
            incarnation=a.incarnation,
            pid=os.getpid(),
            role=a.role,
            model_digest=a.digest,
            numerics_id="fake",
            kv_addresses=["tcp://127.0.0.1:1"],
            kv_blocks=1 << 20,
            max_model_len=1 << 20,
            max_num_seqs=4096,
        )

    def message(self, message: Message) -> None:
        assert self.engine is not None
        if isinstance(message, Run):
            self._add(message.work, waiting=False)
        elif isinstance(message, Reserve):
            work = message.work
            self._add(work, waiting=True)
            self.engine.send(Accept(work.request, work.choice, work.attempt, message.transfer, 0))
        elif isinstance(message, Prefill):  # P's part: the token; D (another fake) starts at the next one by itself
            self.engine.send(Tokens([Sequence(message.work, waiting=False).entry(self.arguments.vocab)]))
        elif isinstance(message, Cancel):
            for attempt in range(1, message.attempt + 1):
                self.sequences.pop(SequenceKey(message.request, message.choice, attempt), None)

    def _add(self, work: Work, *, waiting: bool) -> None:
        sequence = Sequence(work, waiting=waiting)
        if waiting:
            sequence.entry(self.arguments.vocab)  # the first token is P's
        self.sequences[sequence.key] = sequence

    def step(self) -> None:
        assert self.engine is not None
        entries = [sequence.entry(self.arguments.vocab) for sequence in self.sequences.values()]
        for entry in entries:
            if entry.finish:
                del self.sequences[SequenceKey(entry.request, entry.choice, entry.attempt)]
        if entries:
            self.engine.send(Tokens(entries))

    async def run(self) -> None:
        host, _, port = self.arguments.gateway.removeprefix("tcp://").rpartition(":")
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        agent = Peer(self.hello("agent"), GatewayToAgent, lambda message: None, ended)
        self.engine = Peer(self.hello("engine"), GatewayToEngine, self.message, ended)
        await loop.create_connection(lambda: agent, host, int(port))
        await loop.create_connection(lambda: self.engine, host, int(port))
        next_step, next_beat, steps = loop.time(), loop.time(), 0
        while not ended.is_set():
            now = loop.time()
            if now >= next_beat:
                agent.send(Heartbeat(steps, "ready", 0, "S"))
                self.engine.send(Load(len(self.sequences), 1 << 20, len(self.sequences), 0, 0))
                next_beat = now + 0.2
            if (
                self.engine.transport.get_write_buffer_size() == 0
            ):  # a gateway that lags gets fewer tokens, not a backlog
                self.step()
            steps += 1
            next_step = max(next_step + 1 / self.arguments.rate, loop.time())
            await asyncio.sleep(next_step - loop.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--worker", default="worker-0")
    parser.add_argument("--incarnation", type=int, default=1)
    parser.add_argument("--role", default="both")
    parser.add_argument("--digest", default="")
    parser.add_argument("--rate", type=float, default=75.0, help="tokens a second of every sequence")
    parser.add_argument("--vocab", type=int, default=49152)
    asyncio.run(FakeEngine(parser.parse_args()).run())


if __name__ == "__main__":
    main()
