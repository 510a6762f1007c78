"""How fast the CPU kernels are, beside what the machine can do in the same run.

    python -m benchmarks.cpu_kernels [--isa avx2] [--encodings Q4_1,F32] [--threads 1,2] [--rows 1,4,16,64,256] [--json FILE]

Shapes are SmolLM2-135M's. Every figure is the least of many runs (the machine may be shared); peak is a chain-free fma loop
written with the same vectors, bandwidth a sum over 256 MB.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import provenance
from relay.kernels import packing
from relay.kernels.backend import Batch
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import (
    Attend,
    Buffer,
    Embed,
    Geometry,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeWriteKv,
    SelectRows,
    SiluMul,
)
from relay.kernels.weights import Encoding, PackedMatrix

LAYERS = 30
GEOMETRY = Geometry(
    num_layers=LAYERS,
    hidden=576,
    intermediate=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab=49152,
    max_positions=8192,
)
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}


def random_matrix(n: int, k: int, encoding: Encoding, rng: np.random.Generator) -> PackedMatrix:
    values = (rng.standard_normal((n, k), dtype=np.float32)) * np.float32(0.05)
    match encoding:
        case Encoding.F32:
            return packing.pack_matrix(packing.from_f32(values))
        case Encoding.BF16:
            return packing.pack_matrix(packing.from_bf16((values.view(np.uint32) >> 16).astype(np.uint16)))
        case Encoding.F16:
            return packing.pack_matrix(packing.from_f16(values.astype(np.float16)))
    halves, block_bytes = (1, 34) if encoding is Encoding.Q8_0 else (2, 20)
    blocks = rng.integers(0, 256, (n, k // 32, block_bytes), dtype=np.uint8)
    scales = (rng.standard_normal((n, k // 32, halves)) * 0.002).astype(np.float16)
    blocks[:, :, : 2 * halves] = scales.view(np.uint8)
    return packing.pack_matrix(packing.from_gguf(encoding.name, blocks, n, k))


class RandomWeights:
    """Weights of every layer apart, so that a step reads as much memory as the real model's."""

    def __init__(self, encoding: Encoding) -> None:
        rng = np.random.default_rng(0)
        self.encoding = encoding
        one = {name: random_matrix(n, k, encoding, rng) for name, (n, k) in SHAPES.items() if name != "head"}
        self.matrices = {
            f"{layer}.{name}": PackedMatrix(matrix.n, matrix.k, matrix.encoding, copied(matrix.data))
            for layer in range(LAYERS)
            for name, matrix in one.items()
        }
        head = Encoding.Q8_0 if encoding is Encoding.Q4_1 else encoding
        self.matrices["head"] = random_matrix(*SHAPES["head"], head, rng)
        angles = np.arange(GEOMETRY.max_positions, dtype=np.float32)[:, None] * np.float32(0.01)
        angles = angles * np.arange(1, 33, dtype=np.float32)
        self.vectors = {"rope.cos": np.cos(angles), "rope.sin": np.sin(angles), "norm": np.ones(576, np.float32)}

    def matrix(self, name: str) -> PackedMatrix:
        return self.matrices[name]

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name]


def copied(data: np.ndarray) -> np.ndarray:
    target = packing.aligned_empty(data.size)
    target[:] = data
    return target


def ops() -> tuple[Op, ...]:
    listed: list[Op] = [Embed("head")]
    for layer in range(LAYERS):
        listed += [
            RmsNorm(Buffer.X, Buffer.H, "norm", 1e-5),
            Linear(Buffer.H, Buffer.QKV, f"{layer}.qkv"),
            RopeWriteKv(layer),
            Attend(layer, 0.125),
            Linear(Buffer.A, Buffer.X, f"{layer}.o", accumulate=True),
            RmsNorm(Buffer.X, Buffer.H, "norm", 1e-5),
            Linear(Buffer.H, Buffer.G, f"{layer}.gate_up"),
            SiluMul(),
            Linear(Buffer.U, Buffer.X, f"{layer}.down", accumulate=True),
        ]
    return (*listed, SelectRows(), RmsNorm(Buffer.S, Buffer.S, "norm", 1e-5), Linear(Buffer.S, Buffer.L, "head"))


