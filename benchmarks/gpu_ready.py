"""From the command to all workers ready, and the first request after it, by shape of the cluster.

``python -m benchmarks.gpu_ready MODEL --out FILE [--seconds 80] [--transport ipc] [--vocab 128000]``. Shapes take turns until the
time is over. P and D of one GPU share one copy of the weights; with a second GPU there is a row where each has its own.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_serve import prompts
from benchmarks.gpu_server import Server, serving
from relay.config import TRANSPORTS

ROUNDS = 3
PROMPT, NEW = 512, 8


def first_request(server: Server, vocab: int) -> float:
    """Milliseconds to its first token: what a start has left to do shows here. Raises RuntimeError."""
    (prompt,) = prompts(1, PROMPT, vocab, seed=1)
    stream = asyncio.run(server.ask({"prompt": prompt, "max_tokens": NEW, "temperature": 0})).read()
    if stream.error or len(stream.tokens) != NEW:
        raise RuntimeError(f"{len(stream.tokens)} tokens of {NEW}: {stream.error}")
    return round((stream.times[0] - stream.started) * 1e3, 1)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=80.0, help="no start is begun that would end after so long")
    parser.add_argument("--transport", choices=TRANSPORTS, default="ipc", help="of KV between P and D")
    parser.add_argument("--vocab", type=int, default=128000)
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    between = ("--transport", arguments.transport)
    shapes = {
        "colocated": ("--prefill", "0", "--decode", "1"),
        "1P+1D, shared weights": ("--prefill", "1", "--decode", "1", *between),
        "1P+1D, two GPUs": ("--prefill-devices", "cuda:0", "--decode-devices", "cuda:1", *between),
    }
    if torch.cuda.device_count() < 2:
        del shapes["1P+1D, two GPUs"]
    rows: dict[str, dict[str, list[Any]]] = {
        name: {"ready_s": [], "first_request_ms": [], "phases": []} for name in shapes
    }
    began, longest = time.monotonic(), 0.0
    for name, flags in [*shapes.items()] * ROUNDS:
        begin = time.monotonic()
        if begin - began + longest > arguments.seconds:
            break
        with serving(arguments.model, *flags, *arguments.flags.split()) as server:
            rows[name]["ready_s"].append(round(server.ready_s, 2))
            rows[name]["phases"].append(server.phases())
            rows[name]["first_request_ms"].append(first_request(server, arguments.vocab))
        longest = max(longest, time.monotonic() - begin)
        print(name, rows[name]["ready_s"], rows[name]["first_request_ms"], flush=True)
        found = {
            "model": report.without_folder(arguments.model),
            "flags": arguments.flags,
            "transport": arguments.transport,
            "ready": rows,
        }
        arguments.out.write_text(json.dumps({**report.provenance(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
