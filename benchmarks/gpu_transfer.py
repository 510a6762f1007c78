"""KV of one prompt from a P process to a D process on one GPU: how much of the sending hides behind the prompt.

``python -m benchmarks.gpu_transfer --out FILE [--transport shm,tcp] [--tokens 2048]``. Production transports, backend and canonical
copies, random weights of 8B shape. Two orders: layer by layer while the prompt is computed, and all layers after its first token
is drawn. Exposed: from the draw on P to the last byte in D's blocks (both clocks are CLOCK_MONOTONIC of one machine).
"""

import argparse
import json
import multiprocessing
import queue
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.gpu_shapes import LLAMA_8B
from relay.clock import MonotonicClock
from relay.transfer.contract import (
    Identity,
    Layout,
    ReceiveCompleted,
    ReceiveOrder,
    SendAcknowledged,
    SendFailed,
    SendOrder,
)
from relay.transfer.frame import Handoff

BLOCK = 64


def endpoint(name: str, transport: str, layers: int) -> tuple[Any, Any, Any, Any]:
    """(backend, program, transport, its events) of one process."""
    import torch

    from benchmarks.gpu_model import random_model
    from relay.kernels.cpu.crc32c import crc32c
    from relay.transfer.transport import WiredTransport
    from relay.transfer.wire import open_wires
    from relay.worker.device import flow_of
    from relay.worker.host import host_identity

    torch.manual_seed(1)
    config = LLAMA_8B if layers == LLAMA_8B.num_layers else shallower(layers)
    backend, program = random_model(config, max_rows=8, max_tokens=2048)
    backend.allocate_kv(400, BLOCK, "bfloat16")
    backend.warm_up(2048)
    layout = Layout(config.num_layers, config.num_kv_heads, config.head_dim, "bfloat16")
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    flow = flow_of("cuda")
    wired = WiredTransport(
        Identity(name, 1, "digest", "numerics", layout),
        backend,
        events.put,
        open_wires(transport, host_identity(), ring_bytes=flow.ring_bytes),  # type: ignore[arg-type]
        flow.limits,
        checksum=crc32c,
        clock=MonotonicClock(),
    )
    return backend, program, wired, events


def shallower(layers: int) -> Any:
    from dataclasses import replace

    return replace(LLAMA_8B, num_layers=layers)  # type: ignore[type-var]


def decode_side(transport: str, layers: int, tokens: int, pipe: Any) -> None:
    _, _, wired, events = endpoint("d", transport, layers)
    pipe.send(wired.addresses)
    blocks = -(-tokens // BLOCK)
    while (transfer := pipe.recv()) is not None:
        table = tuple(range(transfer % 3 * blocks, (transfer % 3 + 1) * blocks))
        wired.open_receive(ReceiveOrder(transfer, 0, "p", 1, 0, tokens, table))
        pipe.send("open")
        event = events.get(timeout=60)
        pipe.send((time.monotonic_ns(), isinstance(event, ReceiveCompleted), str(event)))


def prefill_side(transport: str, layers: int, tokens: int, trials: int) -> dict[str, Any]:
    from relay.kernels.backend import Batch
    from relay.protocol.sampling import SamplingParams

    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    peer = context.Process(target=decode_side, args=(transport, layers, tokens, other))
    peer.start()
    backend, program, wired, events = endpoint("p", transport, layers)
    addresses = pipe.recv()
    backend.bind_slot(0, SamplingParams(max_tokens=9, temperature=0.0), 0, [1], [])
    blocks = -(-tokens // BLOCK)
    chance = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float]]] = {"overlapped": [], "after": [], "alone": []}
    for trial in range(3 * trials + 3):
        kind = ("overlapped", "after", "alone")[trial % 3]
        table = np.arange(blocks, dtype=np.int32) + trial % 4 * blocks
        batch = Batch(
            token_ids=chance.integers(0, LLAMA_8B.vocab, tokens).astype(np.int32),
            positions=np.arange(tokens, dtype=np.int32),
            row_starts=np.array([0, tokens], np.int32),
            slots=np.zeros(1, np.int32),
            block_tables=table[None],
            sampled_rows=np.zeros(1, np.int32),
        )
        if kind != "alone":
            pipe.send(trial)
            assert pipe.recv() == "open"
            wired.open_send(SendOrder(trial, 0, "d", 1, tuple(addresses), 0, tokens))
        begin = time.monotonic_ns()
        start = 0
        for layer, stop in enumerate(program.sink_points):
            backend.run(start, stop, batch)
            start = stop
            if kind == "overlapped":
                wired.layer_written(trial, layer, 0, tokens, table)
        backend.run(start, len(program.ops), batch)
        (token,) = backend.sample(batch)
        drawn = time.monotonic_ns()
        if kind == "after":
            for layer in range(len(program.sink_points)):
                wired.layer_written(trial, layer, 0, tokens, table)
        there = drawn
        if kind != "alone":
            wired.send_handoff(trial, Handoff(token_id=token.token_id))
            there, complete, text = pipe.recv()
            event = events.get(timeout=60)
            assert complete, text
            assert isinstance(event, SendAcknowledged), event if isinstance(event, SendFailed) else str(event)
        if trial >= 3:
            found[kind].append(((drawn - begin) / 1e6, (there - drawn) / 1e6))
    pipe.send(None)
    peer.join(20)
    wired.close()

    def median(kind: str, index: int) -> float:
        return round(statistics.median(pair[index] for pair in found[kind]), 2)

    megabytes = tokens * layers * 2 * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * 2 / 1e6
    row = {
        "megabytes": round(megabytes, 1),
        "trials": trials,
        "prefill_ms": {kind: median(kind, 0) for kind in found},
        "exposed_ms": {kind: median(kind, 1) for kind in ("overlapped", "after")},
        "hidden_share": round(1 - median("overlapped", 1) / median("after", 1), 4),
        "send_after_gb_per_s": round(megabytes / median("after", 1), 2),
        "all_exposed_ms": {kind: [round(pair[1], 1) for pair in found[kind]] for kind in ("overlapped", "after")},
    }
    print(transport, row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--transport", default="shm,tcp")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=LLAMA_8B.num_layers)
    parser.add_argument("--trials", type=int, default=7)
    arguments = parser.parse_args()
    rows = {}
    for transport in arguments.transport.split(","):
        rows[transport] = prefill_side(transport, arguments.layers, arguments.tokens, arguments.trials)
        arguments.out.write_text(json.dumps({**report.provenance(), **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
