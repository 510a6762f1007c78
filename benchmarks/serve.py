"""The whole server through HTTP: W1-W4 on relay (split and colocated) and on peers, in one run.

Run: ``python -m benchmarks.serve [--servers split,colocated,colocated-f32,transformers] [--repeats 3] [--json FILE]``. Every
repeat runs every server in turn with fresh prompts, so that drift of the machine meets all of them; the figures are medians,
with ratios to transformers serve where it ran. At the end of a repeat memory is read, and relay's last worker is killed once to
time its return.

Relay keeps the GGUF's blocks and widens them in registers: its arithmetic is fp32 and its logits equal those of fp32 weights
bit for bit. ``colocated-f32`` is the same server on a pack widened to fp32: the row to hold beside other fp32 servers.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

from benchmarks import report, servers
from benchmarks.client import complete
from benchmarks.workloads import Workload, workloads


async def measure(server: servers.Server, workload: Workload) -> dict[str, float]:
    """Figures of one workload on one server."""
    start = time.perf_counter()
    results = await asyncio.gather(
        *(
            complete(server.url, server.body(prompt, workload.output_tokens), workload.output_tokens)
            for prompt in workload.prompts
        )
    )
    wall = time.perf_counter() - start
    for result in results:
        if result.prompt_tokens and result.prompt_tokens != workload.prompt_tokens:
            raise AssertionError(
                f"{server.name} counted {result.prompt_tokens} prompt tokens of {workload.prompt_tokens}"
            )
    ttft = statistics.median(r.ttft_s for r in results)
    figures = {
        "ttft_s": ttft,
        "tpot_ms": 1e3 * statistics.median(r.tpot_s for r in results),
        "output_tok_s": sum(r.output_tokens for r in results) / wall,
    }
    if len(results) == 1:
        figures["prompt_tok_s"] = workload.prompt_tokens / ttft
    return figures


def ratios(medians: dict[str, dict[str, dict[str, float]]], peer: str) -> dict[str, dict[str, float]]:
    """The three ratios of docs/benchmarks.md to ``peer``, per relay shape."""
    base = medians[peer]
    return {
        name: {
            "W1_tpot": figures["W1"]["tpot_ms"] / base["W1"]["tpot_ms"],
            "W2_output_tok_s": figures["W2"]["output_tok_s"] / base["W2"]["output_tok_s"],
            "W1_prompt_tok_s": figures["W1"]["prompt_tok_s"] / base["W1"]["prompt_tok_s"],
        }
        for name, figures in medians.items()
        if name != peer
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", default="split,colocated,colocated-f32,transformers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    names = options.servers.split(",")
    tokenizer = servers.tokenizer()
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in names}
    memory: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    ready: dict[str, list[float]] = {name: [] for name in names}
    restart: dict[str, list[float]] = {name: [] for name in names if name in servers.RELAY_SHAPES}
    for repeat in range(options.repeats):
        for name in names:
            with servers.start(name) as server:
                ready[name].append(server.ready_s)
                warm = workloads(tokenizer, seed=1_000_000)[0]
                asyncio.run(complete(server.url, server.body(warm.prompts[0][:200], 8), 8))
                for workload in workloads(tokenizer, seed=repeat):
                    figures = asyncio.run(measure(server, workload))
                    runs[name].setdefault(workload.name, []).append(figures)
                    print(name, workload.name, {k: round(v, 3) for k, v in figures.items()}, flush=True)
                memory[name].append(server.memory_mb())
                print(name, "memory", memory[name][-1], flush=True)
                if name in restart:
                    restart[name].append(server.restart_s())
                    print(name, f"restarted worker ready after {restart[name][-1]:.3f} s", flush=True)
    medians = {
        name: {workload: _medians(figures) for workload, figures in by_workload.items()}
        for name, by_workload in runs.items()
    }
    memory_medians = {name: _medians(values) for name, values in memory.items()}
    figures: dict[str, Any] = {
        "medians": medians,
        "runs": runs,
        "pss_mb": {name: values["total"] for name, values in memory_medians.items()},
        "memory_mb": memory_medians,
        "ready_s": {name: statistics.median(values) for name, values in ready.items()},
        "restart_ready_s": {name: statistics.median(values) for name, values in restart.items()},
        "restart_runs_s": restart,
    }
    if "transformers" in names:
        figures["ratio_to_transformers"] = ratios(medians, "transformers")
    report.write(options.json, figures)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


if __name__ == "__main__":
    main()
