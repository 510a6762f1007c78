"""A ``relay serve`` that a benchmark starts, asks and looks at; its answers as they came."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.servers import end, free_port
from benchmarks.standing import LAST_LINES, Standing, matters, standings, unready

READY_TIMEOUT_S = 240.0


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def ms(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest of seconds, in milliseconds."""
    return {
        "p50": round(percentile(values, 0.5) * 1e3, 2),
        "p99": round(percentile(values, 0.99) * 1e3, 2),
        "max": round(max(values, default=float("nan")) * 1e3, 2),
    }


@dataclass
class Stream:
    """One request's answer: when each line came, the line, and (after ``read``) its token ids."""

    started: float = 0.0
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # one a token
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""

    def read(self) -> "Stream":
        for at, line in self.lines:
            chunk = json.loads(line[5:])
            if "error" in chunk:
                self.error = str(chunk["error"])
            for choice in chunk.get("choices", []):
                ids = choice.get("token_ids") or []
                self.tokens += ids
                self.times += [at] * len(ids)
                self.text += choice.get("text") or ""
        self.lines.clear()
        return self

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Server:
    """A running ``relay serve``."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", ready_s: float, log: Path) -> None:
        self.url, self.process, self.ready_s, self.log = url, process, ready_s, log
        self.port = int(url.rsplit(":", 1)[1])

    def phases(self) -> list[str]:
        """What workers said of their starts."""
        return [line for line in self.log.read_text().splitlines() if "KV blocks; ready" in line or "shared" in line]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def standings(self) -> dict[str, Standing]:
        return standings(self.get("/status"))

    def settle(self, within_s: float) -> dict[str, Standing]:
        """Every worker, once all are ready. Raises RuntimeError, with what is known of those that are not, after ``within_s``."""
        deadline = time.monotonic() + within_s
        while said := unready(now := self.standings()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all workers were ready within {within_s:.0f} s: {said}")
            time.sleep(0.05)
        return now

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def tell(self) -> None:
        """Print the last lines of the log that say how workers fared."""
        print(f"the server's log, {self.log}, ends so:", flush=True)
        for line in matters(self.log_text())[-LAST_LINES:]:
            print("  |", line[:400], flush=True)

    def worker(self, name: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self.get("/status")["workers"]
        return next(row for row in rows if row["id"] == name)

    def counters(self, *names: str) -> dict[str, int]:
        """The gateway's counters of these names, without ``relay_`` and ``_total``."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        shown = {
            line.split("{")[0].split(" ")[0]: int(float(line.rsplit(" ", 1)[1])) for line in lines if line[:1] != "#"
        }
        return {name: shown.get(f"relay_{name}_total", 0) for name in names}

    async def ask(self, body: dict[str, Any], stream: Stream | None = None) -> Stream:
        """One streamed completion with token ids; ``stream`` can be looked at while it comes."""
        payload = json.dumps({"stream": True, "return_token_ids": True, "ignore_eos": True, **body}).encode()
        stream = stream or Stream()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        stream.started = time.perf_counter()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            stream.error = f"{status!r} {(await reader.read(500))!r}"
            writer.close()
            return stream
        async for line in reader:
            if line.startswith(b"data: {"):
                stream.lines.append((time.perf_counter(), line))
        writer.close()
        return stream


@contextlib.contextmanager
def serving(
    model: str, *flags: str, backend: str = "cuda", ready_within_s: float = READY_TIMEOUT_S, log: Path | None = None
) -> Iterator[Server]:
    """Start ``relay serve``, wait until ready, end it with SIGINT. Its whole log is written to ``log`` as it comes.

    Where the body fails, the log's last lines that matter are printed.
    """
    port = free_port()
    log = log or Path(tempfile.gettempdir()) / f"gpu_serve.{port}.log"
    command = [sys.executable, "-m", "relay.cli.main", "serve", model, "--backend", backend, "--port", str(port)]
    command += ["--offline", "--grace", "0", "--log-level", "debug", *flags]
    began = time.perf_counter()
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            if process.poll() is not None or time.perf_counter() - began > ready_within_s:
                raise RuntimeError(f"not ready:\n{log.read_text(errors='replace')[-6000:]}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                status = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5))
                if all(worker["state"] == "ready" for worker in status["workers"]):
                    break
            time.sleep(0.02)
        print("ready", round(time.perf_counter() - began, 1), flags, flush=True)
        server = Server(f"http://127.0.0.1:{port}", process, time.perf_counter() - began, log)
        for line in server.phases():
            print("  ", line, flush=True)
        try:
            yield server
        except BaseException:
            server.tell()
            raise
    finally:
        end(process, 10)
