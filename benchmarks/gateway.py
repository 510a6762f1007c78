"""The whole gateway without a model: HTTP, text path, core and sockets, with a fake engine that draws tokens on a clock.

    python -m benchmarks.gateway [--streams 256] [--rate 75] [--seconds 10] [--model smollm2] [--json FILE]

One process is the gateway (the real app on uvicorn, the real tokenizer); its CPU time is read from the kernel over windows in
which every stream runs. A second process is the fake engine. This one holds the streams' sockets and counts events.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import provenance

HERE = Path(__file__).parent


async def serve(arguments: argparse.Namespace) -> None:
    """The gateway process."""
    from relay.api.app import create_app
    from relay.cli.server import HttpServer
    from relay.cluster.launcher import LaunchExit, LaunchSpec
    from relay.cluster.local import LocalLauncher
    from relay.control.contract import ModelInfo
    from relay.control.core import GatewayCore
    from relay.control.shell import GatewayShell
    from relay.control_config import ControlConfig
    from relay.ids import WorkerKey
    from relay.models.store import default_cache_dir, open_model
    from relay.protocol.messages import EngineExited

    model = open_model(arguments.model, cache_dir=default_cache_dir(os.environ), offline=True)

    class Fakes:
        gateway = ""

        def __init__(self) -> None:
            self.launcher = LocalLauncher(self._exited, lambda name, line: print(name, line, file=sys.stderr))

        def start(self, worker: WorkerKey, role: str) -> None:
            options = {
                "--gateway": self.gateway,
                "--worker": worker.worker,
                "--incarnation": str(worker.incarnation),
                "--role": role,
                "--digest": model.digest,
                "--rate": str(arguments.rate),
                "--vocab": str(model.config.vocab),
            }
            flat = [part for pair in options.items() for part in pair]
            self.launcher.start(
                LaunchSpec(name=worker.worker, argv=[sys.executable, str(HERE / "fake_engine.py"), *flat])
            )

        def leaving(self, workers: Sequence[str], *, stay_out: bool) -> None:
            """Nobody else starts workers."""

        def stop(self, worker: WorkerKey, *, kill: bool, word: EngineExited | None = None) -> None:
            self.launcher.stop(worker.worker, kill=kill)

        def _exited(self, end: LaunchExit) -> None:
            print(end, file=sys.stderr)

    fakes = Fakes()
    info = ModelInfo(model.name, model.digest, "", model.config.vocab, 1 << 19, 0, model.config.eos_token_ids)
    shell = GatewayShell(GatewayCore(ControlConfig(), info, [("worker-0", "both")]), fakes)
    fakes.gateway = await shell.listen()
    shell.start()
    await shell.wait_complete()
    listener = socket.socket(fileno=arguments.listener)
    listener.setblocking(False)
    http = HttpServer(create_app(shell, model.tokenizer, model.chat_template), listener)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    http.start()
    await stopped.wait()
    shell.stop()
    await http.stop()
    await fakes.launcher.close(1.0)
    await shell.close()


class Stream(asyncio.Protocol):
    """One client: a request, then a count of events."""

    events = 0
    num_bytes = 0
    open_streams = 0
    refused = ""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._started = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(self._body)}\r\n\r\n"
        transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        if not self._started:
            if not data.startswith(b"HTTP/1.1 200"):
                Stream.refused = Stream.refused or data[:500].decode(errors="replace")
                return
            self._started = True
            Stream.open_streams += 1
        Stream.events += data.count(b"\ndata: ") + data.startswith(b"data: ")
        Stream.num_bytes += len(data)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(arguments: argparse.Namespace, pid: int, port: int) -> dict[str, object]:
    """Open the streams, measure windows of one second."""
    body = json.dumps(
        {"prompt": list(range(1000, 1032)), "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    ).encode()
    loop = asyncio.get_running_loop()
    for _ in range(arguments.streams):
        await loop.create_connection(lambda: Stream(body), "127.0.0.1", port)
    deadline = time.monotonic() + 20
    while Stream.open_streams < arguments.streams:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {Stream.open_streams} of {arguments.streams} streams began; events {Stream.events}")
        if Stream.refused:
            raise SystemExit(f"a stream was refused: {Stream.refused}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    rates, costs = [], []
    for _ in range(arguments.seconds):
        events, cpu, start = Stream.events, cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(1.0)
        passed = time.monotonic() - start
        count = Stream.events - events
        rates.append(count / passed)
        costs.append((cpu_seconds(pid) - cpu) / count * 1e6)
    return {
        **provenance(),
        "streams": arguments.streams,
        "asked_tokens_per_s": arguments.streams * arguments.rate,
        "tokens_per_s": round(statistics.median(rates)),
        "cpu_us_per_token": round(statistics.median(costs), 2),
        "bytes_per_event": round(Stream.num_bytes / max(1, Stream.events)),
        "windows": {"tokens_per_s": [round(r) for r in rates], "cpu_us_per_token": [round(c, 2) for c in costs]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=75.0)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="cProfile of the gateway process")
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.listener is not None:
        import uvloop

        if arguments.profile:
            import cProfile

            with cProfile.Profile() as profile:
                uvloop.run(serve(arguments))
            profile.dump_stats(arguments.profile)
        else:
            uvloop.run(serve(arguments))
        return
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    fd = listener.fileno()
    gateway = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway", *sys.argv[1:], "--listener", str(fd)], pass_fds=[fd]
    )
    try:
        result = asyncio.run(load(arguments, gateway.pid, listener.getsockname()[1]))
    finally:
        gateway.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            gateway.wait(10)
        gateway.kill()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
