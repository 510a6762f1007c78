"""Mixed load on a server: short prompts that decode for long beside long prompts; the same arrivals for every shape."""

import asyncio
import hashlib
import random
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu_serve import Server, Stream, ms, percentile, prompts


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals of two kinds for ``seconds``, and the limits that a request must meet to count as good."""

    chats_per_s: float = 8.0
    chat_prompt: int = 256
    chat_new: int = 256
    documents_per_s: float = 3.0
    document_prompt: int = 4096
    document_new: int = 64
    seconds: float = 14.0
    vocab: int = 128000
    slo_ttft_ms: float = 500.0  # to the first token
    slo_itl_ms: float = 25.0  # the 99th percentile of a request's own gaps
    drain_s: float = 60.0  # the longest wait for the last answer

    def times(self, factor: float, seconds: float | None = None) -> "Load":
        """The same mix, ``factor`` times as often."""
        return replace(
            self,
            chats_per_s=self.chats_per_s * factor,
            documents_per_s=self.documents_per_s * factor,
            seconds=self.seconds if seconds is None else seconds,
        )


@dataclass(slots=True)
class Planned:
    """One request to come. ``at`` in seconds from the start."""

    at: float
    kind: str
    prompt: list[int]
    new: int


def plan(load: Load) -> list[Planned]:
    """All arrivals, by time; the same for the same load."""
    found: list[Planned] = []
    for kind, rate, length, new in (
        ("chat", load.chats_per_s, load.chat_prompt, load.chat_new),
        ("document", load.documents_per_s, load.document_prompt, load.document_new),
    ):
        chance = random.Random(f"{kind} {rate} {load.seconds}")
        times: list[float] = []
        at = chance.expovariate(rate)
        while at < load.seconds:
            times.append(at)
            at += chance.expovariate(rate)
        texts = prompts(len(times), length, load.vocab, seed=len(times) * length)
        found += [Planned(at, kind, text, new) for at, text in zip(times, texts, strict=True)]
    return sorted(found, key=lambda one: one.at)


async def drive(server: Server, load: Load) -> dict[str, Any]:
    """Figures of one run, and ``digest``, which is equal wherever all tokens of all requests are."""
    planned = plan(load)
    begin = time.perf_counter()

    async def one(request: Planned) -> Stream:
        await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - begin)))
        body = {"prompt": request.prompt, "max_tokens": request.new, "temperature": 0, "seed": 1}
        return await server.ask(body)

    tasks = [asyncio.ensure_future(one(request)) for request in planned]
    _, late = await asyncio.wait(tasks, timeout=load.seconds + load.drain_s)
    for task in late:
        task.cancel()
    took = time.perf_counter() - begin
    done = [
        (request, task.result().read())
        for request, task in zip(planned, tasks, strict=True)
        if task not in late and task.exception() is None
    ]
    errors = [repr(task.exception()) for task in tasks if task not in late and task.exception() is not None]
    return {**figures(load, done, took), "unfinished": len(late), "client_errors": errors[:3]}


def figures(load: Load, done: list[tuple[Planned, Stream]], took: float) -> dict[str, Any]:
    """TTFT, gaps, goodput and throughput of finished streams, by kind and together."""
    whole = [(request, stream) for request, stream in done if stream.times and not stream.error]
    kinds: dict[str, Any] = {}
    for kind in ("chat", "document"):
        streams = [stream for request, stream in whole if request.kind == kind]
        kinds[kind] = {
            "requests": len(streams),
            "ttft_ms": ms([stream.times[0] - stream.started for stream in streams]),
            "itl_ms": ms([gap for stream in streams for gap in stream.gaps]),
        }
    good = sum(is_good(load, stream) for _, stream in whole)
    tokens = sum(len(stream.tokens) for _, stream in whole)
    digest = hashlib.blake2b(digest_size=8)
    for _, stream in whole:
        digest.update(repr(stream.tokens).encode())
    return {
        "load": asdict(load),
        "requests": len(done),
        "errors": [stream.error for _, stream in done if stream.error][:3],
        "seconds": round(took, 2),
        **kinds,
        "itl_ms": ms([gap for _, stream in whole for gap in stream.gaps]),
        "ttft_ms": ms([stream.times[0] - stream.started for _, stream in whole]),
        "output_tokens_per_s": round(tokens / took, 1),
        "good_requests": good,
        "goodput_per_s": round(good / took, 3),
        "digest": digest.hexdigest() if len(whole) == len(done) else "",
    }


def is_good(load: Load, stream: Stream) -> bool:
    """Whether a stream met both limits."""
    ttft = (stream.times[0] - stream.started) * 1e3
    gaps = stream.gaps
    return ttft <= load.slo_ttft_ms and (not gaps or percentile(gaps, 0.99) * 1e3 <= load.slo_itl_ms)
