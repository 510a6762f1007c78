"""What the kernels gain over plain ones (``kernels/cuda/baseline.py``): prefill and a decode step of 8B shape, same weights.

``python -m benchmarks.gpu_baseline --out FILE``. Also says how far the two models' logits are apart (they round differently).
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.gpu_model import BLOCK, decode_batch, greedy, random_model
from benchmarks.gpu_shapes import LLAMA_8B
from relay.kernels.backend import Batch
from relay.kernels.cuda.baseline import PlainModel

PROMPT, CONTEXT = 1024, 576


def timed(run: Any, repeats: int) -> float:
    """Median milliseconds of ``run``, which ends with a synchronisation."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    backend, program = random_model(LLAMA_8B, max_rows=8, max_tokens=PROMPT)
    backend.allocate_kv(200, BLOCK, "bfloat16")
    ops = len(program.ops)
    for slot in range(8):
        backend.bind_slot(slot, greedy(slot), 0, [1], [])
    tokens = np.random.default_rng(0).integers(0, LLAMA_8B.vocab, PROMPT).astype(np.int32)
    prompt = Batch(
        tokens,
        np.arange(PROMPT, dtype=np.int32),
        np.array([0, PROMPT], np.int32),
        np.zeros(1, np.int32),
        np.arange(PROMPT // BLOCK, dtype=np.int32)[None],
        np.zeros(1, np.int32),
        True,
    )

    def ours(batch: Batch) -> None:
        backend.run(0, ops, batch)
        backend.sample(batch)

    ours(prompt)
    logits = torch.from_numpy(backend.logits()[0])
    prompt.capture_logits = False
    plain = PlainModel(program, backend._device.matrices, backend._device.vectors, 8, PROMPT + 8)
    ids = torch.from_numpy(tokens).long().cuda()
    other = plain.step(ids[None], 0)[0].float().cpu()
    apart = float((logits - other).norm() / logits.norm())
    rows: dict[str, Any] = {"logits_apart": round(apart, 5), "prompt_tokens": PROMPT, "context": CONTEXT}
    print("relative distance of logits", apart, flush=True)
    fast, slow = timed(lambda: ours(prompt), 5), timed(lambda: plain.step(ids[None], 0), 1)
    rows["prefill"] = {"ours_ms": round(fast, 2), "plain_ms": round(slow, 1), "speed_up": round(slow / fast, 1)}
    print("prefill", rows["prefill"], flush=True)
    for batch in (1, 8):
        data = decode_batch(batch, CONTEXT, CONTEXT // BLOCK + 1)
        last = ids[:batch, None]
        fast = timed(lambda data=data: ours(data), 12)
        slow = timed(lambda last=last: plain.step(last, CONTEXT), 3)
        key = f"decode step, batch {batch}"
        rows[key] = {"ours_ms": round(fast, 2), "plain_ms": round(slow, 1), "speed_up": round(slow / fast, 1)}
        print(key, rows[key], flush=True)
    arguments.out.write_text(json.dumps({**report.provenance(), **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
