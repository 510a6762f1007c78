"""Timing and reporting shared by the GPU benchmarks: graph replays over rotated inputs, medians, one JSON a run."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton


def graph_time_us(launch: Callable[[], None], launches: int = 1, replays: int = 7) -> float:
    """Median time of one launch in microseconds: ``launch`` (which issues ``launches`` of them) captured and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times) / launches


def copy_rate() -> float:
    """Device copy bandwidth in bytes a second, counting bytes read and written (2 x 4 GiB); the best of 20 after a warm-up."""
    source = torch.empty(1 << 31, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(40):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.add(source, 0, out=target)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3)
    return 2 * source.numel() * 2 / best * 1e6


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "device": torch.cuda.get_device_name(),
        "driver": subprocess.run(  # of the first GPU: one driver serves all
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
        ).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("RELAY_COMMIT", "unknown"),
        "date": time.strftime("%Y-%m-%d"),
    }


class Report:
    """Collects rows and writes them after every section, so that a run cut short still leaves what it measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = time.monotonic()
        self.data: dict[str, Any] = {"environment": environment()}

    def put(self, section: str, value: Any) -> None:
        self.data[section] = value
        self.data["seconds"] = round(time.monotonic() - self.started, 1)
        self.path.write_text(json.dumps(self.data, indent=1))
        print(f"[{self.data['seconds']:.0f} s] {section} done", flush=True)
