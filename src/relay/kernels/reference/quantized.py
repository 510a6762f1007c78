"""int8 weights by definition: symmetric, one scale an output; the scale is applied after the whole sum.

w[n, k] ≈ q[n, k] · s[n] with s[n] = max_k |w[n, k]| / 127 and q = rint(w / s), ties to even, all in fp32; a row of zeros has s = 1.
y[m, n] = round(s[n] · Σ_k x[m, k] · q[n, k]): the sum is the chain of an unquantised product whose weights are the integers, which
every 16-bit type of activations holds exactly (|q| ≤ 127), so its bits depend on tiles and batch as little as that one's do.
Of several ranks each quantises the part of w that it has: where w is cut by depth, max_k is over the rank's own k.
"""

import numpy as np
from numpy.typing import NDArray

from relay.kernels.reference.arithmetic import F32


def quantize(w: F32) -> tuple[NDArray[np.int8], F32]:
    """(int8 [n, k], fp32 [n]) of fp32 ``w`` [n, k], finite."""
    largest = np.abs(w).max(axis=1) / np.float32(127)
    scale = np.where(largest == 0, np.float32(1), largest).astype(np.float32)
    return np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8), scale


def scaled(sums: F32, scale: F32) -> F32:
    """fp32 [m, n] before the rounding to the type of activations."""
    return sums * scale[None, :]
