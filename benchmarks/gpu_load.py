"""Weights onto a GPU, out of a pack and straight out of safetensors: ``python -m benchmarks.gpu_load --out FILE [--limit 115]``.

Bits of both ways compared on the device (a small model); then the 8B shape in --work (a folder in memory): seconds and GB/s of the
index, of the loads, and seconds from the start of ``relay serve`` to ready, colocated. What would not end within --limit seconds
is left out and named.
"""

import argparse
import asyncio
import json
import shutil
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gpu_pack, report
from benchmarks.export_hf import config_fields
from benchmarks.gpu_server import Server, serving
from benchmarks.gpu_shapes import LLAMA_8B
from relay.models.config import ModelConfig
from relay.models.layout import MatrixItem, weight_items
from relay.models.safetensors_source import INDEX, file_name

SHARDS = 8
WORK = Path("/dev/shm/relay-gpu-load")
COLOCATED = ("--prefill", "0", "--decode", "1")
Result = dict[str, Any]


def write_folder(folder: Path, config: ModelConfig, tokenizer: str) -> int:
    """A Hugging Face folder of random bf16 weights, shards side by side; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_fields(config)))
    if tokenizer:
        (folder / "tokenizer.json").write_text(tokenizer)
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32)
    bits = {scale: _bf16(noise * np.float32(scale)) for scale in {_scale(config, name) for name, _ in _tensors(config)}}
    tensors = list(_tensors(config))
    shards = [tensors[len(tensors) * i // SHARDS : len(tensors) * (i + 1) // SHARDS] for i in range(SHARDS)]

    def write(index: int) -> int:
        header: dict[str, Any] = {}
        at = 0
        for name, shape in shards[index]:
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        chance = np.random.default_rng(index)
        with (folder / _shard(index)).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, shape in shards[index]:
                source, left = bits[_scale(config, name)], int(np.prod(shape))
                first = int(chance.integers(0, len(source) // 2))
                while left:
                    chunk = source[first : first + left]
                    file.write(chunk.data)
                    left, first = left - len(chunk), 0
        return at

    weight_map = {name: _shard(index) for index, shard in enumerate(shards) for name, _ in shard}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with ThreadPoolExecutor(SHARDS) as pool:
        return sum(pool.map(write, range(SHARDS)))


def _shard(index: int) -> str:
    return f"model-{index + 1:05}-of-{SHARDS:05}.safetensors"


def _tensors(config: ModelConfig) -> Iterator[tuple[str, list[int]]]:
    for item in weight_items(config):
        for part, size in zip(item.parts, item.rows if isinstance(item, MatrixItem) else item.sizes, strict=True):
            yield file_name(part), [size, item.k] if isinstance(item, MatrixItem) else [size]


def _scale(config: ModelConfig, name: str) -> float:
    if "norm" in name or "embed" in name:
        return 1.0
    return float((config.intermediate if "down" in name else config.hidden) ** -0.5)


def _bf16(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return found


def check_bits(work: Path, device: str = "cuda:0") -> Result:
    """Two layers of half the 8B shape, packed and direct, as bf16 and fp16: tensors on the device that differ."""
    import torch

    from relay.kernels.cuda.loading import shapes_of
    from relay.models.direct_packer import write_direct_pack
    from relay.models.llama import build_program
    from relay.models.pack import Pack
    from relay.models.packer import write_pack
    from relay.models.safetensors_source import SafetensorsSource

    config = replace(
        LLAMA_8B, num_layers=2, hidden=2048, intermediate=7168, num_heads=16, vocab=1000, max_positions=512
    )
    write_folder(work / "bits", config, "")
    source = SafetensorsSource(work / "bits")
    write_pack(source, work / "bits.pack")
    write_direct_pack(source, work / "bits.direct.pack")
    program = build_program(config)
    wrong, compared = [], 0
    for dtype in ("bfloat16", "float16"):
        full, direct = (load(Pack(work / name), device, dtype)[0] for name in ("bits.pack", "bits.direct.pack"))
        assert full.keys() == shapes_of(program)[0].keys() == direct.keys()
        for name, tensor in full.items():
            compared += 1
            if not torch.equal(tensor.view(torch.int16), direct[name].view(torch.int16)):
                wrong.append(f"{dtype} {name}")
    shutil.rmtree(work / "bits")
    (work / "bits.pack").unlink()
    return {"compared": compared, "wrong": wrong}


def load(pack: Any, device: str = "cuda:0", dtype: str = "bfloat16") -> tuple[dict[str, Any], Result]:
    """The matrices of ``pack`` on the device, and what that took."""
    import torch

    from relay.kernels.cuda.loading import load_matrices
    from relay.kernels.cuda.weights import TYPES, WeightUpload
    from relay.models.llama import build_program

    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    found = load_matrices(build_program(pack.config), pack, WeightUpload(device, dtype=TYPES[dtype])).matrices
    if device != "cpu":
        torch.cuda.synchronize()
    return found, rate(sum(rows.num_bytes for rows in pack.matrices()), time.perf_counter() - begin)


def rate(num_bytes: int, seconds: float) -> Result:
    return {"seconds": round(seconds, 2), "gb_per_s": round(num_bytes / seconds / 1e9, 2)}


class Run:
    """Steps in order, each only where the time that is left may do for it."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.perf_counter() + limit_s
        self.found: Result = {}
        self.failed: Result = {}

    def step(self, name: str, needs_s: float, measure: Any) -> None:
        left = self._end_s - time.perf_counter()
        begin = time.perf_counter()
        try:
            self.found[name] = measure() if left > needs_s else f"left out: {left:.0f} s left"
        except Exception:  # of one step: the others go on
            self.found[name] = self.failed[name] = traceback.format_exc()
        print(name, self.found[name], f"[{time.perf_counter() - begin:.1f} s]", flush=True)


