"""Mixed load on a server: short prompts that decode for long beside long prompts; the same arrivals for every shape.

How the load was chosen, before anything was run. One H200 prefills the 8B shape at 42,000 tokens/s and decodes 32 rows in 5.45 ms
(``results/h200/model_time.json``). At factor 1 chats bring 8 x 256 prompt tokens a second and documents 3 x 4,096: 34 % of one P.
Factors 1.2 and 2.2 keep it 41 % and 75 % busy: a calm server, and the most that one P serves without a queue that grows by chance
alone. D then decodes about 16 and 29 rows, far from its 256: in this mix P is what 1P + 1D has too little of, so TTFT and the
throughput of a backlog (``at_once``) are what the split should lose, and both are printed.

A request is good if all its tokens came, the second within 500 ms of sending (five times a document's own prefill; the second,
because a split hands over between the two), and the 99th percentile of its gaps is at most twice the steady step: somebody else's
prompt may at most double the wait for a token. 1.5, 3 and 5 steps are counted beside it, so that no result hangs on that choice.
Answers have 128 tokens or more: of fewer than 101 gaps the 99th percentile would be the largest, and judge one handoff.
"""

import asyncio
import gc
import hashlib
import random
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu_server import Server, Stream, ms, percentile

KINDS = ("chat", "document")
SLO_STEPS = (1.5, 2.0, 3.0, 5.0)
STATED_STEPS = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals of two kinds for ``seconds``, of which exactly as many come as are expected, and the limits that a
    request must meet to count as good."""

    chats_per_s: float = 8.0
    chat_prompt: int = 256
    chat_new: int = 256
    documents_per_s: float = 3.0
    document_prompt: int = 4096
    document_new: int = 128
    seconds: float = 9.0
    vocab: int = 128000
    slo_start_ms: float = 500.0  # from sending to the second token
    step_ms: float = 5.45  # a steady decode step; limits of gaps are multiples of it
    prefill_tokens_per_s: float = 42_000.0  # of one P
    drain_s: float = 20.0  # the longest wait for the last answer
    burst: bool = False  # all at once

    def times(self, factor: float, seconds: float | None = None) -> "Load":
        """The same mix, ``factor`` times as often."""
        return replace(
            self,
            chats_per_s=self.chats_per_s * factor,
            documents_per_s=self.documents_per_s * factor,
            seconds=self.seconds if seconds is None else seconds,
        )

    def at_once(self) -> "Load":
        """What arrives in ``seconds``, all at the beginning: how fast a backlog is worked off."""
        return replace(self, burst=True)

    @property
    def slo_itl_ms(self) -> float:
        """The 99th percentile of a good request's gaps is at most this."""
        return STATED_STEPS * self.step_ms

    def expected(self) -> dict[str, float]:
        """Arithmetic of the load: the share of one P's time, and the rows that one D decodes in a step."""
        prompt = self.chats_per_s * self.chat_prompt + self.documents_per_s * self.document_prompt
        new = self.chats_per_s * self.chat_new + self.documents_per_s * self.document_new
        return {
            "prompt_tokens_per_s": round(prompt, 1),
            "prefill_share": round(prompt / self.prefill_tokens_per_s, 3),
            "output_tokens_per_s": round(new, 1),
            "decode_rows": round(new * self.step_ms / 1e3, 1),
        }


@dataclass(slots=True)
class Planned:
    """One request to come. ``at`` in seconds from the start."""

    at: float
    kind: str
    prompt: list[int]
    new: int


def plan(load: Load) -> list[Planned]:
    """All arrivals, by time; the same for the same load. No two prompts of any loads begin alike but by chance."""
    found: list[Planned] = []
    for kind, rate, length, new in (
        ("chat", load.chats_per_s, load.chat_prompt, load.chat_new),
        ("document", load.documents_per_s, load.document_prompt, load.document_new),
    ):
        chance = random.Random(f"{kind} {rate} {load.seconds} {load.burst}")
        for at in sorted(chance.uniform(0, load.seconds) for _ in range(round(rate * load.seconds))):
            prompt = [chance.randrange(300, load.vocab) for _ in range(length)]
            found.append(Planned(0.0 if load.burst else at, kind, prompt, new))
    return sorted(found, key=lambda one: one.at)


