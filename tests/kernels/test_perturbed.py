"""Perturbations that end an engine strike at their token, and are refused where they can do nothing."""

import numpy as np
import pytest

from relay.errors import UsageError
from relay.kernels.backend import Batch
from relay.kernels.perturbed import check_kind, perturbed


class Recorder:
    def __init__(self, name):
        self.name = name
        self.ran = []

    def run(self, start, stop, batch):
        self.ran.append(batch.token_ids.tolist())


def batch_of(tokens):
    zeros = np.zeros(1, np.int32)
    return Batch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(len(tokens), dtype=np.int32),
        row_starts=np.array([0, len(tokens)], np.int32),
        slots=zeros,
        block_tables=zeros[None],
        sampled_rows=zeros,
    )


def test_a_faulting_kernel_is_given_a_row_that_is_nowhere():
    inner = Recorder("cuda")
    backend = perturbed(inner, "fault:7")
    backend.run(0, 1, batch_of([7, 7, 7, 1, 7]))
    backend.run(0, 1, batch_of([3, 7, 7, 7, 7]))
    assert inner.ran == [[7, 7, 7, 1, 7], [2**31 - 1, 7, 7, 7, 7]]


def test_kinds_that_are_none_or_not_for_this_backend():
    with pytest.raises(UsageError, match="is for --backend cuda"):
        perturbed(Recorder("cpu"), "fault:7")
    for kind in ("fault", "crash:", "fault:x", "smile"):
        with pytest.raises(UsageError, match=r"known: .*crash:TOKEN_ID, fault:TOKEN_ID"):
            check_kind(kind)
