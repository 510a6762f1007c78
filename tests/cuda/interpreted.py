"""A whole program on the CPU through Triton's interpreter: the backend's launches and steps without its streams and graphs.

Run in a process of its own (``python -m tests.cuda.interpreted``) with TRITON_INTERPRET=1: the interpreter is chosen at import.
"""

import numpy as np
import torch

from relay.kernels import packing
from relay.kernels.backend import Batch
from relay.kernels.cuda.linear_choice import LinearLayer
from relay.kernels.cuda.ops import Device, compile_ops
from relay.kernels.cuda.sampler import SamplerScratch, SamplerTables, sample_rows
from relay.kernels.cuda.step import Step, exact_layout, fill, shape_of
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from relay.kernels.program import Buffer, Embed, HeadNorm, Linear, RmsNorm

BLOCK = 16
BLOCKS = 40
CAPACITY = 32


class Interpreted:
    """The probe's program with its weights in bf16."""

    def __init__(self) -> None:
        self.program = probe_program()
        weights = ProbeWeights()
        device = self.device = Device("cpu", max_decodes=8)
        for op in self.program.ops:
            names: list[str] = []
            if isinstance(op, Embed | Linear):
                device.matrices[op.weight] = torch.from_numpy(
                    packing.unpack_matrix(weights.matrix(op.weight))
                ).bfloat16()
                if isinstance(op, Linear):
                    n, k = device.matrices[op.weight].shape
                    device.layers[n, k] = LinearLayer(n, k)
                    names = [op.bias] if op.bias else []
            elif isinstance(op, RmsNorm):
                names = [op.weight]
            elif isinstance(op, HeadNorm):
                names = [op.q_weight, op.k_weight]
            for name in names:
                device.vectors[name] = torch.from_numpy(weights.vector(name))
        for name in ("rope.cos", "rope.sin"):
            device.vectors[name] = torch.from_numpy(weights.vector(name).copy())
        for buffer in Buffer:
            width = GEOMETRY.width(buffer)
            device.buffers[buffer] = torch.full((CAPACITY, width), float("nan"), dtype=torch.bfloat16)
        device.product = torch.full((CAPACITY, GEOMETRY.hidden), float("nan"), dtype=torch.bfloat16)
        shape = (GEOMETRY.num_layers, 2, BLOCKS, GEOMETRY.num_kv_heads, BLOCK, GEOMETRY.head_dim)
        device.kv = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        self.tables = SamplerTables(9, "cpu")
        device.last_tokens = self.tables.last_tokens
        self.launches = compile_ops(self.program, device)

    def run(self, batch: Batch) -> Step:
        """All ops on one batch."""
        shape = shape_of(batch, GEOMETRY.num_heads // GEOMETRY.num_kv_heads, 64)
        layout = exact_layout(batch, shape)
        packed = np.zeros(layout.words, np.int32)
        fill(layout, packed, batch, shape, 8)
        step = layout.views(torch.from_numpy(packed))
        for launch in self.launches:
            launch(step)
        return step

    def logits(self, step: Step) -> torch.Tensor:
        return self.device.buffers[Buffer.L][: step.sampled].float().clone()

    def draw(self, step: Step) -> list[int]:
        """Tokens drawn from the step's logits."""
        scratch = SamplerScratch(8, GEOMETRY.vocab, "cpu")
        drawn = torch.zeros(8, 2, dtype=torch.int32)
        logits = self.device.buffers[Buffer.L][: step.sampled]
        sample_rows(logits, step.positions, step.sampled_tokens, step.sampled_slots, self.tables, scratch, drawn)
        return drawn[: step.sampled, 0].tolist()


def batch_of(pieces: list[tuple[list[int], int, list[int], int]]) -> Batch:
    """(tokens, first position, block table, slot) of each sequence row."""
    width = max(len(table) for _, _, table, _ in pieces)
    tables = np.zeros((len(pieces), width), np.int32)
    for row, (_, _, table, _) in enumerate(pieces):
        tables[row, : len(table)] = table
    counts = [len(tokens) for tokens, *_ in pieces]
    return Batch(
        token_ids=np.concatenate([tokens for tokens, *_ in pieces]).astype(np.int32),
        positions=np.concatenate([np.arange(first, first + len(t)) for t, first, *_ in pieces]).astype(np.int32),
        row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        slots=np.array([slot for *_, slot in pieces], np.int32),
        block_tables=tables,
        sampled_rows=np.arange(len(pieces), dtype=np.int32),
    )


def main() -> None:
    """P4 in small: whole, chunked, decoded, beside another; prints one line a path and fails at the first difference."""
    from tests.cuda import tensor_core_model

    tensor_core_model.install()
    model = Interpreted()
    tokens = [(7 * i) % GEOMETRY.vocab for i in range(20)]
    assert model.device.kv is not None
    whole = model.logits(model.run(batch_of([(tokens, 0, [3, 1], 0)])))
    kv = model.device.kv[:, :, [3, 1]].clone()
    assert torch.isfinite(whole).all()
    for chunk in (7, 19):
        for first in range(0, 20, chunk):
            step = model.run(batch_of([(tokens[first : first + chunk], first, [9, 4], 1)]))
        assert torch.equal(model.logits(step), whole), f"chunks of {chunk} differ"
        assert torch.equal(model.device.kv[:, :, [9, 4], :, :4], kv[:, :, :, :, :4]), f"KV of chunks of {chunk} differs"
        print(f"chunks of {chunk} equal")
    model.run(batch_of([(tokens[:19], 0, [20, 21], 2)]))
    step = model.run(batch_of([(tokens[19:], 19, [20, 21], 2), (tokens[:5], 0, [30], 3)]))
    assert torch.equal(model.logits(step)[:1], whole), "decode beside a prompt differs"
    print("decode beside a prompt equal")
    model.tables.set(2, 0.9, 0.01, 0x123456789ABCDEF0, 1, 0)
    print("drawn", model.draw(step))


if __name__ == "__main__":
    main()
