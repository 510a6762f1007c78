"""Scheduler, runner and backend together: the same requests over paths that must not matter, then throughput.

``python -m benchmarks.gpu_engine --out DIR`` on a GPU; ``--tiny`` runs the check with the reference backend on a CPU, to check the
check. Weights are random.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relay.engine.limits import SchedulerLimits
from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler
from relay.kernels.backend import Backend
from relay.kernels.program import Program
from relay.protocol.messages import Work
from relay.protocol.sampling import SamplingParams

Made = tuple[Backend, Program]


@dataclass
class Outcome:
    """What one sequence gave: tokens, digests of their logits, digests of its KV at the end."""

    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    kv: list[bytes] = field(default_factory=list)


def run(
    made: Made, limits: SchedulerLimits, works: list[Work], together: bool = True
) -> tuple[dict[int, Outcome], int]:
    """All of ``works`` to their ends, added at once or one after another; outcomes by request, and steps taken."""
    backend, program = made
    runner = Runner(backend, program, limits)
    scheduler = Scheduler(limits, "benchmark")
    outcomes = {work.request: Outcome() for work in works}
    steps = 0
    for batch in [works] if together else [[work] for work in works]:
        for work in batch:
            scheduler.add(work)
        while scheduler.has_work():
            plan = scheduler.plan()
            assert plan is not None
            result = runner.execute(plan)
            assert result.error is None, result.error
            steps += 1
            for update in scheduler.update(result):
                assert update.failed is None, update.failed
                outcome = outcomes[update.key.request]
                outcome.tokens += [token.token_id for token in update.tokens]
                outcome.logits += update.logit_digests or []
                if update.block_table is not None:
                    outcome.kv = runner.kv_digests(update.block_table, update.num_computed)
    return outcomes, steps


def requests(vocab: int, count: int, longest: int, new: int, seed: int) -> list[Work]:
    """Prompts of mixed lengths, some sharing a prefix; greedy and sampled, with and without limits."""
    chance = random.Random(seed)
    shared = [chance.randrange(vocab) for _ in range(longest)]
    works = []
    for request in range(count):
        length = chance.randrange(2, longest)
        common = chance.randrange(length) if request % 3 == 0 else 0
        prompt = shared[:common] + [chance.randrange(vocab) for _ in range(length - common)]
        params = SamplingParams(
            max_tokens=chance.randrange(2, new),
            temperature=(0.0, 0.8, 1.2)[request % 3],
            top_p=(1.0, 0.9)[request // 3 % 2],
            top_k=(0, 40)[request // 6 % 2],
            seed=chance.getrandbits(64),
        )
        works.append(Work(request, 0, 0, prompt, length, params, capture=True))
    return works


def check(
    make: Callable[[], Made], vocab: int, limits: SchedulerLimits, count: int, longest: int, new: int
) -> dict[str, Any]:
    """P4 through the engine; returns the comparisons made and those that failed."""
    works = requests(vocab, count, longest, new, seed=5)
    made = make()
    reference, _ = run(made, limits, works)
    blocks = limits.blocks_for(longest + new)
    paths = {
        "chunks of 48": (replace(limits, max_num_batched_tokens=48), works, True),
        "one at a time": (limits, works, False),
        "three at once": (replace(limits, max_num_seqs=3), works, True),
        "few blocks, preempted": (replace(limits, num_blocks=2 * blocks, growth_tokens=0), works, True),
        "another order": (limits, works[::-1], True),
    }
    wrong: list[str] = []
    compared = 0
    for name, (path_limits, path_works, together) in paths.items():
        outcomes, steps = run(made, path_limits, path_works, together)
        for request, outcome in outcomes.items():
            compared += 1
            if outcome != reference[request]:
                wrong.append(f"{name}: request {request}")
        print(name, "steps", steps, "wrong", len(wrong), flush=True)
    resumed = []
    for work in works:
        known = reference[work.request].tokens[: len(reference[work.request].tokens) // 2]
        resumed.append(Work(work.request, 0, 1, work.token_ids + known, work.num_prompt, work.params, capture=True))
    outcomes, _ = run(made, limits, resumed)
    for request, outcome in outcomes.items():
        compared += 1
        known = len(reference[request].tokens) // 2
        if outcome.tokens != reference[request].tokens[known:] or outcome.kv != reference[request].kv:
            wrong.append(f"resumed: request {request}")
    print("resumed, wrong", len(wrong), flush=True)
    made[0].close()
    return {"compared": compared, "wrong": wrong}


def throughput(
    made: Made, limits: SchedulerLimits, vocab: int, prompt: int, new: int, counts: tuple[int, ...]
) -> dict[str, Any]:
    """Requests of one size at once; tokens a second from the first plan to the last token."""
    table: dict[str, Any] = {}
    for count in counts:
        chance = random.Random(count)
        params = SamplingParams(max_tokens=new, temperature=0.0, seed=1)
        works = [
            Work(request, 0, 0, [chance.randrange(vocab) for _ in range(prompt)], prompt, params)
            for request in range(count)
        ]
        begin = time.perf_counter()
        _, steps = run(made, limits, works)
        seconds = time.perf_counter() - begin
        table[str(count)] = {"s": round(seconds, 3), "steps": steps, "new_tokens_per_s": round(count * new / seconds)}
        print("requests", count, table[str(count)], flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.tiny:
        print(check(tiny, 200, SchedulerLimits(8, 256, 16, 200, 320), count=6, longest=60, new=8))
        return
    from benchmarks.gpu_model import BLOCK, random_model
    from benchmarks.gpu_shapes import LLAMA_8B, SMOLLM2
    from benchmarks.gpu_timing import Report

    report = Report(arguments.out / "engine.json")

    def small() -> Made:
        backend, program = random_model(replace(SMOLLM2, num_layers=4), max_rows=32, max_tokens=2048)
        backend.allocate_kv(600, BLOCK, "bfloat16")
        return backend, program

    limits = SchedulerLimits(32, 2048, BLOCK, 600, 1024)
    report.put("paths", check(small, SMOLLM2.vocab, limits, count=24, longest=700, new=40))
    backend, program = random_model(LLAMA_8B, max_rows=256, max_tokens=8192)
    blocks = backend.kv_blocks_that_fit(BLOCK, 0.85)
    backend.allocate_kv(blocks, BLOCK, "bfloat16")
    begin = time.perf_counter()
    backend.warm_up(1024)
    report.put("warm_up_s", round(time.perf_counter() - begin, 1))
    limits = SchedulerLimits(256, 8192, BLOCK, blocks, 1024)
    report.put(
        "throughput/8b 512 in 128 out", throughput((backend, program), limits, LLAMA_8B.vocab, 512, 128, (1, 64, 256))
    )


def tiny() -> Made:
    """The probe's program in the reference backend with exact chains."""
    from relay.kernels.probe import ProbeWeights, probe_program
    from relay.kernels.reference.backend import ReferenceBackend
    from relay.kernels.reference.products import ChainProducts

    backend = ReferenceBackend(ChainProducts())
    backend.load(probe_program(), ProbeWeights())
    backend.allocate_kv(200, 16, "float32")
    return backend, probe_program()


if __name__ == "__main__":
    main()
