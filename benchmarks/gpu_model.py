"""A whole model on the backend: P4 and P7 on random weights, draws against the numpy sampler, then step times.

``python -m benchmarks.gpu_model --out DIR [--part check|time|all]`` on a GPU. Shapes: Llama-3.1-8B and SmolLM2-135M. With
``--part time --quantization int8``: times of the 8B shape alone with int8 weights of linears.
"""

import argparse
import itertools
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_shapes import LLAMA_8B, SMOLLM2
from benchmarks.gpu_timing import Report, copy_rate, graph_time_us
from relay.kernels.backend import Batch
from relay.kernels.cuda import launch
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.drawing import Mode
from relay.kernels.cuda.linear_int8 import pack_codes, quantize
from relay.kernels.cuda.loading import coded_names
from relay.kernels.program import Linear, Program, RmsNorm
from relay.kernels.sampler import SlotState, draw
from relay.models.config import ModelConfig
from relay.models.llama import build_program
from relay.protocol.sampling import SamplingParams

BLOCK = 64
EDGES = (
    2,
    63,
    64,
    65,
    66,
    511,
    512,
    513,
    514,
)  # of tiles of 64 keys and splits of 512: last token before, on and after


def random_model(
    config: ModelConfig,
    max_rows: int,
    max_tokens: int,
    graphs: bool = True,
    device: str = "cuda:0",
    dtype: str = "bfloat16",
    quantized: bool = False,
) -> tuple[CudaBackend, Program]:
    """A backend with random weights of the config's shapes, scaled so that activations stay of order one."""
    program = build_program(config)
    kind = getattr(torch, dtype)
    g = program.geometry
    matrices: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    coded = coded_names(program) if quantized else frozenset()
    vectors: dict[str, torch.Tensor] = {}
    matrices["embed"] = torch.randn(g.vocab, g.hidden, device=device, dtype=kind)
    for op in program.ops:
        if isinstance(op, Linear) and op.weight not in matrices:
            n, k = g.width(op.dst), g.width(op.src)
            w = torch.randn(n, k, device=device, dtype=kind).mul_(k**-0.5)
            if op.weight in coded:
                codes, scales[op.weight] = quantize(w)
                w = pack_codes(codes)
            matrices[op.weight] = w
        if isinstance(op, RmsNorm):
            vectors[op.weight] = torch.rand(g.width(op.src), device=device) + 0.5
    inverse = config.rope.theta ** -(torch.arange(0, g.head_dim, 2, dtype=torch.float64) / g.head_dim)
    angles = torch.arange(g.max_positions, dtype=torch.float64)[:, None] * inverse
    vectors["rope.cos"], vectors["rope.sin"] = angles.cos().float().to(device), angles.sin().float().to(device)
    backend = CudaBackend(
        device, max_rows=max_rows, max_tokens=max_tokens, graphs=graphs, dtype=dtype, quantized=quantized
    )
    backend._device.scales.update(scales)
    backend.load_tensors(program, matrices, vectors)
    return backend, program


def greedy(seed: int = 0, temperature: float = 0.0, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, temperature=temperature, seed=seed, **more)


