"""A model of the tensor core for Triton's interpreter; import it before a kernel runs under TRITON_INTERPRET=1.

The interpreter's own ``tl.dot`` reads bf16 storage as integers and sums in whatever order numpy likes. Here k goes in groups of 16,
each summed exactly enough (fp64) with the fp32 accumulator and rounded once, so that a dot does not depend on the tile.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(handle: interpreter.TensorHandle) -> np.ndarray:
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def _dot(self, a, b, d, input_precision=None, max_num_imprecise_acc=None):
    left, right, acc = _widened(a), _widened(b), d.data.astype(np.float32)
    for k in range(0, left.shape[-1], 16):
        part = np.matmul(left[..., k : k + 16], right[..., k : k + 16, :])
        acc = (acc.astype(np.float64) + part).astype(np.float32)
    return interpreter.TensorHandle(acc.astype(d.data.dtype), d.dtype.scalar)


def install() -> None:
    """Replace the interpreter's dot for the rest of the process."""
    interpreter.InterpreterBuilder.create_dot = _dot


install()
