"""Two GPUs in one call: 1P + 1D against two colocated replicas against two ranks; KV between devices; killed workers.

``python -m benchmarks.multi_gpu --out FILE`` on two GPUs: an 8B shape with random weights, at most ``--limit`` seconds.
``--cpu --tiny`` runs every part on CPUs with a model of a few kilobytes: a test of this script, its figures mean nothing.
Each part stands alone: what fails is recorded with its reason, what finds no time left is skipped and says so, and FILE is
rewritten after each.
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_pack import write
from benchmarks.gpu_serve import Server, killed, serving, transfers
from benchmarks.gpu_shapes import LLAMA_8B, SMOLLM2
from benchmarks.multi_gpu_load import Load, drive
from benchmarks.multi_gpu_transfer import Pair, copy_rate
from relay.config import TransportName
from relay.models.checked import remember
from relay.models.config import ModelConfig, RopeConfig
from relay.worker.spec import WorkerSpec

TINY = ModelConfig(
    architecture="llama", vocab=512, hidden=64, intermediate=128, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_eps=1e-5, max_positions=4096, rope=RopeConfig(theta=10000.0), tied_embeddings=False,
)  # fmt: skip
NO_VLLM = "not run: vLLM is not on this machine and nothing can be fetched there; --vllm PORT MODEL drives one that is"


@dataclass(frozen=True, slots=True)
class Setup:
    """What differs between the real run and the test of the script."""

    backend: str
    devices: tuple[str, str]
    load: Load
    budgets: tuple[int, ...]
    factors: tuple[float, ...]
    sweep_s: float
    transfers: tuple[tuple[int, int], ...]  # (tokens, trials)
    transports: tuple[TransportName, ...]  # the first is what the split is served with
    kill_streams: int
    kill_prompt: int
    kill_new: int
    flags: tuple[str, ...]
    block_size: int
    chunk: int
    start_s: float  # what a start may take

    def shape(self, name: str) -> tuple[str, ...]:
        """Flags of a shape; every one uses both devices."""
        first, second = self.devices
        chosen = {
            "split": ("--prefill", "1", "--decode", "1", "--transport", self.transports[0]),
            "split-other": ("--prefill", "1", "--decode", "1", "--transport", self.transports[1]),
            "colocated": ("--prefill", "0", "--decode", "2"),
            "ranks": ("--prefill", "0", "--decode", "1", "--tensor-parallel-size", "2"),
        }[name]
        if self.backend != "cuda":
            return chosen
        placed = {
            "split": ("--prefill-devices", first, "--decode-devices", second),
            "split-other": ("--prefill-devices", first, "--decode-devices", second),
            "colocated": ("--decode-devices", f"{first},{second}"),
            "ranks": ("--decode-devices", f"{first},{second}"),
        }[name]
        return (*chosen, *placed)


GPUS = Setup(
    backend="cuda",
    devices=("cuda:0", "cuda:1"),
    load=Load(),
    budgets=(512, 1024, 2048, 8192),
    factors=(1.0, 2.0),
    sweep_s=9.0,
    transfers=((2048, 9), (8192, 7), (16384, 3), (32768, 3)),
    transports=("ipc", "shm"),
    kill_streams=64,
    kill_prompt=512,
    kill_new=400,
    flags=("--max-model-len", "8192"),
    block_size=64,
    chunk=8192,
    start_s=90.0,
)
CPUS = Setup(
    backend="cpu",
    devices=("cpu", "cpu"),
    load=Load(4, 48, 24, 2, 600, 8, 3.0, 500, slo_ttft_ms=2000, slo_itl_ms=200, drain_s=30),
    budgets=(64, 256),
    factors=(1.0,),
    sweep_s=2.0,
    transfers=((512, 3), (2048, 2)),
    transports=("shm", "tcp"),
    kill_streams=8,
    kill_prompt=64,
    kill_new=600,
    flags=("--threads", "1", "--kv-cache-memory", "64M"),
    block_size=16,
    chunk=256,
    start_s=60.0,
)


class Run:
    """Parts under one limit of time, with what they found in one file."""

    def __init__(self, out: Path, limit_s: float) -> None:
        self._out = out
        self._end = time.monotonic() + limit_s
        self.found: dict[str, Any] = {"parts": {}, "problems": {}, "vllm": {"note": NO_VLLM}}

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def part(self, name: str, needs_s: float, measure: Callable[[], Any]) -> Any:
        """What ``measure`` returns; None, recorded, where it failed or there was no time for it."""
        if self.left_s() < needs_s:
            self.found["problems"][name] = f"skipped: {self.left_s():.0f} s were left, it may take {needs_s:.0f}"
            self.save()
            return None
        began = time.monotonic()
        value = None
        try:
            value = self.found["parts"][name] = measure()
        except Exception as error:  # recorded, and the next part runs
            self.found["problems"][name] = "".join(traceback.format_exception_only(error)).strip()[-3000:]
            print(name, "FAILED", self.found["problems"][name], flush=True)
        self.found.setdefault("part_seconds", {})[name] = round(time.monotonic() - began, 1)
        self.save()
        return value

    def save(self) -> None:
        document = without_nan({**report.provenance(), **self.found})
        self._out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """``value`` with None for percentiles of nothing, which JSON has no number for."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Bench:
    """The parts."""

    def __init__(self, setup: Setup, pack: Path, cache: Path, run: Run) -> None:
        self._setup, self._pack, self._cache, self._run = setup, pack, cache, run

    def serve(self, shape: str, *more: str) -> Any:
        setup = self._setup
        flags = (*setup.shape(shape), *setup.flags, *more)
        ready = min(setup.start_s, max(5.0, self._run.left_s() - 5))
        return serving(str(self._pack), *flags, backend=setup.backend, ready_within_s=ready)

    def loads(self, shape: str, *more: str, factors: tuple[float, ...], seconds: float | None = None) -> dict[str, Any]:
        """``shape`` under each factor of the load, after a short warm-up that is not counted."""
        setup = self._setup
        with self.serve(shape, *more) as server:
            found: dict[str, Any] = {"flags": [*setup.shape(shape), *more], "ready_s": round(server.ready_s, 2)}
            asyncio.run(drive(server, setup.load.times(0.5, 2.0)))
            for factor in factors:
                found[f"load x {factor:g}"] = row = asyncio.run(drive(server, setup.load.times(factor, seconds)))
                _show(f"{shape} {' '.join(more)} x {factor:g}", row)
            if shape.startswith("split"):
                found["transfers"] = transfers(server)
            return found

    def colocated(self) -> dict[str, Any]:
        """Every token budget for a while; the best by goodput, then by gaps, gets the whole measurement."""
        setup = self._setup
        sweep: dict[int, dict[str, Any]] = {}
        for budget in setup.budgets:
            flags = ("--max-num-batched-tokens", str(budget), "--max-num-seqs", str(min(256, budget)))
            rows = self.loads("colocated", *flags, factors=setup.factors[:1], seconds=setup.sweep_s)
            sweep[budget] = rows[f"load x {setup.factors[0]:g}"]
        best = max(sweep, key=lambda budget: (sweep[budget]["goodput_per_s"], -sweep[budget]["itl_ms"]["p99"]))
        flags = ("--max-num-batched-tokens", str(best), "--max-num-seqs", str(min(256, best)))
        whole = self.loads("colocated", *flags, factors=setup.factors)
        return {"sweep": sweep, "best_budget": best, **whole}

    def kv(self, transport: TransportName) -> dict[str, Any]:
        """KV from the first device to the second, and the plain copy rate between them at the same sizes."""
        setup = self._setup
        specs = [self._spec(name, device, transport) for name, device in zip("pd", setup.devices, strict=True)]
        pair = Pair(*specs)
        found: dict[str, Any] = {}
        try:
            for tokens, trials in setup.transfers:
                if self._run.left_s() < 20:
                    found[str(tokens)] = "skipped: no time was left"
                    continue
                row = pair.measure(tokens, trials)
                rate = copy_rate(*setup.devices, size=int(row["megabytes"] * 1e6))
                row["copy"] = rate
                row["after_share_of_copy_rate"] = round(row["after_gb_per_s"] / rate["gb_per_s"], 4)
                found[str(tokens)] = row
                print(f"kv {transport}", {name: value for name, value in row.items() if name != "all_ms"}, flush=True)
        finally:
            pair.close()
        return found

    def kill(self, shape: str, victim: str) -> dict[str, Any]:
        setup = self._setup
        with self.serve(shape) as server:
            return asyncio.run(
                killed(server, victim, setup.kill_streams, setup.kill_prompt, setup.kill_new, setup.load.vocab)
            )

    def exact_ranks(self) -> dict[str, Any]:
        """``relay verify`` with two ranks, on a model of SmolLM2's shape (the tiny one on CPUs)."""
        setup = self._setup
        pack = self._pack.with_name("verify.pack")
        write(pack, TINY if setup.backend == "cpu" else SMOLLM2)
        remember(pack, self._cache)
        command = [sys.executable, "-m", "relay.cli.main", "verify", str(pack), "--offline", "--json"]
        command += ["--cache-dir", str(self._cache), "--backend", setup.backend, "--tensor-parallel-size", "2"]
        command += ["--path", "batched", "--path", "chunks of 50", "--path", "prefix cache"]
        if setup.backend == "cuda":
            command += ["--device", ",".join(setup.devices)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self._run.left_s())
        if not done.stdout.strip():
            raise RuntimeError(f"relay verify ended with {done.returncode}: {done.stderr[-1500:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        print(f"verify with two ranks: {found['identical']} of {found['compared']} identical", flush=True)
        return found

    def external(self, port: int, model: str) -> dict[str, Any]:
        """The same load on another server that listens on ``port`` of this machine."""
        server = _External(f"http://127.0.0.1:{port}", model)
        loads = self._setup.load
        return {f"load x {f:g}": asyncio.run(drive(server, loads.times(f))) for f in self._setup.factors}

    def _spec(self, name: str, device: str, transport: TransportName) -> WorkerSpec:
        setup = self._setup
        longest = max(tokens for tokens, _ in setup.transfers) + setup.block_size
        config = TINY if setup.backend == "cpu" else LONG_8B
        value = 4 if setup.backend == "cpu" else 2
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * value
        return WorkerSpec(
            worker=f"bench-{name}",
            incarnation=1,
            gateways=[],
            pack_path=str(self._pack),
            backend=setup.backend,  # type: ignore[arg-type]
            device=device if setup.backend == "cuda" else "cuda:0",
            threads=1,
            kv_cache_memory_bytes=token * (longest + 2 * setup.block_size),
            kv_cache_dtype="float32" if setup.backend == "cpu" else "bfloat16",
            block_size=setup.block_size,
            transport=transport,
            max_num_seqs=4,
            max_num_batched_tokens=setup.chunk,
            max_model_len=longest,
        )


class _External(Server):
    """A server of somebody else's, with the model's name in every body."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self._model = url, model
        self.port = int(url.rsplit(":", 1)[1])

    async def ask(self, body: dict[str, Any]) -> Any:
        return await super().ask({"model": self._model, **body})


LONG_8B = replace(LLAMA_8B, max_positions=40960)


def _show(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name}: ITL p50 {row['itl_ms']['p50']} p99 {row['itl_ms']['p99']} ms, TTFT p50 {row['ttft_ms']['p50']} "
        f"p99 {row['ttft_ms']['p99']} ms, goodput {row['goodput_per_s']}/s, {row['output_tokens_per_s']} tok/s",
        row["errors"],
        flush=True,
    )


def compared(parts: dict[str, Any], factors: tuple[float, ...]) -> dict[str, Any]:
    """Split against colocated at its best budget and against ranks, at each load: ratios over 1 favour the split."""
    found: dict[str, Any] = {}
    for factor in factors:
        key = f"load x {factor:g}"
        split = (parts.get("split") or {}).get(key)
        for other in ("colocated", "ranks"):
            row = (parts.get(other) or {}).get(key)
            if not split or not row:
                continue
            found[f"split over {other}, {key}"] = {
                "itl_p99": round(row["itl_ms"]["p99"] / split["itl_ms"]["p99"], 3),
                "goodput": round(split["goodput_per_s"] / max(row["goodput_per_s"], 1e-9), 3),
                "ttft_p50": round(row["ttft_ms"]["p50"] / split["ttft_ms"]["p50"], 3),
                "output_tokens_per_s": round(split["output_tokens_per_s"] / row["output_tokens_per_s"], 3),
                "same_tokens": split["digest"] == row["digest"] != "",
            }
    return found


def topology() -> Any:
    """What NVML says of this machine."""
    import os

    from relay.cluster.nvml import detect
    from relay.cluster.topology import describe

    return describe(detect(os.environ))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=550.0, help="seconds for everything")
    parser.add_argument(
        "--parts", default="kv,split,colocated,kill,exact-ranks,ranks,kill-replica,kv-other,split-other"
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--pack", type=Path, help="where the weights are or will be [default: /dev/shm, or a temporary folder]"
    )
    parser.add_argument("--cache-dir", type=Path, help="model cache [default: a folder beside the pack]")
    parser.add_argument("--vllm", nargs=2, metavar=("PORT", "MODEL"), help="drive a vLLM that listens here, too")
    arguments = parser.parse_args()
    if arguments.cpu != arguments.tiny:
        parser.error("--cpu and --tiny go together: the 8B shape is for GPUs, the tiny one proves only the script")
    setup = CPUS if arguments.cpu else GPUS
    run = Run(arguments.out, arguments.limit)
    with tempfile.TemporaryDirectory(prefix="relay-multi-gpu-") as scratch:
        pack = arguments.pack or Path(scratch if arguments.cpu else "/dev/shm") / "bench.pack"
        cache = arguments.cache_dir or Path(scratch) / "cache"
        setup = replace(setup, flags=(*setup.flags, "--cache-dir", str(cache)))
        bench = Bench(setup, pack, cache, run)
        run.part("topology", 0, topology)

        def prepare() -> dict[str, float]:
            if not pack.exists():
                write(pack, TINY if arguments.cpu else LONG_8B)
            remember(pack, cache)
            return {"pack_bytes": pack.stat().st_size}

        if run.part("prepare", 0, prepare) is None:
            raise SystemExit("no weights: nothing can be measured")
        measures: dict[str, tuple[float, Callable[[], Any]]] = {
            "kv": (60, lambda: bench.kv(setup.transports[0])),
            "kv-other": (60, lambda: bench.kv(setup.transports[1])),
            "split": (60, lambda: bench.loads("split", factors=setup.factors)),
            "split-other": (45, lambda: bench.loads("split-other", factors=setup.factors[:1])),
            "colocated": (120, bench.colocated),
            "kill": (45, lambda: bench.kill("split", "decode-0")),
            "kill-replica": (45, lambda: bench.kill("colocated", "worker-0")),
            "exact-ranks": (60, bench.exact_ranks),
            "ranks": (50, lambda: bench.loads("ranks", factors=setup.factors)),
        }
        for name in arguments.parts.split(","):
            needs_s, measure = measures[name]
            run.part(name, needs_s if not arguments.cpu else 0, measure)
        if arguments.vllm:
            port, model = arguments.vllm
            found = run.part("vllm", 60, lambda: bench.external(int(port), model))
            if found is not None:
                run.found["vllm"] = found
        run.found["compared"] = compared(run.found["parts"], setup.factors)
        run.save()
        print(json.dumps({"compared": run.found["compared"], "problems": run.found["problems"]}, indent=1))


if __name__ == "__main__":
    main()
