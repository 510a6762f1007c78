"""KV of one prompt from a P process to a D process on GPUs: how much of the sending hides behind the prompt.

``python -m benchmarks.gpu_transfer --out FILE [--transport shm,tcp,ipc] [--tokens 2048,8192] [--target-device cuda:1]
[--timeline]``. Production
transports, backend and canonical copies, random weights of 8B shape; both processes load once and serve every row. Three orders in
turn: layer by layer while the prompt is computed (in chunks of 2,048), all layers after its first token is drawn, and nothing (D
holds every token already). Exposed: from the draw on P to D's "complete" (both clocks are CLOCK_MONOTONIC of one machine), less
that of nothing, which is the handoff alone; noise: half the spread of nothing. After each row D's KV is compared with P's, byte by
byte, by the digests of every layer. ``--timeline``: of each row's last transfer sent after the prompt, when each step happened at
either end (``benchmarks.transfer_timeline``), in µs since the handoff was given.
"""

import argparse
import hashlib
import json
import multiprocessing
import queue
import statistics
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.gpu_shapes import LLAMA_8B
from benchmarks.transfer_timeline import Stamp, Stamps, lines_of, merged, noted_store, noted_wire
from relay.clock import MonotonicClock
from relay.transfer.contract import (
    Identity,
    Layout,
    ReceiveCompleted,
    ReceiveOrder,
    SendAcknowledged,
    SendOrder,
)
from relay.transfer.frame import Handoff

BLOCK = 64
CHUNK = 2048
TICK_S = 0.2
PATIENCE_S = 60
KINDS = ("overlapped", "after", "nothing")


