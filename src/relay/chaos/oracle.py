"""The calm run: every request's answer from one worker that nothing happens to, and what a prompt and a step cost there."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from relay.chaos.client import Outcome, ask
from relay.chaos.requests import ChatOrCompletion
from relay.chaos.server import MODEL_NAME, Server
from relay.chaos.settings import ChaosSettings
from relay.errors import StartupError

PROBE_WORDS = (100, 300, 460)


@dataclass(frozen=True, slots=True)
class Calm:
    """What one sequence costs on a machine that does nothing else: seconds a prompt token, seconds a step."""

    token_s: float
    step_s: float


async def calm_outcomes(
    settings: ChaosSettings, requests: list[ChatOrCompletion], say: Callable[[str], None]
) -> tuple[list[Outcome], Calm]:
    """Raises StartupError if one of them has no whole answer."""
    server = Server([settings.model, "--prefill", "0", "--decode", "1", *settings.serve])
    await server.start()
    try:
        cost = await _measure(server, settings)
        gate = asyncio.Semaphore(settings.concurrency)

        async def one(request: ChatOrCompletion) -> Outcome:
            async with gate:
                return await ask(server.host, server.port, request, settings.request_timeout_s)

        outcomes = await asyncio.gather(*(one(request) for request in requests))
    finally:
        await server.stop()
    for request, outcome in zip(requests, outcomes, strict=True):
        if problem := outcome.whole(request):
            raise StartupError(f"without any fault, {request.name} has no whole answer: {problem}")
    say(f"{len(outcomes)} calm answers, {sum(outcome.num_tokens for outcome in outcomes)} tokens")
    return outcomes, cost


async def _measure(server: Server, settings: ChaosSettings) -> Calm:
    """Alone on the machine: the time to the first token of long prompts, and the gaps after it."""
    tokens, firsts, steps = 0, 0.0, []
    for number, words in enumerate(PROBE_WORDS):
        body = {
            "model": MODEL_NAME,
            "prompt": " ".join(f"w{number}" for _ in range(min(words, settings.longest_words))),
            "max_tokens": 8,
            "ignore_eos": True,
            "temperature": 0,
            "seed": number,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        outcome = await ask(server.host, server.port, ChatOrCompletion("probe", "/v1/completions", body), 60.0)
        if outcome.usage is None or outcome.num_tokens != 8:
            raise StartupError(f"the probe of {words} words failed: {outcome.problems}")
        tokens += outcome.usage["prompt_tokens"]
        firsts += outcome.first_s - outcome.started_s
        steps.append((outcome.ended_s - outcome.first_s) / 7)
    return Calm(firsts / tokens, median(steps))
