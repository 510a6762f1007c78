"""CPU time of the HTTP surface per streamed token event, without a model.

A server process runs the real application under uvicorn (uvloop, httptools) with a gateway that delivers one token to each of
STREAMS requests every 1/RATE s, as an engine's steps would arrive. A client process reads the sockets raw and counts events.
The figure is the server process's CPU time (user + system) between two moments in the middle of the run, divided by the token
events delivered between them. It includes the system calls of sending; it does not depend on other load except through caches.

    python -m benchmarks.api_hot_path [--streams 256] [--rate 75] [--seconds 8] [--json FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import selectors
import socket
import time
from typing import Any

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.report import provenance
from relay.api.app import UVICORN_OPTIONS, create_app
from relay.control.contract import Delivery, ModelInfo, Submission, TokenSink
from relay.models.tokenizer import Tokenizer

WARM_UP_S = 2.0


TEXT = " the cat sat on the mat and then some other words were said about it"


def small_tokenizer() -> Tokenizer:
    """A byte-level BPE of whole words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    return Tokenizer(backend.to_str())


class SteppingGateway:
    """Delivers one token to every request each step, then measures its own process."""

    def __init__(self, tokenizer: Tokenizer, streams: int, rate: float, seconds: float, pipe: Any) -> None:
        self._info = ModelInfo("bench", "d", "n", tokenizer.vocab_size, 1 << 20, 0, (0,))
        self._tokens = tokenizer.encode(TEXT)
        self._streams, self._rate, self._seconds, self._pipe = streams, rate, seconds, pipe
        self._sinks: list[TokenSink] = []
        self._step = 0
        self._events = 0
        self._late_steps = 0

    @property
    def model(self) -> ModelInfo:
        return self._info

    def submit(self, submission: Submission, sink: TokenSink) -> int:
        self._sinks.append(sink)
        if len(self._sinks) == self._streams:
            asyncio.get_running_loop().create_task(self._run())
        return len(self._sinks)

    async def _run(self) -> None:
        await asyncio.sleep(0.2)
        loop = asyncio.get_running_loop()
        start = loop.time()
        marks: list[tuple[float, tuple[float, float], int]] = []
        while True:
            now = loop.time()
            if now - start >= WARM_UP_S and not marks:
                marks.append((now, _cpu_s(), self._events))
            if now - start >= WARM_UP_S + self._seconds:
                marks.append((now, _cpu_s(), self._events))
                break
            self._deliver()
            self._step += 1
            due = start + self._step / self._rate
            if due < loop.time():
                self._late_steps += 1
            await asyncio.sleep(max(0.0, due - loop.time()))
        (began, cpu_0, events_0), (ended, cpu_1, events_1) = marks
        self._pipe.send(
            {
                "events": events_1 - events_0,
                "cpu_us_per_event": (sum(cpu_1) - sum(cpu_0)) / (events_1 - events_0) * 1e6,
                "user_us_per_event": (cpu_1[0] - cpu_0[0]) / (events_1 - events_0) * 1e6,
                "cpu_fraction_of_a_core": (sum(cpu_1) - sum(cpu_0)) / (ended - began),
                "events_per_second": (events_1 - events_0) / (ended - began),
                "late_steps": self._late_steps,
                "steps": self._step,
            }
        )

    def _deliver(self) -> None:
        token = self._tokens[self._step % len(self._tokens)]
        for sink in self._sinks:
            sink.tokens(Delivery(0, self._step, [token], numerics_id="numerics"))
        self._events += len(self._sinks)

    def cancel(self, request: int) -> None:
        pass

    def finish_choice(self, request: int, choice: int) -> None:
        pass

    def ready(self) -> bool:
        return True

    def health(self) -> tuple[bool, str]:
        return True, ""

    def status(self) -> dict[str, object]:
        return {}

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        return []


def _cpu_s() -> tuple[float, float]:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def serve(pipe: Any, streams: int, rate: float, seconds: float) -> None:
    """The measured process."""
    tokenizer = small_tokenizer()
    app = create_app(SteppingGateway(tokenizer, streams, rate, seconds, pipe), tokenizer)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    pipe.send(listener.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, **UVICORN_OPTIONS)).run(sockets=[listener])


def open_streams(port: int, streams: int) -> list[socket.socket]:
    """One connection a stream, each with its request sent."""
    body = json.dumps({"prompt": "hello", "max_tokens": 1 << 19, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connections = []
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
        connections.append(connection)
    return connections


def measure(streams: int, rate: float, seconds: float) -> dict[str, Any]:
    """Run the server process, read its streams, return its figures."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, streams, rate, seconds))
    process.start()
    try:
        connections = open_streams(ours.recv(), streams)
        selector = selectors.DefaultSelector()
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        received = 0
        deadline = time.monotonic() + WARM_UP_S + seconds + 60
        while not ours.poll():
            if time.monotonic() > deadline or not process.is_alive():
                raise RuntimeError("the server process gave no result")
            for key, _ in selector.select(0.1):
                received += key.fileobj.recv(65536).count(b"data: ")  # type: ignore[union-attr]
        result: dict[str, Any] = ours.recv()
        result["client_events"] = received
        for connection in connections:
            connection.close()
        return result
    finally:
        process.terminate()
        process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=75.0, help="tokens a second and stream")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    runs = [measure(arguments.streams, arguments.rate, arguments.seconds) for _ in range(arguments.runs)]
    median = sorted(run["cpu_us_per_event"] for run in runs)[len(runs) // 2]
    print(
        f"{arguments.streams} streams x {arguments.rate:g} tokens/s: {median:.1f} us CPU per token event (median of {len(runs)})"
    )
    for run in runs:
        print(
            f"  {run['cpu_us_per_event']:.1f} us ({run['user_us_per_event']:.1f} user), {run['events_per_second']:.0f} events/s, "
            f"{run['cpu_fraction_of_a_core']:.0%} of a core, {run['late_steps']}/{run['steps']} steps late"
        )
    if arguments.json:
        document = {**provenance(), "median_cpu_us_per_event": median, "runs": runs}
        with open(arguments.json, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