class End:
    """One process's engine, and a transport for each row."""

    def __init__(self, name: str, layers: int, tokens: int, device: str, *, timeline: bool = False) -> None:
        import torch

        from benchmarks.gpu_model import random_model

        torch.cuda.set_device(device)
        torch.manual_seed(1)
        self.name, self.device = name, device
        self.stamps = Stamps() if timeline else None
        config = replace(LLAMA_8B, num_layers=layers, max_positions=max(8192, tokens))
        self.backend, self.program = random_model(config, max_rows=8, max_tokens=CHUNK, device=device)
        self.blocks = -(-tokens // BLOCK)
        self.backend.allocate_kv(4 * self.blocks, BLOCK, "bfloat16")
        self.warm(tokens)
        self.layout = Layout(config.num_layers, config.num_kv_heads, config.head_dim, "bfloat16")
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def warm(self, tokens: int) -> None:
        self.backend.warm_up(tokens)

    def open(self, scheme: str) -> Any:
        from relay.kernels.cpu.crc32c import crc32c
        from relay.kernels.cuda.ipc import DeviceMemory
        from relay.transfer.ipc import IpcWire
        from relay.transfer.transport import WiredTransport
        from relay.transfer.wire import Wire, open_wires
        from relay.worker.device import area_bytes, flow_of
        from relay.worker.host import host_identity

        flow = flow_of("cuda")
        wires: list[Wire] = (
            [IpcWire(host_identity(), memory := DeviceMemory(self.device), area_bytes(memory.total_bytes()))]
            if scheme == "ipc"
            else open_wires(scheme, host_identity(), ring_bytes=flow.ring_bytes)  # type: ignore[arg-type]
        )
        store: Any = self.backend
        if self.stamps is not None:
            store, wires = noted_store(store, self.stamps), [noted_wire(wire, self.stamps) for wire in wires]
        transport = WiredTransport(
            Identity(self.name, 1, "digest", "numerics", self.layout),
            store,
            self.events.put,
            wires,
            flow.limits,
            checksum=crc32c,
            clock=MonotonicClock(),
        )
        self._over = threading.Event()
        threading.Thread(target=self._tick, args=(transport, self._over), daemon=True).start()
        return transport

    def close(self, transport: Any) -> None:
        self._over.set()
        transport.close()

    @staticmethod
    def _tick(transport: Any, over: threading.Event) -> None:
        """As the worker's shell does, whatever the computing thread is at."""
        while not over.wait(TICK_S):
            transport.tick(time.monotonic_ns())

    def table(self, turn: int, tokens: int) -> np.ndarray:
        count = -(-tokens // BLOCK)
        return np.arange(count, dtype=np.int32)[::-1] + turn * self.blocks

    def digests(self, table: np.ndarray, tokens: int) -> list[bytes]:
        raw = bytearray(tokens * self.layout.token_bytes)
        found = []
        for layer in range(self.layout.num_layers):
            self.backend.read_kv(layer, table, 0, tokens, memoryview(raw))
            found.append(hashlib.blake2b(raw, digest_size=16).digest())
        return found


def decode_side(layers: int, most: int, device: str, pipe: Any, timeline: bool = False) -> None:
    end = End("d", layers, most, device, timeline=timeline)
    pipe.send("loaded")
    while (row := pipe.recv()) is not None:
        scheme, tokens = row
        transport = end.open(scheme)
        pipe.send(transport.addresses)
        table = end.table(0, tokens)
        while (transfer := pipe.recv()) is not None:
            number, first = transfer
            if not first:
                table = end.table(number % 3, tokens)
            transport.open_receive(ReceiveOrder(number, 0, "p", 1, first, tokens, tuple(table.tolist())))
            if end.stamps is not None:
                end.stamps.start()
            pipe.send("open")
            event = end.events.get(timeout=PATIENCE_S)
            there_ns = time.monotonic_ns()
            stamps: list[Stamp] = []
            if end.stamps is not None:
                stamps = [*end.stamps.stop("COMPLETE"), (there_ns, "completed", "")]
            pipe.send((there_ns, isinstance(event, ReceiveCompleted), str(event), stamps))
        pipe.send(end.digests(table, tokens))
        end.close(transport)


def row(end: End, pipe: Any, scheme: str, tokens: int, trials: int) -> dict[str, Any]:
    from relay.kernels.backend import Batch

    pipe.send((scheme, tokens))
    addresses = pipe.recv()
    transport = end.open(scheme)
    chance = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    sent: Any = None
    frames = 0
    timeline: list[list[Any]] = []
    for trial in range(3 * trials + 3):
        kind = KINDS[trial % 3]
        table = end.table(trial % 4, tokens)
        ids = chance.integers(0, LLAMA_8B.vocab, tokens).astype(np.int32)
        there_first = tokens if kind == "nothing" else 0
        pipe.send((trial, there_first))
        assert pipe.recv() == "open"
        transport.open_send(SendOrder(trial, 0, "d", 1, tuple(addresses), there_first, tokens))
        begin = time.monotonic_ns()
        for first in range(0, tokens, CHUNK):
            stop = min(first + CHUNK, tokens)
            batch = Batch(
                token_ids=ids[first:stop],
                positions=np.arange(first, stop, dtype=np.int32),
                row_starts=np.array([0, stop - first], np.int32),
                slots=np.zeros(1, np.int32),
                block_tables=table[None],
                sampled_rows=np.zeros(1 if stop == tokens else 0, np.int32),
            )
            start = 0
            for layer, point in enumerate(end.program.sink_points):
                end.backend.run(start, point, batch)
                start = point
                if kind == "overlapped":
                    transport.layer_written(trial, layer, first, stop - first, table)
            end.backend.run(start, len(end.program.ops), batch)
            drawn_tokens = end.backend.sample(batch)
        drawn = time.monotonic_ns()
        if kind == "after" and end.stamps is not None:
            end.stamps.start()
        if kind == "after":
            for layer in range(end.layout.num_layers):
                transport.layer_written(trial, layer, 0, tokens, table)
        given = time.monotonic_ns()
        transport.send_handoff(trial, Handoff(token_id=drawn_tokens[0].token_id))
        there, complete, text, theirs = pipe.recv()
        event = end.events.get(timeout=PATIENCE_S)
        assert complete, text
        assert isinstance(event, SendAcknowledged), str(event)
        if kind == "after" and end.stamps is not None:
            timeline = merged(
                given, [(drawn, "drawn", ""), (given, "handoff given", ""), *end.stamps.stop("COMPLETE")], theirs
            )
        if kind == "overlapped":
            frames = event.stats.frames if event.stats is not None else 0
        if kind != "nothing":
            sent = (table, event.stats)
        if trial >= 3:
            found[kind].append(((drawn - begin) / 1e6, (there - drawn) / 1e6))
    pipe.send(None)
    same = pipe.recv() == end.digests(sent[0], tokens)
    end.close(transport)

    def median(kind: str, index: int) -> float:
        return round(statistics.median(pair[index] for pair in found[kind]), 3)

    nothing = sorted(pair[1] for pair in found["nothing"])
    noise = (nothing[-1] - nothing[0]) / 2
    exposed = {kind: round(median(kind, 1) - median("nothing", 1), 3) for kind in ("overlapped", "after")}
    megabytes = tokens * end.layout.num_layers * end.layout.token_bytes / 1e6
    result = {
        "transport": scheme,
        "scheme_used": sent[1].scheme,
        "frames": frames,
        "tokens": tokens,
        "megabytes": round(megabytes, 1),
        "trials": trials,
        "kv_equal": same,
        "prefill_ms": {kind: median(kind, 0) for kind in found},
        "handoff_alone_ms": median("nothing", 1),
        "noise_ms": round(noise, 3),
        "exposed_ms": exposed,
        "below_noise": exposed["overlapped"] <= noise,
        "hidden_share": round(1 - exposed["overlapped"] / exposed["after"], 4),
        "send_after_gb_per_s": round(megabytes / exposed["after"], 2),
        "all_ms": {kind: [round(pair[1], 2) for pair in found[kind]] for kind in KINDS},
    }
    if timeline:
        result["timeline_us"] = timeline
        print(lines_of(timeline), flush=True)
    print(json.dumps({key: value for key, value in result.items() if key not in ("all_ms", "timeline_us")}), flush=True)
    return result


def main() -> None:
    from relay.protocol.sampling import SamplingParams

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--transport", default="shm,tcp,ipc")
    parser.add_argument("--tokens", default="2048")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.num_layers)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--target-device", default="cuda:0")
    parser.add_argument("--timeline", action="store_true")
    arguments = parser.parse_args()
    lengths = [int(tokens) for tokens in arguments.tokens.split(",")]
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    target = (arguments.layers, max(lengths), arguments.target_device, other, arguments.timeline)
    peer = context.Process(target=decode_side, args=target, daemon=True)
    peer.start()
    end = End("p", arguments.layers, max(lengths), "cuda:0", timeline=arguments.timeline)
    assert pipe.recv() == "loaded"
    end.backend.bind_slot(0, SamplingParams(max_tokens=9, temperature=0.0), 0, [1], [])
    results: dict[str, Any] = {
        **report.provenance(),
        "target_device": arguments.target_device,
        "rows": [],
        "errors": [],
    }
    for tokens in lengths:
        for scheme in arguments.transport.split(","):
            try:
                results["rows"].append(row(end, pipe, scheme, tokens, arguments.trials))
            except Exception:  # the other process may be in the middle of this row: no other can follow
                results["errors"].append({"transport": scheme, "tokens": tokens, "error": traceback.format_exc()})
                print(results["errors"][-1]["error"], file=sys.stderr, flush=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            if results["errors"]:
                peer.kill()
                sys.exit(1)
    pipe.send(None)
    peer.join(20)
    sys.exit(not all(one["kv_equal"] for one in results["rows"]))


if __name__ == "__main__":
    main()
