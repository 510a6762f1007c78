"""Ranks under Triton's interpreter: processes over shared host memory meet by the kernels' own flags.

``python -m tests.cuda.interpreted_ranks RANKS``, with TRITON_INTERPRET=1 in the environment.
"""

import functools
import itertools
import sys
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing

from relay.kernels import packing
from relay.kernels.backend import Batch
from relay.kernels.cuda.linear_choice import LinearLayer
from relay.kernels.cuda.loading import shapes_of
from relay.kernels.cuda.ops import Device, compile_ops
from relay.kernels.cuda.rank_meetings import MAX_RANKS, STATE_WORDS, Links, plan_areas, sum_ranks
from relay.kernels.cuda.step import exact_layout, fill, shape_of
from relay.kernels.probe import ProbeWeights, probe_program
from relay.kernels.program import Buffer
from relay.kernels.ranks.split import fold, split_program
from relay.kernels.ranks.weights import RankWeights
from tests.cuda import tensor_core_model
from tests.cuda.interpreted import batch_of

ROWS = 32
BLOCK, BLOCKS = 16, 16
TOKENS = [(7 * i) % 200 for i in range(9)]


class Rank:
    """One rank of the probe's program on the CPU; all areas and flags are shared memory."""

    def __init__(self, rank: int, ranks: int, areas: list[torch.Tensor], flags: list[torch.Tensor]) -> None:
        self.part = part = split_program(probe_program(), ranks, rank)
        weights = RankWeights(ProbeWeights(), part.cuts)
        device = self.device = Device("cpu", max_decodes=8)
        matrices, vectors = shapes_of(part.program)
        for name, (n, k) in matrices.items():
            device.matrices[name] = torch.from_numpy(packing.unpack_matrix(weights.matrix(name))).bfloat16()
            assert device.matrices[name].shape == (n, k)
            device.layers[n, k] = LinearLayer(n, k)
        for name in vectors:
            device.vectors[name] = torch.from_numpy(np.array(weights.vector(name)))
        g = part.program.geometry
        for buffer in Buffer:
            device.buffers[buffer] = torch.full((ROWS, g.width(buffer)), float("nan"), dtype=torch.bfloat16)
        device.product = torch.full((ROWS, g.hidden), float("nan"), dtype=torch.bfloat16)
        shape = (g.num_layers, 2, BLOCKS, g.num_kv_heads, BLOCK, g.head_dim)
        device.kv = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        device.last_tokens = torch.zeros(9, dtype=torch.int32)
        device.areas = plan_areas(part, ROWS, ROWS)
        device.links = Links(rank, ranks, areas, flags, torch.zeros(STATE_WORDS, dtype=torch.int32))
        self.launches = compile_ops(part.program, device, part.meetings)

    def logits(self, batch: Batch) -> torch.Tensor:
        g = self.part.program.geometry
        shape = shape_of(batch, g.num_heads // g.num_kv_heads, 64)
        layout = exact_layout(batch, shape)
        packed = np.zeros(layout.words, np.int32)
        fill(layout, packed, batch, shape, 8)
        step = layout.views(torch.from_numpy(packed))
        for launch in self.launches:
            launch(step)
        return self.device.buffers[Buffer.L][: step.sampled].float().clone()


def live(rank: int, ranks: int, areas: list[torch.Tensor], flags: list[torch.Tensor], answers: Any) -> None:
    """Whole, in chunks, decoded beside another: the same calls in every rank."""
    tensor_core_model.install()
    one = Rank(rank, ranks, areas, flags)
    whole = one.logits(batch_of([(TOKENS, 0, [3, 1], 0)]))
    assert torch.isfinite(whole).all()
    kv = one.device.kv[:, :, [3, 1]].clone()
    one.logits(batch_of([(TOKENS[:8], 0, [9, 4], 1)]))
    beside = one.logits(batch_of([(TOKENS[8:], 8, [9, 4], 2), (TOKENS[:3], 0, [12], 3)]))
    assert torch.equal(beside[:1], whole), "a chunk, then decode beside a prompt, differs"
    assert torch.equal(one.device.kv[:, :, [9], :, :9], kv[:, :, :1, :, :9]), "KV differs"
    epoch, through = one.device.links.state[:2].tolist()
    meetings = len(one.part.meetings) * 3
    assert (epoch, through) == (meetings, 0), (epoch, through, meetings)
    answers.put((rank, whole.numpy()))


def add(rank: int, ranks: int, areas: list[torch.Tensor], flags: list[torch.Tensor], answers: Any) -> None:
    """Sums whose result is a small integer that depends on the order: the interpreter truncates to bf16 where a device rounds."""
    links = Links(rank, ranks, areas, flags, torch.zeros(STATE_WORDS, dtype=torch.int32))
    orders = list(itertools.permutations([1.0, 2.0**24, 1.0, -(2.0**24)]))
    columns = torch.tensor([orders[(7 * column) % len(orders)] for column in range(1500)])
    values = [columns[:, other % 4].reshape(5, 300) for other in range(ranks)]
    if ranks < 4:
        values = [value % 5 for value in values]  # whose sums stay small
    x, bias = (torch.arange(1500) % 7).reshape(5, 300).bfloat16(), (torch.arange(300) % 3).float()
    areas[rank][64 : 64 + 1500] = values[rank].reshape(-1).bfloat16()
    want = x.float() + bias + fold(values)
    sum_ranks(links, x, 64, bias)
    other = functools.reduce(torch.add, values)
    assert ranks < 4 or not torch.equal(fold(values), other), "the order makes no difference here"
    answers.put((rank, x.float().numpy(), torch.equal(x.float(), want)))


def together(task: Any, ranks: int) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    areas = [torch.full((1 << 15,), float("nan"), dtype=torch.bfloat16).share_memory_() for _ in range(ranks)]
    flags = [torch.zeros(MAX_RANKS, dtype=torch.int32).share_memory_() for _ in range(ranks)]
    answers = context.Queue()
    processes = [context.Process(target=task, args=(rank, ranks, areas, flags, answers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        return sorted((answers.get(timeout=120) for _ in processes), key=lambda answer: answer[0])
    finally:
        for process in processes:
            process.join(5)
            process.kill()


if __name__ == "__main__":
    count = int(sys.argv[1])
    sums = together(add, count)
    assert all(equal for _, _, equal in sums)
    assert all(np.array_equal(found, sums[0][1]) for _, found, _ in sums)
    if count == 2:
        logits = [found for _, found in together(live, count)]
        assert all(np.array_equal(found, logits[0]) for found in logits), "ranks hold different logits"
