"""Loading weights for others: see ``sharing.py``."""

from collections.abc import Callable

import torch

from relay.kernels.cuda.loading import coded_names, load_matrices, weight_bytes
from relay.kernels.cuda.memory import check_device, does_not_fit
from relay.kernels.cuda.sharing import export_weights
from relay.kernels.cuda.weights import TYPES, Progress, WeightUpload, no_progress
from relay.kernels.program import Program
from relay.kernels.weights import WeightSource


def hold_weights(
    program: Program,
    weights: WeightSource,
    device: str,
    dtype: str = "bfloat16",
    quantized: bool = False,
    progress: Progress = no_progress,
) -> Callable[[], bytes]:
    """Load the matrices of ``program``, those of linears in int8 if ``quantized``; the function returned makes the message for one
    process more."""
    check_device(device)
    torch.cuda.set_device(device)
    coded = coded_names(program) if quantized else frozenset()
    try:
        held = load_matrices(program, weights, WeightUpload(device, progress, TYPES[dtype]), coded)
    except torch.cuda.OutOfMemoryError as error:
        raise does_not_fit(device, "the weights", weight_bytes(program, coded)) from error
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return lambda: export_weights(held)
