"""KV of one prompt from an engine on one device to an engine on another: exposed time, hidden share, bandwidth.

Production engines and transports, each in its own process. Three orders in turn: layer by layer while the prompt is computed, all
layers after its first token is drawn, and nothing at all (the target holds every token). Exposed is the time from the draw on P to
the target's "complete", less that of nothing; hidden = 1 - exposed / exposed of "after".
"""

import multiprocessing
import queue
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from relay.models.llama import build_program
from relay.models.pack import Pack
from relay.worker.spec import WorkerSpec, decode_spec, encode_spec

TICK_S = 0.25
WAIT_S = 60
COMPARED = 4096  # tokens of a transfer whose bytes are compared
KINDS = ("streamed", "after", "empty")


def open_engine(spec: WorkerSpec) -> tuple[Any, Any, "queue.SimpleQueue[Any]"]:
    """(engine, its transport, what the transport says)."""
    from relay.transfer.transport import WiredTransport
    from relay.transfer.wire import open_wires
    from relay.worker.assembly import assemble
    from relay.worker.device import device_wires, flow_of
    from relay.worker.host import host_identity

    engine = assemble(spec)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    flow = flow_of(spec.backend)
    first = device_wires(spec, host_identity())
    wires = open_wires(spec.transport, host_identity(), spec.kv_host, 0, flow.ring_bytes, first)
    wired = WiredTransport(
        engine.identity, engine.backend, events.put, wires, flow.limits, checksum=engine.checksum
    )  # fmt: skip

    def tick() -> None:
        while True:
            time.sleep(TICK_S)
            wired.tick(time.monotonic_ns())

    threading.Thread(target=tick, daemon=True).start()
    return engine, wired, events