def programs() -> dict[str, Program]:
    """The whole model, and each kind of op on its own (of all layers)."""
    every = ops()
    body = every[1:-3]
    kinds: dict[str, tuple[Op, ...]] = {
        "whole step": every,
        "linears": tuple(op for op in every if isinstance(op, Linear)),
        "qkv": tuple(op for op in body if isinstance(op, Linear) and op.weight.endswith("qkv")),
        "o": tuple(op for op in body if isinstance(op, Linear) and op.weight.endswith(".o")),
        "gate_up": tuple(op for op in body if isinstance(op, Linear) and op.weight.endswith("gate_up")),
        "down": tuple(op for op in body if isinstance(op, Linear) and op.weight.endswith("down")),
        "head": (every[-1],),
        "attention": tuple(op for op in body if isinstance(op, Attend)),
        "rope + kv": tuple(op for op in body if isinstance(op, RopeWriteKv)),
        "norms": tuple(op for op in body if isinstance(op, RmsNorm)),
        "silu": tuple(op for op in body if isinstance(op, SiluMul)),
    }
    return {name: Program(chosen, GEOMETRY) for name, chosen in kinds.items()}


def make_batch(sequences: int, tokens_each: int, context: int) -> Batch:
    """``sequences`` rows that end at position ``context``; every row samples."""
    tokens = sequences * tokens_each
    blocks = -(-context // 64)
    return Batch(
        token_ids=(np.arange(tokens, dtype=np.int32) * 7919) % GEOMETRY.vocab,
        positions=np.tile(np.arange(context - tokens_each, context, dtype=np.int32), sequences),
        row_starts=np.arange(0, tokens + 1, tokens_each, dtype=np.int32),
        slots=np.arange(sequences, dtype=np.int32),
        block_tables=np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
        sampled_rows=np.arange(sequences, dtype=np.int32),
    )


class Timer:
    """Least time of many calls: wall clock, or processor time over ``threads`` where the machine is busy with other work."""

    def __init__(self, budget_s: float, cpu_time: bool, threads: int) -> None:
        self.budget_s, self.cpu_time, self.threads = budget_s, cpu_time, threads

    def now(self) -> float:
        return time.process_time() / self.threads if self.cpu_time else time.perf_counter()

    def least(self, call: Callable[[], object]) -> float:
        call()
        best, end = float("inf"), time.perf_counter() + self.budget_s
        while True:
            start = self.now()
            call()
            best = min(best, self.now() - start)
            if time.perf_counter() > end:
                return best


def cost(program: Program, batch: Batch, weights: RandomWeights) -> tuple[float, float]:
    """(GFLOP of the linears and attention, GB of weights and cache read) of one run."""
    tokens, sampled = len(batch.token_ids), len(batch.sampled_rows)
    flop = read = 0.0
    for op in program.ops:
        if isinstance(op, Linear):
            matrix = weights.matrix(op.weight)
            flop += 2.0 * matrix.n * matrix.k * (sampled if op.dst is Buffer.L else tokens)
            read += matrix.data.size
        elif isinstance(op, Attend):
            flop += 4.0 * float((batch.positions + 1).sum()) * GEOMETRY.num_heads * GEOMETRY.head_dim
            read += float((batch.positions[batch.row_starts[1:] - 1] + 1).sum()) * GEOMETRY.kv_width * 8
    return flop / 1e9, read / 1e9


class Run:
    """All figures of one backend and one encoding; every one is printed and kept."""

    def __init__(self, encoding: str, weights: RandomWeights, threads: int, options: argparse.Namespace) -> None:
        self.encoding, self.weights, self.threads, self.options = encoding, weights, threads, options
        self.backend = CpuBackend(threads, options.isa, max_tokens=512, max_sampled=256)
        self.timer = Timer(options.budget, options.cpu_time, threads)
        self.results: list[dict[str, object]] = []
        fma_seconds = self.timer.least(lambda: self.backend.run_fma(8 * threads))
        self.peak = self.backend.run_fma(8 * threads) / fma_seconds / 1e9
        region = np.ones(64 << 20, np.float32)
        self.bandwidth = region.nbytes / self.timer.least(lambda: self.backend.run_read(region)) / 1e9
        print(
            f"\n{encoding}, {threads} threads, {self.backend.isa}: "
            f"peak {self.peak:.0f} GFLOP/s, memory {self.bandwidth:.1f} GB/s"
        )

    def load(self, program: Program) -> None:
        self.backend.load(program, self.weights)
        self.backend.allocate_kv(256 * 9, 64, "float32")

    def keep(self, op: str, rows: int, kind: str, seconds: float, **figures: float) -> None:
        self.results.append(
            {
                "encoding": self.encoding,
                "threads": self.threads,
                "isa": self.backend.isa,
                "op": op,
                "rows": rows,
                "kind": kind,
            }
            | {"ms": seconds * 1e3, **figures, "peak_gflops": self.peak, "memory_gbs": self.bandwidth}
        )

    def op(self, name: str, program: Program) -> None:
        self.load(program)
        for rows in map(int, self.options.rows.split(",")):
            decode = rows <= 64
            batch = make_batch(rows if decode else 1, 1 if decode else rows, max(self.options.context, rows))
            seconds = self.timer.least(lambda batch=batch: self.backend.run(0, len(program.ops), batch))
            gflop, gbyte = cost(program, batch, self.weights)
            self.keep(
                name, rows, "decode" if decode else "prefill", seconds, gflops=gflop / seconds, gbs=gbyte / seconds
            )
            print(
                f"{name:<12}{rows:>6}{seconds * 1e3:>10.3f}{gflop / seconds:>10.1f}{gflop / seconds / self.peak:>9.0%}"
                f"{gbyte / seconds:>8.1f}{gbyte / seconds / self.bandwidth:>8.0%}"
            )

    def prompts(self, program: Program) -> None:
        """Whole prompts in chunks of 512 tokens."""
        self.load(program)
        for length in map(int, self.options.prompts.split(",")):
            chunks = [make_batch(1, min(512, length - at), min(at + 512, length)) for at in range(0, length, 512)]
            seconds = self.timer.least(
                lambda chunks=chunks: [self.backend.run(0, len(program.ops), batch) for batch in chunks]
            )
            self.keep("prompt", length, "prefill", seconds, tokens_per_s=length / seconds)
            print(f"prompt of {length}: {seconds * 1e3:.0f} ms, {length / seconds:.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa")
    parser.add_argument("--encodings", default="Q4_1,F32")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,4,16,64,256", help="up to 64: decode rows; more: one prefill chunk")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", default="512,2048", help="prompt lengths prefilled in chunks of 512")
    parser.add_argument("--ops", default="", help="comma-separated subset of the ops")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each figure")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time / threads instead of wall time (a busy machine)"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    wanted = set(filter(None, options.ops.split(",")))
    for encoding in options.encodings.split(","):
        weights = RandomWeights(Encoding[encoding])
        for threads in map(int, options.threads.split(",")):
            run = Run(encoding, weights, threads, options)
            print(f"{'op':<12}{'rows':>6}{'ms':>10}{'GFLOP/s':>10}{'of peak':>9}{'GB/s':>8}{'of mem':>8}")
            for name, program in programs().items():
                if not wanted or name in wanted:
                    run.op(name, program)
            if not wanted or "prompt" in wanted:
                run.prompts(programs()["whole step"])
            run.backend.close()
            results += run.results
    if options.json:
        record = {"benchmark": "cpu_kernels", **provenance(), "cpu_time": options.cpu_time, "results": results}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