async def drive(server: Server, load: Load) -> dict[str, Any]:
    """Figures of one run, and ``digest``, which is equal wherever all tokens of all requests are."""
    planned = plan(load)
    gc.collect()
    gc.disable()  # a full collection would make every stream wait for the client
    begin, cpu = time.perf_counter(), time.process_time()

    async def one(request: Planned) -> Stream:
        await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - begin)))
        body = {"prompt": request.prompt, "max_tokens": request.new, "temperature": 0, "seed": 1}
        return await server.ask(body)

    tasks = [asyncio.create_task(one(request)) for request in planned]
    try:
        _, late = await asyncio.wait(tasks, timeout=load.seconds + load.drain_s)
    finally:
        gc.enable()
    took, cpu = time.perf_counter() - begin, time.process_time() - cpu
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    streams = [_answer(task, late, took) for task in tasks]
    return {
        **figures(load, list(zip(planned, streams, strict=True)), begin, took),
        "client_cpu_share": round(cpu / took, 3),
    }


def _answer(task: "asyncio.Task[Stream]", late: "set[asyncio.Task[Stream]]", took: float) -> Stream:
    """What came, or a stream with the reason why nothing did."""
    if task in late:
        return Stream(error=f"unfinished after {took:.0f} s")
    if (error := task.exception()) is not None:
        return Stream(error=repr(error))
    return task.result().read()


def figures(load: Load, answers: list[tuple[Planned, Stream]], begin: float, took: float) -> dict[str, Any]:
    """TTFT, gaps, goodput and throughput by kind and together. Percentiles of gaps are over all gaps of all whole answers.

    Rates are over the seconds in which requests arrived, and count tokens that came within them; of a burst, until the last token.
    """
    whole = [(request, stream) for request, stream in answers if is_whole(request, stream)]
    window = took if load.burst else load.seconds
    tokens = sum(at <= begin + window for _, stream in answers for at in stream.times)
    prompts = sum(len(request.prompt) for request, _ in whole)
    digest = hashlib.blake2b(digest_size=8)
    for _, stream in whole:
        digest.update(repr(stream.tokens).encode())
    good = {steps: sum(is_good(load, *answer, steps) for answer in answers) for steps in SLO_STEPS}
    broken = [
        stream.error or f"{len(stream.tokens)} of {r.new} tokens" for r, stream in answers if not is_whole(r, stream)
    ]
    return {
        "load": {**asdict(load), "slo_itl_ms": load.slo_itl_ms},
        "expected": load.expected(),
        "requests": len(answers),
        "errors": broken[:3],
        "seconds": round(took, 2),
        **{kind: _times([stream for request, stream in whole if request.kind == kind]) for kind in KINDS},
        **_times([stream for _, stream in whole]),
        "output_tokens_per_s": round(tokens / window, 1),
        "all_tokens_per_s": round((prompts + tokens) / window, 1),
        "good_requests": good[STATED_STEPS],
        "goodput_per_s": round(good[STATED_STEPS] / window, 3),
        "good_by_itl_steps": {f"{steps:g}": count for steps, count in good.items()},
        "digest": digest.hexdigest() if len(whole) == len(answers) else "",
    }


def _times(streams: list[Stream]) -> dict[str, Any]:
    """``second_ms`` is the wait from the first to the second token, in which a split hands over; it is one of the gaps, too."""
    return {
        "whole": len(streams),
        "ttft_ms": ms([stream.times[0] - stream.started for stream in streams]),
        "second_ms": ms([gap for stream in streams for gap in stream.gaps[:1]]),
        "itl_ms": ms([gap for stream in streams for gap in stream.gaps]),
        "worst_gap_ms": ms([max(stream.gaps) for stream in streams if stream.gaps]),
    }


def is_whole(request: Planned, stream: Stream) -> bool:
    """Whether every token came, and no error."""
    return not stream.error and len(stream.tokens) == len(stream.times) == request.new


def is_good(load: Load, request: Planned, stream: Stream, steps: float = STATED_STEPS) -> bool:
    """Whether a whole answer met both limits, that of gaps being ``steps`` steady steps."""
    if not is_whole(request, stream):
        return False
    start = (stream.times[min(1, len(stream.times) - 1)] - stream.started) * 1e3
    gaps = stream.gaps
    return start <= load.slo_start_ms and (not gaps or percentile(gaps, 0.99) * 1e3 <= steps * load.step_ms)
