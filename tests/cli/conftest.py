"""Tests of recovery run the cpu backend, whose bits do not depend on the batch: its kernels must be those of these sources."""

from tests.kernels.conftest import _kernels_are_built

__all__ = ["_kernels_are_built"]
