"""Host time of steps with prompts: what the processor needs beside what the GPU needs, from graphs and op by op.

``python -m benchmarks.gpu_host --out DIR [--profile]`` on a GPU; random weights. A row is one chunk of a prompt beside decode rows,
as a colocated worker runs it. ``queue_ms``: until ``run`` returns; ``wall_ms``: until its token is there; ``eager_ms``: as
``queue_ms`` op by op, where the step has a graph; ``device_ms``: the same launches from a graph without padding; ``cut_ms``: as
``queue_ms`` where ``run`` is called a layer at a time, as P does. ``--profile``: op by op, by function.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_model import BLOCK, greedy, random_model
from benchmarks.gpu_shapes import LLAMA_8B, SMOLLM2
from benchmarks.gpu_timing import Report, graph_time_us
from relay.kernels.backend import Batch
from relay.kernels.cuda.backend import CudaBackend

CHUNKS = ((16, 0), (64, 0), (256, 0), (512, 0), (512, 16), (2048, 0), (2048, 16))  # (tokens of the prompt, decode rows)
POSITION = 512  # of decode rows
RUNS = 12


def mixed(chunk: int, decodes: int) -> Batch:
    """A prompt's first ``chunk`` tokens and ``decodes`` rows of one token."""
    rows, width = decodes + 1, max(-(-chunk // BLOCK), POSITION // BLOCK + 1)
    return Batch(
        token_ids=np.zeros(decodes + chunk, np.int32),
        positions=np.concatenate([np.full(decodes, POSITION), np.arange(chunk)]).astype(np.int32),
        row_starts=np.array([*range(rows), decodes + chunk], np.int32),
        slots=np.arange(rows, dtype=np.int32),
        block_tables=np.arange(rows * width, dtype=np.int32).reshape(rows, width),
        sampled_rows=np.arange(rows, dtype=np.int32),
    )


def median_ms(run: Callable[[], float]) -> float:
    return round(statistics.median(run() for _ in range(RUNS + 3)) * 1e3, 3)


def measure(backend: CudaBackend, chunk: int, decodes: int, points: list[int]) -> dict[str, Any]:
    batch, ops = mixed(chunk, decodes), points[-1]

    def queue(edges: list[int], whole: bool) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for start, stop in itertools.pairwise(edges):
            backend.run(start, stop, batch)
        queued = time.perf_counter()
        backend.sample(batch)
        return (time.perf_counter() if whole else queued) - begin

    row = {
        "queue_ms": median_ms(lambda: queue([0, ops], whole=False)),
        "graph": backend._replayed,
        "wall_ms": median_ms(lambda: queue([0, ops], whole=True)),
        "cut_ms": median_ms(lambda: queue(points, whole=False)),
    }
    graphs, backend._graphs = backend._graphs, None
    row["eager_ms"] = median_ms(lambda: queue([0, ops], whole=False))
    backend._graphs = graphs
    step = backend._step
    assert step is not None
    row["device_ms"] = round(graph_time_us(lambda: backend.launch_all(step, draw=False)) / 1e3, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    report = Report(arguments.out / "host.json")
    for name, config in (("8B", LLAMA_8B), ("SmolLM2", SMOLLM2)):
        backend, program = random_model(config, max_rows=64, max_tokens=4096)
        backend.allocate_kv(2048, BLOCK, "bfloat16")
        for slot in range(64):
            backend.bind_slot(slot, greedy(slot), 0, [1], [])
        assert backend._graphs is not None
        with torch.cuda.stream(backend._stream):
            backend.reserve(4096, 64)
            torch.cuda.empty_cache()
            free, begin = torch.cuda.mem_get_info()[0], time.perf_counter()
            backend._graphs.warm_up(2048)
        graphs = {
            "graphs": len(backend._graphs._graphs),
            "seconds": round(time.perf_counter() - begin, 2),
            "mib": (free - torch.cuda.mem_get_info()[0]) >> 20,
        }
        print(name, graphs, flush=True)
        report.put(f"{name}: captured at start", graphs)
        points = [0, *program.sink_points, len(program.ops)]
        table = {}
        for chunk, decodes in CHUNKS:
            row = table[f"{chunk} + {decodes}"] = measure(backend, chunk, decodes, points)
            print(name, chunk, decodes, row, flush=True)
        report.put(name, table)
        if arguments.profile:
            batch = mixed(512, 0)
            backend._graphs = None
            with cProfile.Profile() as profile:
                for _ in range(RUNS):
                    backend.run(0, len(program.ops), batch)
                    backend.sample(batch)
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        backend.close()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