class Paths:
    """Runs sequences through a backend by any path and keeps what must not depend on it."""

    def __init__(self, backend: CudaBackend, program: Program, tokens: np.ndarray, blocks: int) -> None:
        self.backend, self.tokens, self.ops = backend, tokens, len(program.ops)
        self.layers, self.points = program.geometry.num_layers, program.sink_points
        self.free = random.sample(range(blocks), blocks)

    def table(self) -> np.ndarray:
        """Blocks for one whole sequence, shuffled, shared with no other."""
        count = -(-len(self.tokens) // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return np.array(taken, np.int32)

    def step(self, pieces: list[tuple[int, int, np.ndarray, int]], cut: bool = False) -> np.ndarray:
        """(first, stop, table, slot) of each sequence row in one step; logits of the last token of each."""
        counts = [stop - first for first, stop, _, _ in pieces]
        width = max(len(table) for _, _, table, _ in pieces)
        tables = np.zeros((len(pieces), width), np.int32)
        for row, (_, _, table, _) in enumerate(pieces):
            tables[row, : len(table)] = table
        batch = Batch(
            token_ids=np.concatenate([self.tokens[first:stop] for first, stop, _, _ in pieces]).astype(np.int32),
            positions=np.concatenate([np.arange(first, stop) for first, stop, _, _ in pieces]).astype(np.int32),
            row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            slots=np.array([slot for *_, slot in pieces], np.int32),
            block_tables=tables,
            sampled_rows=np.arange(len(pieces), dtype=np.int32),
            capture_logits=True,
        )
        edges = [0, *self.points, self.ops] if cut else [0, self.ops]
        for start, stop in itertools.pairwise(edges):
            self.backend.run(start, stop, batch)
        self.backend.sample(batch)
        return self.backend.logits().copy()

    def kv(self, table: np.ndarray, count: int) -> bytes:
        raw = bytearray(count * self.backend.kv_bytes_per_token_layer())
        return b"".join(
            (self.backend.read_kv(layer, table, 0, count, memoryview(raw)), bytes(raw))[1]
            for layer in range(self.layers)
        )


def check(report: Report, name: str, config: ModelConfig, dtype: str = "bfloat16") -> None:
    """P4: logits of chosen positions and all KV bytes over every path; P7: graph and eager."""
    length = 700
    backend, program = random_model(config, max_rows=32, max_tokens=2048, dtype=dtype)
    blocks = 60 * -(-length // BLOCK)
    backend.allocate_kv(blocks, BLOCK, dtype)
    assert backend._device.kv is not None
    backend._device.kv.fill_(float("nan"))
    tokens = np.random.default_rng(0).integers(0, config.vocab, length)
    paths = Paths(backend, program, tokens, blocks)
    for slot in range(32):
        backend.bind_slot(slot, greedy(slot, 0.8 if slot % 2 else 0.0), 0, [1], [])
    wrong: list[str] = []
    table = paths.table()
    whole = paths.step([(0, length, table, 0)])
    want_kv = paths.kv(table, length)
    if not np.isfinite(whole).all():
        wrong.append("logits are not finite")

    def compare(label: str, logits: np.ndarray, reference: np.ndarray, table: np.ndarray, count: int) -> None:
        if not np.array_equal(logits, reference):
            wrong.append(f"{label}: {int((logits != reference).sum())} of {logits.size} logits differ")
        half = len(want_kv) // paths.layers
        got = paths.kv(table, count)
        part = len(got) // paths.layers
        for layer in range(paths.layers):
            for which in (0, 1):
                expected = want_kv[layer * half + which * half // 2 :][: part // 2]
                if got[layer * part + which * part // 2 :][: part // 2] != expected:
                    wrong.append(f"{label}: KV of layer {layer} differs")
                    return

    checks = 0
    for chunk in (1, 7, 100, 512, 64):
        other = paths.table()
        start = 0 if chunk > 1 else length - 60
        if start:
            paths.step([(0, start, other, 1)])
        for first in range(start, length, chunk):
            last = paths.step([(first, min(first + chunk, length), other, 1)], cut=chunk == 100)
        compare(f"chunk {chunk}", last, whole, other, length)
        checks += 1
    # decode of many sequences at different lengths in one batch, each against its own whole prefill
    stops = [*EDGES, *(random.randrange(2, length) for _ in range(21 - len(EDGES)))]
    rows = []
    references = []
    for slot, stop in enumerate(stops):
        own = paths.table()
        paths.step([(0, stop - 1, own, slot)])
        rows.append((stop - 1, stop, own, slot))
        references.append(paths.step([(0, stop, paths.table(), 31)])[0])
    graph = paths.step(rows)
    kept, backend._graphs = backend._graphs, None
    eager = paths.step(rows)
    mixed = paths.step([*rows[:5], (0, 300, paths.table(), 30), *rows[5:]])
    backend._graphs = kept
    for row, stop in enumerate(stops):
        compare(f"decode {stop} in a batch (graph)", graph[row], references[row], rows[row][2], stop)
        if not np.array_equal(eager[row], references[row]):
            wrong.append(f"decode {stop} eager differs")
        if not np.array_equal(mixed[row if row < 5 else row + 1], references[row]):
            wrong.append(f"decode {stop} beside a prompt differs")
        checks += 3
    for _ in range(20):  # P6
        if not np.array_equal(paths.step(rows), graph):
            wrong.append("a repeated step differs")
            break
    launch.set_pdl(False)
    backend._graphs = None
    if not np.array_equal(paths.step(rows), graph):
        wrong.append("without dependent launch differs")
    launch.set_pdl(True)
    result = {"checks": checks + 21, "wrong": wrong, "layers": config.num_layers}
    layers = {
        f"{n}x{k}": {"failed": layer.failed, "tested": len(layer.tested)}
        for (n, k), layer in backend._device.layers.items()
    }
    print("P4", name, result, layers, flush=True)
    report.put(f"p4/{name}", {**result, "library": layers})
    backend.close()


def check_sampler(report: Report) -> None:
    """Draws of the device against the numpy definition on rows of 8B's vocabulary."""
    from relay.kernels.cuda.sampler import SamplerScratch, sample_rows
    from relay.kernels.cuda.sampler_tables import SamplerTables

    rows, vocab = 96, 128256
    logits = (torch.randn(rows, vocab, device="cuda") * 3).bfloat16()
    tables, scratch = SamplerTables(rows + 1, "cuda"), SamplerScratch(rows, vocab, "cuda")
    states = []
    for row in range(rows):
        params = greedy(
            random.getrandbits(64),
            (0.0, 0.3, 1.0, 2.5)[row % 4],
            min_p=(0.0, 0.02, 0.3)[row % 3],
            top_k=(0, 50)[row // 12 % 2],
            top_p=(1.0, 0.9, 0.5, 0.99)[row // 24 % 4],
        )
        states.append(SlotState(params, row % 5, [1] * (row + 1), []))
        tables.set(row, states[row], vocab)
    tables.flush()
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    drawn = torch.zeros(rows, 2, dtype=torch.int32, device="cuda")
    sample_rows(logits, index, index, index, tables, scratch, drawn, True)
    host = logits.float().cpu().numpy()
    want = [draw(host[row], states[row], row).token_id for row in range(rows)]
    got = drawn[:, 0].tolist()
    wrong = [row for row in range(rows) if want[row] != got[row]]
    print("sampler: rows", rows, "wrong", wrong, flush=True)
    report.put("sampler", {"rows": rows, "wrong": wrong})


def decode_batch(batch: int, position: int, width: int) -> Batch:
    tables = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
    return Batch(
        token_ids=np.full(batch, -1, np.int32),
        positions=np.full(batch, position, np.int32),
        row_starts=np.arange(batch + 1, dtype=np.int32),
        slots=np.arange(batch, dtype=np.int32),
        block_tables=tables,
        sampled_rows=np.arange(batch, dtype=np.int32),
    )


def time_model(
    report: Report, name: str, config: ModelConfig, batches: tuple[int, ...], prefill: bool, quantized: bool = False
) -> None:
    """Steps with and, but for int8 weights, without dependent launch; then prompts, then time by kind of op."""
    backend, program = random_model(config, max_rows=256, max_tokens=16384 if prefill else 512, quantized=quantized)
    width = 2048 // BLOCK + 1 if prefill else 11
    backend.allocate_kv(256 * 11 if not prefill else max(256 * 11, 8 * width), BLOCK, "bfloat16")
    assert backend._device.kv is not None
    backend._device.kv.normal_()
    for slot in range(256):
        backend.bind_slot(slot, greedy(slot), 0, [1], [])
    ops = len(program.ops)
    table: dict[str, Any] = {}
    for dependent in (True,) if quantized else (True, False):
        launch.set_pdl(dependent)
        assert backend._graphs is not None
        backend._graphs.forget()
        for batch in batches:
            walls = []
            for step in range(24):
                data = decode_batch(batch, 560 + step, 11)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                backend.run(0, ops, data)
                queued = time.perf_counter()
                backend.sample(data)
                walls.append((time.perf_counter() - begin, queued - begin))
            pipelined = time_pipelined(backend, ops, batch)
            captured = next(
                c for (size, _), c in backend._graphs._graphs.items() if size.rows >= batch and not size.programs
            )
            with torch.cuda.stream(backend._stream):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                times = []
                for _ in range(9):
                    start.record()
                    captured.graph.replay()
                    end.record()
                    end.synchronize()
                    times.append(start.elapsed_time(end))
            row = {
                "pipelined_ms": round(pipelined, 3),
                "wall_ms": round(statistics.median(w for w, _ in walls[4:]) * 1e3, 3),
                "queue_ms": round(statistics.median(q for _, q in walls[4:]) * 1e3, 3),
                "graph_ms": round(statistics.median(times), 3),
            }
            table[f"{batch}{'' if dependent else ' no dependent launch'}"] = row
            print(name, "decode", batch, "dependent" if dependent else "plain", row, flush=True)
    launch.set_pdl(True)
    report.put(f"decode/{name}", table)
    if prefill:
        time_prefill(report, name, config, backend, ops, width)
    profile(report, name, backend, program)
    backend.close()


def time_pipelined(backend: CudaBackend, ops: int, batch: int, steps: int = 24) -> float:
    """Milliseconds a step where step n + 1 is queued before the tokens of step n are fetched, as the engine may do."""
    waiting = None
    fetched = []
    for step in range(steps):
        data = decode_batch(batch, 560 + step, 11)
        backend.run(0, ops, data)
        if waiting is not None:
            backend.sample(waiting)
            fetched.append(time.perf_counter())
        waiting = data
    assert waiting is not None
    backend.sample(waiting)
    return statistics.median(b - a for a, b in itertools.pairwise(fetched[4:])) * 1e3


def time_prefill(report: Report, name: str, config: ModelConfig, backend: CudaBackend, ops: int, width: int) -> None:
    """Eight prompts of 2,048 tokens, in steps of 8,192 and of 16,384 tokens."""
    generator = np.random.default_rng(1)
    result: dict[str, Any] = {}
    for rows in (4, 8):
        batches = []
        for first in range(0, 8, rows):
            batches.append(
                Batch(
                    token_ids=generator.integers(0, config.vocab, rows * 2048).astype(np.int32),
                    positions=np.tile(np.arange(2048, dtype=np.int32), rows),
                    row_starts=np.arange(rows + 1, dtype=np.int32) * 2048,
                    slots=np.arange(first, first + rows, dtype=np.int32),
                    block_tables=np.arange(8 * width, dtype=np.int32).reshape(8, width)[first : first + rows],
                    sampled_rows=np.arange(rows, dtype=np.int32),
                )
            )
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for batch in batches:
                backend.run(0, ops, batch)
                backend.sample(batch)
            times.append(time.perf_counter() - begin)
        seconds = min(times[1:])
        result[f"steps of {rows * 2048}"] = {"ms": round(seconds * 1e3, 1), "tokens_per_s": round(8 * 2048 / seconds)}
    print(name, "prefill 8 x 2048", result, flush=True)
    report.put(f"prefill/{name}", result)
    batch = batches[-1]
    backend.run(0, ops, batch)
    backend.sample(batch)
    profile_step(report, f"{name}/prefill {len(batch.token_ids)}", backend)


def profile_step(report: Report, name: str, backend: CudaBackend) -> None:
    """Time of each kind of op over all layers of the step just run, each kind in a graph of its own."""
    program, step = backend._program, backend._step
    assert step is not None
    kinds: dict[str, list[Any]] = {}
    for op, do in zip(program.ops, backend._launches, strict=True):
        label = type(op).__name__
        if isinstance(op, Linear):
            label += f" {program.geometry.width(op.dst)}x{program.geometry.width(op.src)}"
        kinds.setdefault(label, []).append(do)

    def time_all(launches: list[Any]) -> float:
        return round(graph_time_us(lambda: [do(step) for do in launches]), 1)

    with torch.cuda.stream(backend._stream):
        result = {label: time_all(launches) for label, launches in kinds.items()}
    for label, mode in (("sampler", Mode()), ("sampler with limits", Mode(limits=True))):
        draw_rows = partial(backend._sampler.draw, backend._logits(step.sampled), mode=mode)
        result[label] = time_all([draw_rows])
    print("us by op kind,", name, result, flush=True)
    report.put(f"profile_us/{name}", result)


def profile(report: Report, name: str, backend: CudaBackend, program: Program) -> None:
    """Profiles of decode steps of 1, 64 and 256 rows."""
    for batch in (1, 64, 256):
        backend.run(0, len(program.ops), decode_batch(batch, 576, 11))
        profile_step(report, f"{name}/decode {batch}", backend)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("all", "check", "time"), default="all")
    parser.add_argument("--quantization", choices=("int8",), help="8B alone, with --part time")
    arguments = parser.parse_args()
    if arguments.quantization and arguments.part != "time":
        parser.error("--quantization goes with --part time")
    random.seed(0)
    torch.manual_seed(0)
    name = "_".join(filter(None, ("model", arguments.part, arguments.quantization)))
    report = Report(arguments.out / f"{name}.json")
    report.put("copy_bytes_per_s", copy_rate())
    if arguments.quantization:
        time_model(report, "8b int8", LLAMA_8B, (1, 8, 32), prefill=True, quantized=True)
        return
    if arguments.part in ("all", "check"):
        check_sampler(report)
        from dataclasses import replace

        check(report, "SmolLM2 shape", SMOLLM2)
        torch.cuda.empty_cache()
        check(report, "8B shape, 4 layers", replace(LLAMA_8B, num_layers=4))
        torch.cuda.empty_cache()
        probe = CudaBackend(max_rows=4, max_tokens=64).numerics()
        print(probe, flush=True)
        report.put("numerics", probe)
    if arguments.part in ("all", "time"):
        time_model(report, "smollm2", SMOLLM2, (1, 8, 64), prefill=False)
        torch.cuda.empty_cache()
        time_model(report, "8b", LLAMA_8B, (1, 8, 32, 64, 128, 256), prefill=True)


if __name__ == "__main__":
    main()
