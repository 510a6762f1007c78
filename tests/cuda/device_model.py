"""The probe's program on a CUDA device, driven step by step; what a linear is compared with."""

import random

import numpy as np
import torch

from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.launch import shared_limit
from relay.kernels.cuda.linear import linear
from relay.kernels.cuda.linear_choice import tall_tile
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from tests.cuda.batches import batch_of

BLOCK = 16
ROWS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 129, 257)


def accumulators(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The canon's fp32 accumulators of every row."""
    y = torch.empty(x.shape[0], w.shape[0], device=x.device)
    linear(x, w, y, tall_tile(shared_limit()))
    return y


class Model:
    """The probe's program; blocks are drawn at random, free memory is NaN."""

    def __init__(self, graphs: bool = True, backend: CudaBackend | None = None) -> None:
        """``backend``: one that has loaded the program."""
        self.backend = backend or CudaBackend(max_rows=32, max_tokens=512, graphs=graphs)
        if backend is None:
            self.backend.load(probe_program(), ProbeWeights())
        self.backend.allocate_kv(800, BLOCK, "bfloat16")
        assert self.backend._device.kv is not None
        self.backend._device.kv.fill_(float("nan"))
        self.free = random.Random(3).sample(range(800), 800)
        self.ops = len(probe_program().ops)

    def table(self, tokens: int) -> np.ndarray:
        count = -(-tokens // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, np.int32)

    def step(self, pieces: list[tuple[np.ndarray, int, np.ndarray, int]], cuts: tuple[int, ...] = ()) -> np.ndarray:
        """(tokens, first position, table, slot) of each row; the logits of each row's last token."""
        batch = batch_of(pieces)
        batch.capture_logits = True
        for start, stop in zip([0, *cuts], [*cuts, self.ops], strict=True):
            self.backend.run(start, stop, batch)
        self.drawn = [token.token_id for token in self.backend.sample(batch)]
        return self.backend.logits()

    def kv(self, table: np.ndarray, count: int) -> bytes:
        raw = bytearray(count * self.backend.kv_bytes_per_token_layer())
        parts = []
        for layer in range(GEOMETRY.num_layers):
            self.backend.read_kv(layer, table, 0, count, memoryview(raw))
            parts.append(bytes(raw))
        return b"".join(parts)
