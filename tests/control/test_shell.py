"""The asyncio shell over real sockets with fake workers inside the test's own loop."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from fake_engine import Fleet, Peer
from fake_worker import FakeWorker, oracle

from relay.control.contract import Delivery, ModelInfo, RequestFailure, Submission, SubmissionRefused
from relay.control.core import GatewayCore
from relay.control.record import GatewayPlayer, GatewayRecorder
from relay.control.shell import GatewayShell
from relay.control_config import ControlConfig, DetectorConfig
from relay.ids import WorkerKey
from relay.protocol.messages import Rejected
from relay.protocol.sampling import SamplingParams
from relay.record.frames import Happened, read
from relay.record.replay import replay

MODEL = ModelInfo("fake", "digest", "", 1000, 512, 0, (0,))
SLOTS = [("prefill-0", "prefill"), ("decode-0", "decode")]
LONG = list(range(100))


class Sink:
    def __init__(self, on_tokens=None) -> None:
        self.deliveries: list[Delivery] = []
        self.failure: RequestFailure | None = None
        self.done = asyncio.Event()
        self.on_tokens = on_tokens

    def tokens(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        if delivery.finish:
            self.done.set()
        if self.on_tokens:
            self.on_tokens(delivery)

    def failed(self, failure: RequestFailure) -> None:
        self.failure = failure
        self.done.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for delivery in self.deliveries for token in delivery.token_ids]


@asynccontextmanager
async def gateway(slots=SLOTS, config: ControlConfig | None = None, recorder: GatewayRecorder | None = None):
    fleet = Fleet()
    shell = GatewayShell(GatewayCore(config or ControlConfig(), MODEL, slots), fleet, recorder=recorder)
    fleet.shell = shell
    fleet.address = await shell.listen()
    shell.start()
    assert await asyncio.wait_for(shell.wait_complete(), 10) is None
    try:
        yield shell, fleet
    finally:
        shell.stop()
        for worker in fleet.workers.values():
            worker.die()
        await shell.close()


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, seed=3)


def test_split_request() -> None:
    async def scenario() -> None:
        async with gateway() as (shell, _fleet):
            assert shell.model.numerics_id == "numerics"
            sink = Sink()
            request = shell.submit(Submission(LONG, params(12)), sink)
            await sink.done.wait()
            assert sink.token_ids == oracle(LONG, params(12), 0)
            assert sink.deliveries[-1].finish == "length"
            assert "prefill-0 → decode-0" in shell.story(request)[0]
            assert [worker["state"] for worker in shell.status()["workers"]] == ["ready", "ready"]

    run(scenario())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_kill_while_streaming(victim: str) -> None:
    async def scenario() -> None:
        async with gateway() as (shell, fleet):
            sink = Sink()
            killed = []

            def kill(delivery: Delivery) -> None:
                if delivery.position >= 5 and not killed:
                    killed.append(True)
                    asyncio.get_running_loop().call_soon(fleet.current(victim).die)

            sink.on_tokens = kill
            shell.submit(Submission(LONG, params(30)), sink)
            await sink.done.wait()
            assert killed
            assert sink.failure is None
            assert sink.token_ids == oracle(LONG, params(30), 0)
            while not all(worker["state"] == "ready" for worker in shell.status()["workers"]):
                await asyncio.sleep(0.01)
            assert fleet.current(victim).key.incarnation == 2

    run(scenario())


def test_cancel_frees_both_workers() -> None:
    async def scenario() -> None:
        async with gateway() as (shell, fleet):
            sink = Sink()
            request = shell.submit(Submission(LONG, params(200)), sink)
            while not sink.deliveries:
                await asyncio.sleep(0.005)
            shell.cancel(request)
            shell.cancel(request)
            seen = len(sink.deliveries)
            while any(worker.fake.sequences or worker.fake.prefills for worker in fleet.workers.values()):
                await asyncio.sleep(0.005)
            assert len(sink.deliveries) == seen
            assert sink.failure is None

    run(scenario())


def test_finish_choice_from_within_the_sink() -> None:
    async def scenario() -> None:
        async with gateway() as (shell, fleet):
            sink = Sink()
            stopped: list[int] = []

            def stop(delivery: Delivery) -> None:
                assert not stopped
                if delivery.position >= 2:
                    stopped.append(delivery.position)
                    shell.finish_choice(request, 0)

            sink.on_tokens = stop
            request = shell.submit(Submission(LONG, params(100)), sink)
            while not stopped:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert not shell._subscribers
            assert not any(worker.fake.sequences for worker in fleet.workers.values())

    run(scenario())


def test_a_sink_that_raises_costs_only_its_request() -> None:
    async def scenario() -> None:
        async with gateway() as (shell, _fleet):

            def bad(delivery: Delivery) -> None:
                raise RuntimeError("a sink's bug")

            other = Sink()
            shell.submit(Submission(LONG, params(20)), Sink(bad))
            shell.submit(Submission(LONG, params(20)), other)
            await other.done.wait()
            assert other.token_ids == oracle(LONG, params(20), 0)

    run(scenario())


def test_refusals() -> None:
    async def scenario() -> None:
        async with gateway() as (shell, _fleet):
            with pytest.raises(SubmissionRefused) as caught:
                shell.submit(Submission(LONG, params(500)), Sink())
            assert (caught.value.failure.status, caught.value.failure.code) == (400, "context_length_exceeded")
            assert await shell.drain(5)
            with pytest.raises(SubmissionRefused) as caught:
                shell.submit(Submission(LONG, params(5)), Sink())
            assert (caught.value.failure.status, caught.value.failure.code) == (503, "shutting_down")

    run(scenario())


@pytest.mark.parametrize(
    ("key", "process", "reason"),
    [
        (WorkerKey("decode-0", 7), "engine", "incarnation 7 of decode-0 is fenced"),
        (WorkerKey("decode-0", 1), "engine", "is connected already"),
        (WorkerKey("stranger", 1), "agent", "unknown worker"),
    ],
)
def test_strangers_are_rejected(key: WorkerKey, process: str, reason: str) -> None:
    async def scenario() -> None:
        async with gateway() as (shell, fleet):
            host, port = fleet.address.removeprefix("tcp://").rsplit(":", 1)
            hello = FakeWorker(key, "both").hello(process)
            loop = asyncio.get_running_loop()
            _, peer = await loop.create_connection(lambda: Peer(hello, lambda message: None), host, int(port))
            answer = await peer.answer
            assert isinstance(answer, Rejected)
            assert reason in answer.reason
            await peer.closed.wait()
            assert shell.ready()

    run(scenario())


def test_garbage_closes_the_connection() -> None:
    async def scenario() -> None:
        async with gateway() as (shell, fleet):
            host, port = fleet.address.removeprefix("tcp://").rsplit(":", 1)
            for garbage in (b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xc1\xc1", b"GET / HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage)
                assert await reader.read() == b""
                writer.close()
            assert shell.ready()

    run(scenario())


def test_garbage_from_an_engine_fences_it() -> None:
    async def scenario() -> None:
        async with gateway() as (shell, fleet):
            sink = Sink()
            shell.submit(Submission(LONG, params(30)), sink)
            while len(sink.deliveries) < 3:
                await asyncio.sleep(0.005)
            fleet.current("decode-0").engine.transport.write(b"\xff\xff\xff\xff")
            await sink.done.wait()
            assert sink.token_ids == oracle(LONG, params(30), 0)
            while fleet.current("decode-0").key.incarnation == 1:
                await asyncio.sleep(0.01)

    run(scenario())


def test_silence_is_death() -> None:
    async def scenario() -> None:
        config = ControlConfig(detector=DetectorConfig(suspect_after_s=0.2, dead_after_s=0.4))
        async with gateway([("worker-0", "both")], config) as (shell, fleet):
            first = fleet.current("worker-0")
            fleet.silent = True
            while first.alive:
                await asyncio.sleep(0.01)
            fleet.silent = False
            while not shell.ready():
                await asyncio.sleep(0.01)
            assert "silent" in shell.status()["workers"][0]["last_loss"]

    run(scenario())


def test_everything_the_core_is_told_is_recorded(tmp_path) -> None:
    """Found by `relay chaos --trace`: an operator's restart was not, and the replay parted with the next placement."""

    async def scenario() -> None:
        async with gateway(recorder=GatewayRecorder(tmp_path / "gateway.relay")) as (shell, _):
            sink = Sink()
            shell.submit(Submission(LONG, params(30)), sink)
            assert shell.leave(["decode-0"]) == ""
            await sink.done.wait()
            other = shell.submit(Submission(LONG, params(200)), Sink())
            shell.cancel(other)

    run(scenario())
    recording = read(tmp_path / "gateway.relay", cut=True)
    told = {frame.name for frame in recording.frames if isinstance(frame, Happened)}
    assert {"Started", "RequestSubmitted", "LeaveOrdered", "RequestCancelled", "StopRequested"} <= told
    assert replay(recording, GatewayPlayer.of(recording.head)).difference is None
