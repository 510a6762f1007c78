"""A peer is killed while its kernels, or ours, write to the other's device. ``pytest -m gpu tests/cuda``."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from tests.transfer.ipc_engines import CudaGround, d_is_killed, p_is_killed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scenario", [p_is_killed, d_is_killed])
def test_the_peer_is_killed(scenario) -> None:
    scenario(CudaGround())
