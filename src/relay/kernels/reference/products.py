"""The three products of a transformer, twice: in the canon's order, and by the linear algebra library numpy was built with."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relay.kernels.reference.arithmetic import F32, fma

Visible = NDArray[np.bool_]  # [rows, keys of a tile]


class Products(Protocol):
    """How sums of products are formed. Everything else is the same in both."""

    name: str

    def linear(self, x: F32, weight: F32) -> F32:
        """Σ over k of x[m, k] * weight[n, k]. [m, k], [n, k] → [m, n]"""
        ...

    def scores(self, q: F32, k: F32) -> F32:
        """Σ over d of q[r, h, g, d] * k[t, h, d]. → [r, h, g, t]"""
        ...

    def accumulate(self, acc: F32, p: F32, v: F32, visible: Visible) -> F32:
        """acc[r, h, g, d] + Σ over the t that row r sees of p[r, h, g, t] * v[t, h, d]. → [r, h, g, d]

        p is 0 where ``visible`` [r, t] is False.
        """
        ...


class ChainProducts:
    """The canon: one chain of fma a sum, k (or d, or t) ascending. Slow; for small programs."""

    name = "chain"

    def linear(self, x: F32, weight: F32) -> F32:
        acc = np.zeros((x.shape[0], weight.shape[0]), np.float32)
        for k in range(x.shape[1]):
            acc = fma(x[:, k, None], weight[None, :, k], acc)
        return acc

    def scores(self, q: F32, k: F32) -> F32:
        acc = np.zeros((*q.shape[:3], k.shape[0]), np.float32)
        for d in range(q.shape[3]):
            acc = fma(q[..., d, None], k[:, :, d].T[None, :, None, :], acc)
        return acc

    def accumulate(self, acc: F32, p: F32, v: F32, visible: Visible) -> F32:
        for t in range(v.shape[0]):  # not a product with 0 where t is invisible: 0 * inf is NaN
            seen = visible[:, t, None, None, None]
            acc = np.where(seen, fma(p[..., t, None], v[t][None, :, None, :], acc), acc)
        return acc


class MatmulProducts:
    """Same sums in whatever order the library likes: fast, close to the canon, but its bits depend on the batch.

    An infinite v reaches rows that do not see it: a product with 0 is NaN there."""

    name = "matmul"

    def linear(self, x: F32, weight: F32) -> F32:
        return x @ weight.T

    def scores(self, q: F32, k: F32) -> F32:
        r, h, g, d = q.shape
        flat = q.transpose(1, 0, 2, 3).reshape(h, r * g, d) @ k.transpose(1, 2, 0)
        return flat.reshape(h, r, g, -1).transpose(1, 0, 2, 3)

    def accumulate(self, acc: F32, p: F32, v: F32, visible: Visible) -> F32:
        r, h, g, t = p.shape
        flat = p.transpose(1, 0, 2, 3).reshape(h, r * g, t) @ v.transpose(1, 0, 2)
        return acc + flat.reshape(h, r, g, -1).transpose(1, 0, 2, 3)
