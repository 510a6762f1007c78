"""A worker's two connections as asyncio protocols, for tests of the shell over real sockets. Tokens are ``fake_worker``'s."""

import asyncio

from fake_worker import FakeWorker

from relay.ids import SequenceKey, WorkerKey
from relay.protocol.framing import FrameDecoder, encode
from relay.protocol.messages import GatewayToEngine, Heartbeat, Message, Prefill, Rejected, Welcome


class Peer(asyncio.Protocol):
    """One connection: sends its hello, hands on what comes."""

    def __init__(self, hello, on_message) -> None:
        self.hello = hello
        self.on_message = on_message
        self.decoder = FrameDecoder(GatewayToEngine)
        self.answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.send(self.hello)

    def data_received(self, data: bytes) -> None:
        for message in self.decoder.feed(data):
            if isinstance(message, Welcome | Rejected):
                if not self.answer.done():
                    self.answer.set_result(message)
            else:
                self.on_message(message)

    def connection_lost(self, error) -> None:
        self.closed.set()
        if not self.answer.done():
            self.answer.cancel()

    def send(self, message: Message) -> None:
        self.transport.write(encode(message))


class SocketWorker:
    """One life of a fake worker inside this process."""

    def __init__(self, key: WorkerKey, role: str, fleet: "Fleet") -> None:
        self.key = key
        self.fake = FakeWorker(key, role)
        self.fleet = fleet
        self.task = asyncio.ensure_future(self._run())
        self.agent: Peer | None = None
        self.engine: Peer | None = None
        self.alive = True

    async def _run(self) -> None:
        host, port = self.fleet.address.removeprefix("tcp://").rsplit(":", 1)
        loop = asyncio.get_running_loop()
        _, self.agent = await loop.create_connection(
            lambda: Peer(self.fake.hello("agent"), lambda m: None), host, int(port)
        )
        _, self.engine = await loop.create_connection(
            lambda: Peer(self.fake.hello("engine"), self._message), host, int(port)
        )
        await self.engine.answer
        beats = 0
        while self.alive:
            if beats % 20 == 0 and not self.fleet.silent:
                self.agent.send(Heartbeat(beats, "ready", 0, "S"))
            beats += 1
            self.fake.step()
            for key in list(self.fake.prefills):
                order = self.fake.prefill(key)
                self._flush()
                self.fleet.handoff(order, key)
            self._flush()
            await asyncio.sleep(0.005)

    def _message(self, message: Message) -> None:
        self.fake.receive(message)
        self._flush()

    def _flush(self) -> None:
        for message in self.fake.out:
            self.engine.send(message)
        self.fake.out.clear()

    def die(self, signal: int = 9) -> None:
        if not self.alive:
            return
        self.alive = False
        self.task.cancel()
        for peer in (self.engine, self.agent):
            if peer is not None:
                peer.transport.abort()
        asyncio.get_running_loop().call_soon(self.fleet.shell.launcher_exited, self.key, None, signal)


class Fleet:
    """The shell's launcher: starts ``SocketWorker``s."""

    def __init__(self) -> None:
        self.workers: dict[WorkerKey, SocketWorker] = {}
        self.shell = None
        self.address = ""
        self.silent = False

    def start(self, worker: WorkerKey, role: str) -> None:
        self.workers[worker] = SocketWorker(worker, role, self)

    def leaving(self, workers, *, stay_out: bool) -> None:
        """Nobody else starts workers."""

    def stop(self, worker: WorkerKey, *, kill: bool, word=None) -> None:
        self.workers[worker].die()

    def handoff(self, order: Prefill, key: SequenceKey) -> None:
        target = self.workers[WorkerKey(order.target, order.target_incarnation)]
        if target.alive:
            target.fake.handoff(key, order.transfer)

    def current(self, name: str) -> SocketWorker:
        return max((w for k, w in self.workers.items() if k.worker == name), key=lambda w: w.key.incarnation)
