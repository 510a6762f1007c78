"""Time to resume: one stream at a time, its worker killed or stopped under it; what its client waits, and what that is made of.

    python -m benchmarks.resume [--trials 25] [--shape 1P+2D --shape 3] [--json FILE]

Detection is the time from just before the signal to the gateway's own note of the loss (``last_loss_s`` of ``relay status``, the
same clock). The wait is from there to the first token that was computed elsewhere, as the client reads it. Beside it: what a fresh
prompt of as many tokens takes on the same server just before (the re-prefill), and the stream's own usual gap (one step).
Every answer is compared with the same request's without a fault.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks import report
from relay.chaos.client import Outcome, ask
from relay.chaos.report import percentile
from relay.chaos.requests import ChatOrCompletion
from relay.chaos.server import MODEL_NAME, Server
from relay.chaos.shapes import Shape, parse_shape

PROMPT_TOKENS = 448
ANSWER_TOKENS = 40
STRUCK_AFTER = 10  # tokens of the answer
STRUCK_AT = 0.4  # of its prompt's time, for a fault in the prompt
LATE_S = 0.02  # a dead worker's last tokens may reach the client so long after its loss was noticed
LOSS_TIMEOUT_S = 20.0
TIMEOUT_S = 60.0
HISTOGRAM_MS = (50, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2000, 3000)


@dataclass(frozen=True, slots=True)
class Kind:
    """``processes`` of the worker that holds the stream get ``number``; ``prompt``: while its prompt is computed."""

    name: str
    number: signal.Signals
    processes: tuple[str, ...]
    prompt: bool = False


KINDS = (
    Kind("SIGKILL while it decodes", signal.SIGKILL, ("pid",)),
    Kind("SIGKILL in its prompt", signal.SIGKILL, ("pid",), prompt=True),
    Kind("SIGSTOP of its engine", signal.SIGSTOP, ("pid",)),
    Kind("SIGSTOP of engine and agent", signal.SIGSTOP, ("pid", "agent_pid")),
)


@dataclass(slots=True)
class Trial:
    """One fault, in seconds."""

    detect_s: float
    resume_s: float
    reprefill_s: float
    step_s: float
    tokens: int  # prompt and committed tokens when it struck
    identical: bool


@dataclass(slots=True)
class Stream:
    """One request on its way: when each token arrived."""

    arrivals_s: list[float] = field(default_factory=list)
    come: asyncio.Event = field(default_factory=asyncio.Event)

    def arrived(self, choice: int, count: int, now_s: float) -> None:
        self.arrivals_s.append(now_s)
        if count >= STRUCK_AFTER:
            self.come.set()

    def resumed_s(self, struck_s: float, lost_s: float) -> float:
        """When the first token from elsewhere came: behind the longest silence that began before the loss was noted, or just after.

        A hedge may end it before that.
        """
        arrivals = [struck_s, *(arrival for arrival in self.arrivals_s if arrival > struck_s)]
        gaps = [(after - before, after) for before, after in pairwise(arrivals) if before <= lost_s + LATE_S]
        return max(gaps)[1]


def completion(dice: random.Random, num_tokens: int, max_tokens: int) -> ChatOrCompletion:
    """A prompt nobody has seen before, greedy, streamed, of exactly these lengths."""
    body = {
        "model": MODEL_NAME,
        "prompt": [dice.randrange(1000, 40_000) for _ in range(num_tokens)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "seed": dice.getrandbits(40),
        "stream": True,
        "return_token_ids": True,
    }
    return ChatOrCompletion("resume", "/v1/completions", body)


async def quiet(server: Server) -> None:
    """Until every worker is ready and has nothing."""
    while True:
        status = await server.status()
        if all(row["state"] == "ready" and not row["placed"] for row in status["workers"]):
            return
        await asyncio.sleep(0.05)


async def calm(server: Server, request: ChatOrCompletion) -> Outcome:
    outcome = await ask(server.host, server.port, request, TIMEOUT_S)
    if problem := outcome.whole(request):
        raise SystemExit(f"without a fault: {problem}")
    return outcome


async def holder(server: Server, kind: Kind) -> dict[str, Any]:
    """The worker that computes the one stream there is."""
    roles = ("prefill", "both") if kind.prompt else ("decode", "both")
    while True:
        rows = [row for row in (await server.status())["workers"] if row["placed"] and row["role"] in roles]
        if len(rows) == 1:
            return rows[0]
        await asyncio.sleep(0.002)


async def loss_of(server: Server, worker: str, struck_s: float) -> float:
    """When the gateway noted it. An answer that a hedge went on with may be whole before."""
    deadline_s = time.monotonic() + LOSS_TIMEOUT_S
    while time.monotonic() < deadline_s:
        row = next(one for one in (await server.status())["workers"] if one["id"] == worker)
        if row["last_loss_s"] and row["last_loss_s"] >= struck_s:
            return float(row["last_loss_s"])
        await asyncio.sleep(0.05)
    raise SystemExit(f"{worker} was struck, and nobody noticed for {LOSS_TIMEOUT_S:g} s")


async def trial(server: Server, kind: Kind, dice: random.Random) -> Trial:
    tokens = PROMPT_TOKENS + (0 if kind.prompt else STRUCK_AFTER)
    await quiet(server)
    probe = await calm(server, completion(dice, tokens, 1))
    reprefill_s = probe.first_s - probe.started_s
    request = completion(dice, PROMPT_TOKENS, ANSWER_TOKENS)
    stream = Stream()
    asking = asyncio.ensure_future(ask(server.host, server.port, request, TIMEOUT_S, stream.arrived))
    if kind.prompt:
        await asyncio.sleep(STRUCK_AT * reprefill_s)
    else:
        await stream.come.wait()
    row = await holder(server, kind)
    held = len(stream.arrivals_s)
    struck_s = time.monotonic()
    for process in kind.processes:
        os.kill(row[process], kind.number)
    outcome = await asking
    lost_s = await loss_of(server, row["id"], struck_s)
    await quiet(server)
    expected = await calm(server, request)
    gaps = [after_s - before_s for before_s, after_s in pairwise(stream.arrivals_s)]
    return Trial(
        detect_s=lost_s - struck_s,
        resume_s=stream.resumed_s(struck_s, lost_s) - struck_s,
        reprefill_s=reprefill_s,
        step_s=median(gaps),
        tokens=PROMPT_TOKENS + held,
        identical=not outcome.whole(request) and outcome.canonical() == expected.canonical(),
    )


def summary(trials: list[Trial]) -> dict[str, Any]:
    """Milliseconds. ``beyond``: of each trial, its wait less its own re-prefill."""

    def shares(values: list[float]) -> dict[str, float | None]:
        ordered = [round(value * 1e3, 2) for value in values]
        return {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99)}

    waits = [one.resume_s * 1e3 for one in trials]
    bounds = (0, *HISTOGRAM_MS, float("inf"))
    return {
        "n": len(trials),
        "identical": sum(one.identical for one in trials),
        "tokens_p50": percentile([float(one.tokens) for one in trials], 0.5),
        "detect_ms": shares([one.detect_s for one in trials]),
        "resume_ms": shares([one.resume_s for one in trials]),
        "reprefill_and_step_ms": shares([one.reprefill_s + one.step_s for one in trials]),
        "beyond_reprefill_ms": shares([one.resume_s - one.reprefill_s for one in trials]),
        "step_ms_p50": round(median(one.step_s for one in trials) * 1e3, 2),
        "histogram_ms": {
            f"{low}–{high}": count
            for low, high in pairwise(bounds)
            if (count := sum(low <= wait < high for wait in waits))
        },
    }


async def measure(shape: Shape, count: int, serve: list[str]) -> dict[str, Any]:
    dice = random.Random(f"resume {shape.name}")
    server = Server(["smollm2", *shape.flags, *serve])
    await server.start()
    figures = {}
    try:
        for _ in range(2 * shape.size):  # every worker has computed something
            await asyncio.gather(*(calm(server, completion(dice, PROMPT_TOKENS, 2)) for _ in range(shape.size)))
        for kind in KINDS:
            trials = [await trial(server, kind, dice) for _ in range(count)]
            figures[kind.name] = summary(trials)
            show(shape, kind, figures[kind.name])
    finally:
        code = await server.stop()
    if code:
        raise SystemExit(f"relay serve ended with {code}")
    return figures


def show(shape: Shape, kind: Kind, row: dict[str, Any]) -> None:
    print(f"{shape.name}, {kind.name}: {row['identical']} of {row['n']} identical", file=sys.stderr)
    for name in ("detect_ms", "resume_ms", "reprefill_and_step_ms", "beyond_reprefill_ms"):
        print(f"  {name:22} p50 {row[name]['p50']:8.1f}   p99 {row[name]['p99']:8.1f}", file=sys.stderr)
    for label, count in row["histogram_ms"].items():
        print(f"  {label:>11} ms {count:4} {'#' * count}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=25, help="of each kind on each shape")
    parser.add_argument("--shape", action="append", help="default: 1P+2D and 3")
    parser.add_argument("--json")
    parser.add_argument("serve", nargs="*", help="flags for relay serve, after --")
    arguments = parser.parse_args()
    shapes = [parse_shape(text) for text in arguments.shape or ("1P+2D", "3")]
    figures = {shape.name: asyncio.run(measure(shape, arguments.trials, arguments.serve)) for shape in shapes}
    report.write(arguments.json, {"prompt_tokens": PROMPT_TOKENS, "trials": arguments.trials, "shapes": figures})
    rows = [row for kinds in figures.values() for row in kinds.values()]
    sys.exit(0 if all(row["identical"] == row["n"] for row in rows) else 1)


if __name__ == "__main__":
    main()
