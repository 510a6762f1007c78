"""The whole server on a GPU through HTTP: start, text, rate sweep, killed workers.

``python -m benchmarks.gpu_serve MODEL --out FILE [--parts text,sweep,kill,kill-both] [--rates 2,8,32] [--prompt 512] [--new 128]
[--transport ipc]``. Prompts are token ids; clients run in this process and keep raw lines, which are read when the run is over.
The transport is that of split shapes. Starts alone: ``gpu_ready``. A worker that ends where none should, or a victim without
half of the streams, ends the run, and the last lines of its server's log are printed; whole logs lie beside FILE.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_server import Server, Stream, ms, percentile, serving
from benchmarks.standing import Void, ended, ending, missed_victim, standings, unready
from relay.config import TRANSPORTS

ROOM = "relay_worker_kv_total{"  # how much fits, which is no count of anything
REPORT_S = 0.3  # after which a worker's counters have reached the gateway


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


HALF_S = 60.0  # the longest wait for half of the lines
RESUMES = ("resumed", "recomputed_tokens", "resumes_delayed")


def _middle(values: list[int]) -> int:
    return sorted(values)[len(values) // 2]


async def killed(
    server: Server, victim: str, streams: int, length: int, new: int, vocab: int, again_within_s: float = 120.0
) -> dict[str, Any]:
    """The same requests undisturbed and with ``victim``'s engine killed when half is out; the longest gap of each stream since.

    Disturbed: as many of the longest gaps as requests were resumed. ``recomputed_tokens`` over ``resumed`` says whether prompts
    were at hand: then it is about ``tokens_at_kill``, else a prompt more. ``on_victim``: streams that the gateway had there when it
    was killed. With 0 for ``again_within_s`` nobody waits for the victim, and when it was ready again is not known.

    Raises RuntimeError if a worker is not ready, or ends before the kill, or half of the lines are never out.
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

    stood = await asyncio.to_thread(server.settle, 0.0)
    calm = await asyncio.gather(*(server.ask(body) for body in bodies("calm")))
    half = _middle([len(stream.lines) for stream in calm]) / 2
    calm = [stream.read() for stream in calm]
    usual = percentile([gap for stream in calm for gap in stream.gaps], 0.99)
    counted = await asyncio.to_thread(server.counters, *RESUMES)
    coming = [Stream() for _ in range(streams)]
    running = asyncio.gather(*map(server.ask, bodies("storm"), coming))
    try:
        deadline = time.monotonic() + HALF_S
        while _middle([len(stream.lines) for stream in coming]) < half:
            await asyncio.sleep(0.002)
            if running.done() or time.monotonic() > deadline:
                raise RuntimeError("half of the lines were not out at any time before the requests' end")
        status = await asyncio.to_thread(server.get, "/status")
        if broken := ended(stood, standings(status)):
            raise RuntimeError(f"ended before anything was killed: {', '.join(broken)}: {unready(standings(status))}")
        before = next(row for row in status["workers"] if row["id"] == victim)
        os.kill(before["pid"], signal.SIGKILL)
        at = time.perf_counter()
    except BaseException:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        raise
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
        "on_victim": before["placed"],
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
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    extra = arguments.flags.split()
    between = ("--transport", arguments.transport)
    shapes = {"split": ("--prefill", "1", "--decode", "1", *between), "colocated": ("--prefill", "0", "--decode", "1")}
    found: dict[str, Any] = {
        "model": report.without_folder(arguments.model),
        "prompt": arguments.prompt,
        "new": arguments.new,
        "transport": arguments.transport,
        "flags": extra,
    }

    def log_of(part: str) -> Path:
        return Path(arguments.out.with_name(f"{arguments.out.stem}.{part}.log"))

    def keep(key: str, value: Any) -> None:
        found[key] = value
        arguments.out.write_text(json.dumps({**report.provenance(), **found}, indent=1) + "\n")

    for shape in arguments.shapes.split(",") if "sweep" in parts or "text" in parts else []:
        with serving(arguments.model, *shapes[shape], *extra, log=log_of(shape)) as server:
            stood = server.settle(0.0)
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
                    if names := ended(stood, after := server.standings()):
                        raise Void(ending(names, after, server.log_text()), row)
                    keep(f"{shape}/rate {rate}", row | {"transfers": transfers(server, before)})
    for part, name, flags, victim in (
        ("kill", "kill D, P holds the prompt's KV", ("--prefill", "1", "--decode", "2", *between), "decode-0"),
        ("kill-both", "kill a worker, whole re-prefill", ("--prefill", "0", "--decode", "2"), "worker-0"),
    ):
        if part in parts:
            with serving(arguments.model, *flags, *extra, log=log_of(part)) as server:
                row = asyncio.run(killed(server, victim, arguments.streams, arguments.prompt, 400, arguments.vocab))
                if reason := missed_victim(row["on_victim"], arguments.streams // 2):
                    raise Void(reason, row)
                keep(name, row)


def counted(server: Server) -> dict[str, float]:
    """What the engines have counted of KV transfers."""
    time.sleep(REPORT_S)
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("relay_worker_kv_") and "_total{" in line and not line.startswith(ROOM):
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
