"""Loading weights for others: see ``sharing.py``."""

import contextlib
from collections.abc import Callable, Iterator

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
    process more. Raises DoesNotFitError where memory runs out, then and later."""
    check_device(device)
    coded = coded_names(program) if quantized else frozenset()

    @contextlib.contextmanager
    def fitting() -> Iterator[None]:
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise does_not_fit(device, "the weights", weight_bytes(program, coded)) from error

    @fitting()
    def message() -> bytes:
        return export_weights(held)

    with fitting():
        torch.cuda.set_device(device)
        held = load_matrices(program, weights, WeightUpload(device, progress, TYPES[dtype]), coded)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return message