def started(model: str, cache: Path) -> Result:
    """Seconds from the start to ready, what the engine says of them, and the first tokens of one request."""

    def said(server: Server) -> list[str]:
        lines = server.log.read_text().splitlines()
        return [line[-160:] for line in lines if "ready in" in line or "GB/s" in line or "(model " in line]

    with serving(model, *COLOCATED, "--cache-dir", str(cache)) as server:
        asked = {"prompt": list(range(300, 332)), "max_tokens": 8, "temperature": 0}
        stream = asyncio.run(server.ask(asked)).read()
        return {
            "ready_s": round(server.ready_s, 2),
            "said": said(server),
            "tokens": stream.tokens,
            "error": stream.error,
        }


def measure(work: Path, limit_s: float) -> Result:
    """All steps; ``ok`` in the result says whether none failed."""
    from relay.models.checked import remember
    from relay.models.direct_packer import write_direct_pack
    from relay.models.pack import Pack
    from relay.models.safetensors_source import SafetensorsSource

    run, cache = Run(limit_s), work / "cache"
    folder, pack, direct = work / "llama-8b", work / "llama-8b.pack", work / "llama-8b.direct.pack"

    def timed(what: Any) -> Result:
        begin = time.perf_counter()
        return rate(what() or pack.stat().st_size, time.perf_counter() - begin)

    def index() -> int:
        write_direct_pack(SafetensorsSource(folder), direct)
        return sum(rows.num_bytes for rows in Pack(direct).matrices())

    def loaded(path: Path) -> Result:
        import torch

        row = load(Pack(path))[1]
        torch.cuda.empty_cache()
        return row

    def pack_written() -> None:
        shutil.rmtree(folder)  # one of them at a time: memory may be short
        gpu_pack.write(pack, LLAMA_8B)
        remember(pack, cache)

    tokenizer = gpu_pack.tokenizer_json(LLAMA_8B.vocab)
    run.step("bits", 0, lambda: check_bits(work))
    run.step("folder written", 0, lambda: timed(lambda: write_folder(folder, LLAMA_8B, tokenizer)))
    run.step("index", 0, lambda: timed(index))
    for name in ("load direct", "load direct again"):
        run.step(name, 5, lambda: loaded(direct))
    run.step("serve direct, first start (index, Triton's cache as it was)", 20, lambda: started(str(folder), cache))
    run.step("serve direct", 15, lambda: started(str(folder), cache))
    run.step("pack written", 30, lambda: timed(pack_written))
    if pack.exists():
        run.step("serve pack", 15, lambda: started(str(pack), cache))
        for name in ("load pack", "load pack again"):
            run.step(name, 6, lambda: loaded(pack))
    starts = [row for row in run.found.values() if isinstance(row, dict) and "ready_s" in row]
    direct_tokens = {tuple(row["tokens"]) for name, row in run.found.items() if row in starts and "direct" in name}
    sound = all(not row["error"] and len(row["tokens"]) == 8 for row in starts) and len(direct_tokens) == 1
    return {"ok": sound and not run.failed and not run.found["bits"]["wrong"], **run.found}


def load_direct(folder: Path, limit_s: float = 115.0, work: Path = WORK) -> Result:
    """As a part of ``gpu_parts``; ``folder`` gets nothing: all of it is in the result."""
    with suppress(FileNotFoundError):
        shutil.rmtree(work)
    work.mkdir(parents=True)
    try:
        return measure(work, limit_s)
    finally:
        shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=115.0)
    parser.add_argument("--work", type=Path, default=WORK, help="made and removed")
    arguments = parser.parse_args()
    result = load_direct(arguments.out.parent, arguments.limit, arguments.work)
    arguments.out.write_text(json.dumps({**report.provenance(), **result}, indent=1, default=str) + "\n")
    raise SystemExit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
