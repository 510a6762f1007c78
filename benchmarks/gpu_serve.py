"""The whole server on a GPU through HTTP: start, text, rate sweep, killed workers.

``python -m benchmarks.gpu_serve MODEL --out FILE [--parts text,sweep,kill,kill-both] [--rates 2,8,32] [--prompt 512] [--new 128]
[--transport ipc]``. Prompts are token ids; clients run in this process and keep raw lines, which are read when the run is over.
``--parts ready`` only starts servers, until ``--ready-seconds`` are over; the transport is that of split shapes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.servers import free_port
from relay.config import TRANSPORTS

READY_TIMEOUT_S = 240.0
REPORT_S = 0.3  # after which a worker's counters have reached the gateway
STARTS = 3  # of each shape, at most


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
    model: str, *flags: str, backend: str = "cuda", ready_within_s: float = READY_TIMEOUT_S
) -> Iterator[Server]:
    """Start ``relay serve``, wait until ready, end it with SIGINT."""
    port = free_port()
    log = Path(f"/tmp/gpu_serve.{port}.log")
    command = [sys.executable, "-m", "relay.cli.main", "serve", model, "--backend", backend, "--port", str(port)]
    command += ["--offline", "--grace", "0", "--log-level", "debug", *flags]
    began = time.perf_counter()
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            if process.poll() is not None or time.perf_counter() - began > ready_within_s:
                raise RuntimeError(f"not ready:\n{log.read_text()[-6000:]}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                status = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5))
                if all(worker["state"] == "ready" for worker in status["workers"]):
                    break
            time.sleep(0.02)
        print("ready", round(time.perf_counter() - began, 1), flags, flush=True)
        server = Server(f"http://127.0.0.1:{port}", process, time.perf_counter() - began, log)
        for line in server.phases():
            print("  ", line, flush=True)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(300, vocab) for _ in range(length)] for _ in range(count)]


async def at_rate(server: Server, rate: float, seconds: float, length: int, new: int, vocab: int) -> dict[str, Any]:
    """Poisson arrivals for ``seconds``; figures of all requests, until the last has ended."""
    chance = random.Random(int(rate * 1000))
    arrivals: list[float] = []
    at = chance.expovariate(rate)
    while at < seconds:
        arrivals.append(at)
        at += chance.expovariate(rate)
    texts = prompts(len(arrivals), length, vocab, seed=int(rate * 1000) + 1)
    begin = time.perf_counter()

    async def one(at: float, text: list[int]) -> Stream:
        await asyncio.sleep(at - (time.perf_counter() - begin))
        return await server.ask({"prompt": text, "max_tokens": new, "temperature": 0, "seed": 1})

    streams = await asyncio.gather(*(one(at, text) for at, text in zip(arrivals, texts, strict=True)))
    took = time.perf_counter() - begin
    errors = [stream.error for stream in streams if stream.read().error]
    done = [stream for stream in streams if stream.times]
    tokens = sum(len(stream.tokens) for stream in done)
    row = {
        "requests": len(streams),
        "errors": errors[:3],
        "seconds": round(took, 2),
        "output_tokens_per_s": round(tokens / took, 1),
        "ttft_ms": ms([stream.times[0] - stream.started for stream in done]),
        "itl_ms": ms([gap for stream in done for gap in stream.gaps]),
        "tpot_ms": ms([(s.times[-1] - s.times[0]) / (len(s.times) - 1) for s in done if len(s.times) > 1]),
    }
    print("rate", rate, row, flush=True)
    return row


RESUMES = ("resumed", "recomputed_tokens", "resumes_delayed")


def _middle(values: list[int]) -> int:
    return sorted(values)[len(values) // 2]


async def killed(
    server: Server, victim: str, streams: int, length: int, new: int, vocab: int, again_within_s: float = 120.0
) -> dict[str, Any]:
    """The same requests undisturbed and with ``victim``'s engine killed when half is out; the longest gap of each stream since.

    Disturbed: as many of the longest gaps as requests were resumed. ``recomputed_tokens`` over ``resumed`` says whether prompts
    were at hand: then it is about ``tokens_at_kill``, else a prompt more.
    """

    def bodies(salt: str) -> list[dict[str, Any]]:
        return [
            {
                "prompt": text,
                "max_tokens": new,
                "temperature": (0.0, 0.9)[index % 2],
                "seed": index,
                "cache_salt": f"{salt}{index}",
            }
            for index, text in enumerate(prompts(streams, length, vocab, seed=77))
        ]

    calm = await asyncio.gather(*(server.ask(body) for body in bodies("calm")))
    half = _middle([len(stream.lines) for stream in calm]) / 2
    calm = [stream.read() for stream in calm]
    usual = percentile([gap for stream in calm for gap in stream.gaps], 0.99)
    before = await asyncio.to_thread(server.worker, victim)
    counted = await asyncio.to_thread(server.counters, *RESUMES)
    coming = [Stream() for _ in range(streams)]
    running = asyncio.gather(*map(server.ask, bodies("storm"), coming))
    while _middle([len(stream.lines) for stream in coming]) < half:
        await asyncio.sleep(0.002)
        if running.done():
            raise RuntimeError("every request had ended before half of its lines had come")
    os.kill(before["pid"], signal.SIGKILL)
    at = time.perf_counter()
    storm = [s.read() for s in await running]
    gaps, had = [], []
    for stream in storm:
        had.append(sum(t <= at for t in stream.times))
        after = [end - start for start, end in zip(stream.times, stream.times[1:], strict=False) if end > at]
        gaps += [max(after)] if after else []  # whatever was under way when it died comes at once
    resumes = {
        name: value - counted[name] for name, value in (await asyncio.to_thread(server.counters, *RESUMES)).items()
    }
    affected = sorted(gaps)[max(0, len(gaps) - resumes["resumed"]) :]
    deadline = time.monotonic() + again_within_s
    again_s = float("nan")
    while time.monotonic() < deadline:
        row = await asyncio.to_thread(server.worker, victim)
        if row["incarnation"] > before["incarnation"] and row["state"] == "ready":
            again_s = time.perf_counter() - at
            break
        await asyncio.sleep(0.05)
    different = sum(a.tokens != b.tokens or bool(b.error) for a, b in zip(calm, storm, strict=True))
    result = {
        "victim": victim,
        "streams": streams,
        "prompt_tokens": length,
        "new_tokens": new,
        "tokens_at_kill": _middle(had),
        **resumes,
        "next_token_ms_of_disturbed": ms(affected),
        "disturbed": len(affected),
        "next_token_ms_of_all": ms(gaps),
        "itl_p99_undisturbed_ms": round(usual * 1e3, 2),
        "different_outputs": different,
        "errors": [stream.error for stream in storm if stream.error][:3],
        "victim_ready_again_s": round(again_s, 2),
    }
    print("kill", result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="text,sweep,kill,kill-both")
    parser.add_argument("--rates", default="2,8,32")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=49000)
    parser.add_argument("--shapes", default="split,colocated")
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--transport", choices=TRANSPORTS, default="ipc", help="of KV between P and D")
    parser.add_argument(
        "--ready-seconds", type=float, default=80.0, help="no start is begun that would end after so long"
    )
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    extra = arguments.flags.split()
    between = ("--transport", arguments.transport)
    shapes = {"split": ("--prefill", "1", "--decode", "1", *between), "colocated": ("--prefill", "0", "--decode", "1")}
    found: dict[str, Any] = {
        "model": arguments.model,
        "prompt": arguments.prompt,
        "new": arguments.new,
        "transport": arguments.transport,
        "flags": extra,
    }

    def keep(key: str, value: Any) -> None:
        found[key] = value
        arguments.out.write_text(json.dumps({**report.provenance(), **found}, indent=1) + "\n")

    if "ready" in parts:
        starts(arguments.model, between, extra, arguments.ready_seconds, keep)
    for shape in arguments.shapes.split(",") if "sweep" in parts or "text" in parts else []:
        with serving(arguments.model, *shapes[shape], *extra) as server:
            keep(f"{shape}/ready_s", round(server.ready_s, 2))
            workers = server.get("/status")["workers"]
            keep(f"{shape}/kv_blocks", {worker["id"]: worker["kv_total"] for worker in workers})
            if "text" in parts:
                keep(f"{shape}/text", asyncio.run(texts(server)))
            if "sweep" in parts:
                asyncio.run(at_rate(server, 4, 2, arguments.prompt, 16, arguments.vocab))  # warm
                for rate in arguments.rates.split(","):
                    before = counted(server)
                    row = asyncio.run(
                        at_rate(
                            server, float(rate), arguments.seconds, arguments.prompt, arguments.new, arguments.vocab
                        )
                    )
                    keep(f"{shape}/rate {rate}", row | {"transfers": transfers(server, before)})
    for part, name, flags, victim in (
        ("kill", "kill D, P holds the prompt's KV", ("--prefill", "1", "--decode", "2", *between), "decode-0"),
        ("kill-both", "kill a worker, whole re-prefill", ("--prefill", "0", "--decode", "2"), "worker-0"),
    ):
        if part in parts:
            with serving(arguments.model, *flags, *extra) as server:
                keep(
                    name, asyncio.run(killed(server, victim, arguments.streams, arguments.prompt, 400, arguments.vocab))
                )


def starts(
    model: str, between: tuple[str, ...], extra: list[str], seconds: float, keep: Callable[[str, Any], None]
) -> None:
    """From the command to all workers ready, by shape, in turns; P and D of one GPU share one copy of the weights."""
    import torch

    shapes = {
        "colocated": ("--prefill", "0", "--decode", "1"),
        "1P+1D, shared weights": ("--prefill", "1", "--decode", "1", *between),
        "1P+1D, two GPUs": ("--prefill-devices", "cuda:0", "--decode-devices", "cuda:1", *between),
    }
    if torch.cuda.device_count() < 2:
        del shapes["1P+1D, two GPUs"]
    rows: dict[str, dict[str, list[Any]]] = {name: {"ready_s": [], "phases": []} for name in shapes}
    began, longest = time.monotonic(), 0.0
    for name, flags in [*shapes.items()] * STARTS:
        begin = time.monotonic()
        if begin - began + longest > seconds:
            break
        with serving(model, *flags, *extra) as server:
            rows[name]["ready_s"].append(round(server.ready_s, 2))
            rows[name]["phases"].append(server.phases())
        longest = max(longest, time.monotonic() - begin)
        keep("ready", rows)


def counted(server: Server) -> dict[str, float]:
    """What the engines have counted of KV transfers."""
    time.sleep(REPORT_S)
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("relay_worker_kv_") and "_total{" in line:
            name = line.split("{")[0].removeprefix("relay_worker_")
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def transfers(server: Server, before: dict[str, float] | None = None) -> dict[str, float]:
    """The same since ``before``, with the share of bytes that prompts hid, and what each transfer took after its first token."""
    found = {name: count - (before or {}).get(name, 0.0) for name, count in counted(server).items()}
    if found.get("kv_bytes_sent_total"):
        found["hidden_share"] = round(1 - found.get("kv_late_bytes_sent_total", 0.0) / found["kv_bytes_sent_total"], 4)
        found["exposed_ms_each"] = round(
            found.get("kv_exposed_us_total", 0.0) / found["kv_transfers_sent_total"] / 1e3, 2
        )
    print("transfers", found, flush=True)
    return found


async def texts(server: Server) -> dict[str, str]:
    """Greedy answers to look at."""
    asked = ["The capital of France is", "Water boils at", "Once upon a time, there was a"]
    answers = {}
    for prompt in asked:
        stream = (await server.ask({"prompt": prompt, "max_tokens": 24, "temperature": 0})).read()
        answers[prompt] = stream.text or stream.error
        print(repr(prompt), "->", repr(answers[prompt]), flush=True)
    return answers


if __name__ == "__main__":
    main()
