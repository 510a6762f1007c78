"""A CUDA error ends its worker alone, and the cluster goes on with what it had. ``pytest -m gpu tests/cuda``."""

import asyncio
import importlib.util
import random
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch
from benchmarks.gpu_pack import write

from relay.config import WorkerConfig
from relay.models.checked import remember
from relay.models.config import ModelConfig, RopeConfig
from relay.models.store import LoadedModel, open_model
from relay.protocol.sampling import SamplingParams
from relay.verify.cluster import VerifyCluster
from relay.verify.compare import SequenceOutput, difference
from relay.verify.requests import VerifyRequest

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
POISON = 319
CONFIG = ModelConfig(  # of the probe's widths, whose kernels every start compiles
    architecture="llama", vocab=512, hidden=96, intermediate=160, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=32, rms_eps=1e-5, max_positions=1024, rope=RopeConfig(theta=1e4), tied_embeddings=True,
)  # fmt: skip


def requests() -> list[VerifyRequest]:
    """Long prompts with the same end, half of them sampled: whichever worker they come to, it computes that end."""
    chance = random.Random(5)
    found = []
    for index in range(8):
        prompt = [chance.randrange(320, 512) for _ in range(chance.choice((5, 90, 200)))] + [POISON] * 40
        params = SamplingParams(max_tokens=60, temperature=(0.0, 0.9)[index % 2], seed=index)
        found.append(VerifyRequest(f"request {index}", prompt, params))
    return found


async def outputs(
    model: LoadedModel, config: WorkerConfig, workers: int, perturb: dict[str, str]
) -> tuple[dict[str, SequenceOutput], int, str]:
    """What they gave, how many workers were lost on the way, and what workers said."""
    slots = [(f"worker-{index}", "both") for index in range(workers)]
    async with VerifyCluster(model, config, slots, perturb=perturb) as cluster:
        found = await cluster.run(requests(), salt=lambda request: request.name, together=True)
        return found, cluster.counter("relay_workers_lost_total"), "\n".join(cluster._log)


async def both(model: LoadedModel, config: WorkerConfig, kind: str) -> None:
    (calm, lost, _), (storm, lost_of_two, said) = await asyncio.gather(
        outputs(model, config, 1, {}), outputs(model, config, 2, {"worker-0": f"{kind}:{POISON}"})
    )
    assert lost == 0
    assert lost_of_two >= 1
    if kind == "fault":
        assert "the GPU failed: " in said
    problems = [difference(name, calm[name], output) for name, output in storm.items()]
    assert problems == [None] * len(calm)
    assert all(len(output.token_ids) == 60 for output in storm.values())


def run(folder: Path, config: WorkerConfig, kind: str) -> None:
    write(folder / "small.pack", CONFIG)
    remember(folder / "small.pack", folder)  # its digest is of the header alone
    asyncio.run(both(open_model(str(folder / "small.pack"), cache_dir=folder, offline=True), config, kind))


@pytest.mark.gpu
@needs_gpu
def test_after_an_illegal_read_another_worker_goes_on(tmp_path: Path) -> None:
    config = WorkerConfig(
        backend="cuda", kv_cache_memory_bytes=64 << 20, block_size=16, max_num_seqs=16, max_num_batched_tokens=256
    )
    run(tmp_path, config, "fault")
