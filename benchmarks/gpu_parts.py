"""What was written without a GPU, checked and measured on one: ``python -m benchmarks.gpu_parts --out DIR [--seconds 480]``.

Each part runs in a process of its own under its own time limit, so that a CUDA error of one leaves the others alone; what it
measured, or its traceback, stands in DIR/parts.json, which is written after every part. Exit status 1 if any part failed.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.gpu_load import load_direct

Result = dict[str, Any]


def kv_bits(folder: Path) -> Result:
    """The frame kernel against plain indexing and numpy's digest, at the shapes of both models."""
    import torch

    from relay.kernels.cuda.kv_move import Plan, move
    from relay.kernels.kv_frames import KvRange, payload_sum

    wrong, frames = [], 0
    chance = np.random.default_rng(0)
    for heads, dim, block, dtype in (
        (8, 128, 64, torch.bfloat16),
        (3, 64, 16, torch.float16),
        (8, 128, 64, torch.float16),
    ):
        kv = torch.randn(8, 2, 96, heads, block, dim, device="cuda").to(dtype)
        for _ in range(20):
            ranges, offsets, at = [], [], 0
            for _ in range(int(chance.integers(1, 9))):
                first, count, layer = (
                    int(chance.integers(0, 500)),
                    int(chance.integers(1, 900)),
                    int(chance.integers(0, 7)),
                )
                table = chance.permutation(96)[: -(-(first + count) // block)].astype(np.int32)
                if len(table) * block < first + count:
                    first, count = 0, min(count, len(table) * block)
                ranges.append(KvRange(layer, int(chance.integers(1, 9 - layer)), first, count, table))
                offsets.append(at)
                at += -(-ranges[-1].layers * 2 * count * heads * dim * 2 // 64) * 64
            flat = torch.full((at,), 255, dtype=torch.uint8, device="cuda")
            plan = Plan(ranges, offsets, block, heads)
            words = torch.from_numpy(plan.words.copy()).cuda()
            sums = move(kv, flat, plan, words, store=False).tolist()
            other = torch.zeros_like(kv)
            again = move(other, flat, plan, torch.from_numpy(plan.words.copy()).cuda(), store=True).tolist()
            for one, offset, total, back in zip(ranges, offsets, sums, again, strict=True):
                rows = kv[one.layer : one.layer + one.layers, :, torch.from_numpy(one.block_table).long().cuda()]
                want = rows.transpose(3, 4).reshape(one.layers, 2, -1, heads * dim)[
                    :, :, one.first : one.first + one.count
                ]
                raw = want.contiguous().view(torch.uint8).view(-1)
                got = flat[offset : offset + raw.numel()]
                frames += 1
                if (
                    not torch.equal(got, raw)
                    or payload_sum(raw.cpu().numpy().tobytes()) != total % 2**64
                    or back != total
                ):
                    wrong.append(f"{heads}x{dim} {dtype}: {one.layers} layers of {one.count} tokens")
            if len(ranges) == 1:  # others may overlap
                back = torch.full_like(flat, 255)
                move(other, back, plan, torch.from_numpy(plan.words.copy()).cuda(), store=False)
                if not torch.equal(back, flat):
                    wrong.append("scattered elsewhere")
    return {"frames": frames, "wrong": wrong, "ok": not wrong}


def kv_speed(folder: Path) -> Result:
    """One frame of 8 MiB on the device, gathered and scattered, against the copy rate."""
    import torch

    from benchmarks.gpu_timing import copy_rate, graph_time_us
    from relay.kernels.cuda.kv_move import Plan, move
    from relay.kernels.kv_frames import KvRange

    kv = torch.randn(4, 2, 128, 8, 64, 128, device="cuda").bfloat16()
    table = np.random.default_rng(0).permutation(128)[:32].astype(np.int32)
    plan = Plan([KvRange(1, 1, 0, 2048, table)], [0], 64, 8)
    flat = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
    words = torch.from_numpy(plan.words.copy()).cuda()
    rate = copy_rate()
    found: Result = {"copy_tb_per_s": round(rate / 1e12, 3), "ok": True}
    for store in (False, True):
        us = graph_time_us(lambda store=store: move(kv, flat, plan, words, store=store))  # type: ignore[misc]
        found["scatter_us" if store else "gather_us"] = round(us, 1)
        found["scatter_share" if store else "gather_share"] = round(2 * (8 << 20) / us * 1e6 / rate, 3)
    return found


def transfer(folder: Path) -> Result:
    """Hidden share by transport: 8B shape, 2,048 and 8,192 tokens, P and D as two processes on one GPU."""
    path = folder / "transfer_8b.json"
    command = [sys.executable, "-m", "benchmarks.gpu_transfer", "--out", str(path), "--tokens", "2048,8192"]
    done = subprocess.run([*command, "--transport", "ipc,shm,tcp", "--trials", "7"], capture_output=True, text=True)
    found: Result = json.loads(path.read_text()) if path.exists() else {}
    return {**found, "log": (done.stdout + done.stderr)[-4000:], "ok": done.returncode == 0}


def float16(folder: Path) -> Result:
    """Every path of SmolLM2's shape and of 4 layers of 8B in fp16 against whole prefill: logits and KV bytes."""
    from dataclasses import replace

    from benchmarks.gpu_model import check
    from benchmarks.gpu_shapes import LLAMA_8B, SMOLLM2
    from benchmarks.gpu_timing import Report

    written = Report(folder / "float16.json")
    check(written, "smollm2 float16", SMOLLM2, "float16")
    check(written, "8b float16, 4 layers", replace(LLAMA_8B, num_layers=4), "float16")
    results = {key: value for key, value in written.data.items() if key.startswith("p4/")}
    return {"results": results, "ok": len(results) == 2 and not any(result["wrong"] for result in results.values())}


def load(folder: Path) -> Result:
    """Packed bf16 weights in memory to the device, and the same quantised: GB/s of the source."""
    import torch

    from relay.kernels.cuda.linear_int8 import pack_codes, quantize
    from relay.kernels.cuda.weights import WeightUpload
    from relay.kernels.weights import Encoding, PackedMatrix

    n, k = 28672, 4096
    data = np.random.default_rng(0).integers(0, 1 << 14, n * k, dtype=np.uint16).view(np.uint8)
    matrix = PackedMatrix(n, k, Encoding.BF16, data)
    found: Result = {"bytes": data.nbytes, "ok": True}
    for name in ("bf16", "int8", "bf16", "int8"):
        upload = WeightUpload("cuda:0")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(8):
            w = upload.matrix(matrix)
            if name == "int8":
                pack_codes(quantize(w)[0])
        torch.cuda.synchronize()
        found[f"{name}_gb_per_s"] = round(8 * data.nbytes / (time.perf_counter() - begin) / 1e9, 2)
    return found


PARTS: dict[str, tuple[Callable[[Path], Result], int]] = {
    "kv_bits": (kv_bits, 60),
    "transfer": (transfer, 240),
    "kv_speed": (kv_speed, 40),
    "float16": (float16, 150),
    "load": (load, 60),
    "load_direct": (load_direct, 130),
}


def run_part(name: str, folder: Path) -> int:
    """In a process of its own: the result as JSON, a traceback included."""
    try:
        result = PARTS[name][0](folder)
    except Exception:  # whatever it is, it is the result
        result = {"ok": False, "error": traceback.format_exc()}
        print(result["error"], file=sys.stderr, flush=True)
    (folder / f"part_{name}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0 if result["ok"] else 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", help="run this one here")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        sys.exit(run_part(arguments.part, folder))
    began = time.monotonic()
    results: dict[str, Any] = {**report.provenance(), "parts": {}}
    failed = False
    for name in arguments.parts.split(","):
        left = arguments.seconds - (time.monotonic() - began)
        result: Result = {"ok": False, "error": f"not begun: {left:.0f} s left"}
        begin = time.monotonic()
        if left > 5:
            file = folder / f"part_{name}.json"
            file.unlink(missing_ok=True)
            command = [sys.executable, "-m", "benchmarks.gpu_parts", "--part", name, "--out", str(folder)]
            with (folder / f"part_{name}.log").open("w") as log:
                try:
                    limit = min(left, PARTS[name][1])
                    status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
                    problem = f"status {status} and no result"
                except subprocess.TimeoutExpired:
                    problem = f"killed after {limit:.0f} s"
            log_end = (folder / f"part_{name}.log").read_text()[-3000:]
            result = json.loads(file.read_text()) if file.exists() else {"ok": False, "error": problem, "log": log_end}
        result["seconds"] = round(time.monotonic() - begin, 1)
        failed |= not result["ok"]
        results["parts"][name] = result
        (folder / "parts.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
        print(f"{name}: {'ok' if result['ok'] else 'FAILED'} in {result['seconds']} s", flush=True)
        if not result["ok"]:
            print(str(result.get("error") or result.get("wrong") or result.get("log"))[-1500:], flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
