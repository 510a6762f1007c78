"""Packed weights on the device as bf16 [n, k], the layout that the tensor cores, the copy engine and the library read."""

import numpy as np
import torch

from relay.kernels import packing
from relay.kernels.weights import Encoding, PackedMatrix


def to_device(matrix: PackedMatrix, device: str) -> torch.Tensor:
    """bf16 [n, k]: exact for BF16 packs; other encodings are widened exactly and rounded once to bf16."""
    if matrix.encoding is Encoding.BF16:
        panels = -(-matrix.n // packing.PANEL)
        bits = torch.from_numpy(matrix.data.view(np.int16).reshape(panels, matrix.k, packing.PANEL))
        rows = bits.to(device).permute(0, 2, 1).reshape(panels * packing.PANEL, matrix.k)
        return rows[: matrix.n].contiguous().view(torch.bfloat16)
    return torch.from_numpy(packing.unpack_matrix(matrix)).to(device).to(torch.bfloat16)
