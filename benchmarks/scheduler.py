"""How long the scheduler takes for a step of many running sequences, without any arithmetic.

    python -m benchmarks.scheduler [--sequences 256] [--steps 400] [--json FILE]

Prints medians in microseconds of the calling thread's CPU time (other load shows only through the caches): of ``plan`` and
``update`` (decode steps, with and without a step in flight), of the first step of a shared prompt, and of building the
runner's arrays. Blocks are crossed every 16 steps, as in service.
"""

import argparse
import statistics
import time

import numpy as np

from benchmarks import report
from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler, SchedulerLimits
from relay.engine.step import StepPlan, StepResult
from relay.kernels.backend import Batch, SampledToken
from relay.kernels.program import Geometry, Program
from relay.protocol.messages import Work
from relay.protocol.sampling import SamplingParams


class NullBackend:
    """Takes a batch and draws token 7 for each row."""

    def bind_slot(self, *_: object) -> None: ...

    def release_slot(self, slot: int) -> None: ...

    def run(self, start: int, stop: int, batch: Batch) -> None: ...

    def sample(self, batch: Batch) -> list[SampledToken]:
        return [SampledToken(7) for _ in range(len(batch.sampled_rows))]


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [[SampledToken(7)] for row in plan.rows if row.sample])


def running(count: int, prompt: int, steps: int) -> tuple[Scheduler, SchedulerLimits]:
    """A scheduler with ``count`` sequences that have just been prefilled."""
    length = prompt + steps + 64
    limits = SchedulerLimits(count, max(512, count), 16, (length // 16 + 2) * count, length)
    scheduler = Scheduler(limits, "benchmark")
    for request in range(count):
        params = SamplingParams(max_tokens=steps + 32, eos_token_ids=(0,))
        scheduler.add(Work(request, 0, 1, [request % 50 + 1] * prompt, prompt, params))
    while (plan := scheduler.plan()) is not None:
        scheduler.update(result_of(plan))
        if len(plan.rows) == count and plan.num_tokens == count:
            return scheduler, limits
    raise RuntimeError("the sequences ended before they all ran")


def decode_steps(count: int, prompt: int, steps: int, ahead: bool) -> dict[str, float]:
    scheduler, limits = running(count, prompt, steps)
    runner = Runner(NullBackend(), Program((), Geometry(0, 1, 1, 1, 1, 1, 1, 1)), limits)  # type: ignore[arg-type]
    times: dict[str, list[int]] = {"plan": [], "update": [], "execute": []}
    clock = time.thread_time_ns
    previous: StepPlan | None = scheduler.plan() if ahead else None
    for _ in range(steps - 8):
        started = clock()
        plan = scheduler.plan()
        planned = clock()
        if plan is None or len(plan.rows) != count:
            raise RuntimeError("not every sequence is in the step")
        runner.execute(plan)
        executed = clock()
        result = result_of(previous or plan)
        before = clock()
        scheduler.update(result)
        times["update"].append(clock() - before)
        times["plan"].append(planned - started)
        times["execute"].append(executed - planned)
        previous = plan if ahead else None
    return {name: round(statistics.median(values) / 1000, 1) for name, values in times.items()} | {
        "plan_p99": round(float(np.percentile(times["plan"], 99)) / 1000, 1)
    }


def shared_prompt(count: int, prompt: int) -> dict[str, float]:
    """``count`` requests of one prompt together: the longest ``plan`` until all decode, and the sum of them, in microseconds."""
    limits = SchedulerLimits(count, 512, 16, count * (prompt // 16 + 4), prompt + 64)
    scheduler = Scheduler(limits, "benchmark")
    for request in range(count):
        params = SamplingParams(max_tokens=16)
        scheduler.add(Work(request, 0, 1, [*range(1, prompt), request + 1], prompt, params))
    plans: list[int] = []
    while True:
        started = time.thread_time_ns()
        plan = scheduler.plan()
        plans.append(time.thread_time_ns() - started)
        if plan is None or all(row.token_ids is None for row in plan.rows):
            break
        scheduler.update(result_of(plan))
    return {"plan_max": round(max(plans) / 1000, 1), "plan_total": round(sum(plans) / 1000, 1), "steps": len(plans) - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    figures = {
        "sequences": args.sequences,
        "unit": "microseconds of CPU time, median unless named otherwise",
        "decode": decode_steps(args.sequences, args.prompt, args.steps, ahead=False),
        "decode_plan_ahead": decode_steps(args.sequences, args.prompt, args.steps, ahead=True),
        "shared_prompt_16x1024": shared_prompt(16, 1024),
    }
    report.write(args.json, figures)


if __name__ == "__main__":
    main()