def decode_side(spec_text: str, pipe: Any) -> None:
    """The target's process: obeys (transfer, first, tokens) until None; "digest" asks for what the blocks hold."""
    from relay.transfer.contract import ReceiveCompleted, ReceiveOrder

    engine, wired, events = open_engine(decode_spec(spec_text))
    pipe.send(wired.addresses)
    while (order := pipe.recv()) is not None:
        transfer, first, tokens = order
        table = list(range(-(-tokens // engine.limits.block_size)))
        if transfer == "digest":
            pipe.send(engine.runner.kv_digests(table, tokens))
            continue
        wired.open_receive(ReceiveOrder(transfer, 1, "bench-p", 1, first, tokens, tuple(table)))
        pipe.send("open")
        event = events.get(timeout=WAIT_S)
        pipe.send((time.monotonic_ns(), isinstance(event, ReceiveCompleted), str(event)))


class Pair:
    """P in this process, D in another. ``close`` ends both."""

    def __init__(self, source: WorkerSpec, target: WorkerSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._peer = context.Process(target=decode_side, args=(encode_spec(target), other), daemon=True)
        self._peer.start()
        self._engine, self._wired, self._events = open_engine(source)
        self._program = build_program(Pack(Path(source.pack_path)).config)
        self._chunk = source.max_num_batched_tokens
        self._chance = np.random.default_rng(0)
        self._transfer = 0
        self._addresses = tuple(self._answer())

    def close(self) -> None:
        if self._peer.is_alive():
            self._pipe.send(None)
        self._peer.join(10)
        self._peer.kill()
        self._wired.close()

    def measure(self, tokens: int, trials: int) -> dict[str, Any]:
        """One row; the first round is not counted, but its KV is compared."""
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        equal = True
        for trial in range(trials + 1):
            for kind in KINDS:
                pair = self._once(kind, tokens)
                if kind != "empty" and not trial:
                    equal = equal and self._equal(min(tokens, COMPARED))
                if trial:
                    found[kind].append(pair)
        return self._row(tokens, trials, found, equal)

    def _once(self, kind: str, tokens: int) -> tuple[float, float]:
        """(prefill, exposed) in milliseconds."""
        from relay.kernels.backend import Batch
        from relay.protocol.sampling import SamplingParams
        from relay.transfer.contract import SendAcknowledged, SendOrder
        from relay.transfer.frame import Handoff

        engine, wired = self._engine, self._wired
        backend, limits = engine.backend, engine.limits
        table = np.arange(-(-tokens // limits.block_size), dtype=np.int32)[::-1].copy()
        prompt = self._chance.integers(0, 256, tokens).astype(np.int32)
        self._transfer += 1
        first = tokens if kind == "empty" else 0
        self._pipe.send((self._transfer, first, tokens))
        assert self._answer() == "open"
        wired.open_send(SendOrder(self._transfer, 1, "bench-d", 1, self._addresses, first, tokens))
        backend.bind_slot(0, SamplingParams(max_tokens=9, temperature=0.0), 0, prompt.tolist(), [])
        program = self._program
        begin = time.monotonic_ns()
        ranges = [(start, min(start + self._chunk, tokens)) for start in range(0, tokens, self._chunk)]
        token = None
        for start, stop in ranges:
            last = stop == tokens
            batch = Batch(
                token_ids=prompt[start:stop],
                positions=np.arange(start, stop, dtype=np.int32),
                row_starts=np.array([0, stop - start], np.int32),
                slots=np.zeros(1, np.int32),
                block_tables=table[None, : -(-stop // limits.block_size)],
                sampled_rows=np.zeros(int(last), np.int32),
            )
            at = 0
            for layer, point in enumerate(program.sink_points):
                backend.run(at, point, batch)
                at = point
                if kind == "streamed":
                    wired.layer_written(self._transfer, layer, start, stop - start, table)
            backend.run(at, len(program.ops), batch)
            if last:
                (token,) = backend.sample(batch)
        drawn = time.monotonic_ns()
        if kind == "after":
            for layer in range(len(program.sink_points)):
                wired.layer_written(self._transfer, layer, 0, tokens, table)
        assert token is not None
        wired.send_handoff(self._transfer, Handoff(token_id=token.token_id))
        there, complete, text = self._answer()
        event = self._events.get(timeout=WAIT_S)
        if not complete or not isinstance(event, SendAcknowledged):
            raise RuntimeError(f"transfer of {tokens} tokens, {kind}: {text}, {event}")
        self._scheme = event.stats.scheme if event.stats is not None else ""
        self._table = table
        backend.release_slot(0)
        return (drawn - begin) / 1e6, (there - drawn) / 1e6

    def _equal(self, tokens: int) -> bool:
        self._pipe.send(("digest", 0, tokens))
        return bool(self._answer() == self._engine.runner.kv_digests(self._table.tolist(), tokens))

    def _answer(self) -> Any:
        deadline = time.monotonic() + 3 * WAIT_S
        while not self._pipe.poll(0.2):
            if not self._peer.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the target process does not answer")
        return self._pipe.recv()

    def _row(
        self, tokens: int, trials: int, found: dict[str, list[tuple[float, float]]], equal: bool
    ) -> dict[str, Any]:
        def median(kind: str, index: int) -> float:
            return statistics.median(pair[index] for pair in found[kind])

        nothing = sorted(pair[1] for pair in found["empty"])
        noise = (nothing[-1] - nothing[0]) / 2
        exposed, after = (median(kind, 1) - median("empty", 1) for kind in ("streamed", "after"))
        size = tokens * self._engine.identity.layout.token_bytes * self._engine.num_layers
        return {
            "tokens": tokens,
            "megabytes": round(size / 1e6, 2),
            "scheme": self._scheme,
            "trials": trials,
            "prefill_ms": {kind: round(median(kind, 0), 3) for kind in KINDS},
            "exposed_ms": round(exposed, 3),
            "exposed_after_ms": round(after, 3),
            "noise_ms": round(noise, 3),
            "below_noise": abs(exposed) <= noise,
            "hidden_share": round(1 - exposed / after, 4),
            "after_gb_per_s": round(size / median("after", 1) / 1e6, 3),
            "kv_bytes_equal": equal,
            "all_ms": {kind: [round(pair[1], 2) for pair in found[kind]] for kind in KINDS},
        }


def copy_rate(source: str, target: str, size: int, runs: int = 9) -> dict[str, Any]:
    """GB/s of plain copies of ``size`` bytes between two devices (or "cpu" in memory), and whether peers see each other."""
    if source == "cpu":
        a, b = np.ones(size, np.uint8), np.empty(size, np.uint8)
        seconds = []
        for _ in range(runs):
            begin = time.perf_counter()
            np.copyto(b, a)
            seconds.append(time.perf_counter() - begin)
        return {"bytes": size, "gb_per_s": round(size / statistics.median(seconds) / 1e9, 2), "peers": None}
    import torch

    a, b = (torch.empty(size, dtype=torch.uint8, device=device) for device in (source, target))
    a.random_()
    seconds = []
    for _ in range(runs + 2):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        begin = time.perf_counter()
        b.copy_(a, non_blocking=True)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        seconds.append(time.perf_counter() - begin)
    peers = torch.cuda.can_device_access_peer(torch.device(source).index, torch.device(target).index)
    rate = size / statistics.median(seconds[2:]) / 1e9
    equal = bool((b == a.to(target)).all())  # before the frame kernel writes there
    return {
        "bytes": size,
        "gb_per_s": round(rate, 1),
        "kernel_gb_per_s": _gather_rate(a.view(torch.int16), b) if peers else None,
        "peers": peers,
        "equal": equal,
    }


def _gather_rate(cache: Any, flat: Any, runs: int = 9) -> float:
    """GB/s of the frame kernel alone, from blocks of 64 tokens of 8 heads on one device to frames of 128 MiB on the other."""
    import torch

    from relay.kernels.cuda.kv_move import Plan, move
    from relay.kernels.kv_frames import KvRange

    layers, blocks = 4, 128  # 128 MiB
    kv = cache[: layers * 2 * blocks * 8 * 64 * 128].view(layers, 2, blocks, 8, 64, 128)
    plan = Plan([KvRange(0, layers, 0, 64 * blocks, np.arange(blocks, dtype=np.int32)[::-1].copy())], [0], 64, 8)
    seconds = []
    with torch.cuda.device(cache.device):
        for _ in range(runs + 2):
            words = torch.from_numpy(plan.words.copy()).to(cache.device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            move(kv, flat, plan, words, store=False)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
    return round(kv.nbytes / statistics.median(seconds[2:]) / 1e9, 1)
