"""How every kernel of this package is launched: no contraction by the compiler, programmatic dependent launch on Hopper.

With programmatic dependent launch a kernel may be scheduled while its predecessor still runs; ``pdl_start`` is the first
thing each kernel does with memory that another kernel writes: it waits for the predecessor's writes, then lets the successor be
scheduled. Because every kernel waits, a kernel's end implies the end of all before it. It changes when, never what.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda
from triton.runtime.errors import OutOfResources

from relay.errors import DeviceLostError, DoesNotFitError

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HOPPER_SHARED = 227 << 10
"""Shared memory that a program may have on sm_90, in bytes. 163 KiB on sm_80, 99 on sm_86, sm_89 and sm_120."""


class _Dependent:
    """Whether launches use programmatic dependent launch; None until first asked."""

    enabled: bool | None = None


def pdl_enabled() -> bool:
    """Whether kernels are launched dependently: on by default where the device can (compute capability 9.0 and above)."""
    if _Dependent.enabled is None:
        able = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
        _Dependent.enabled = able
    return _Dependent.enabled


def set_pdl(enabled: bool) -> None:
    """Turn programmatic dependent launch on or off for later launches; graphs keep what they were captured with."""
    _Dependent.enabled = enabled


def launch_options(pdl: bool) -> dict[str, Any]:
    """Options common to all launches. Contraction is off: every fused multiply-add is written as ``tl.fma``."""
    if INTERPRETED:
        return {}
    return {"enable_fp_fusion": False, "launch_pdl": pdl}


def power_of_two_from(number: int) -> int:
    """The least that is not below ``number``. (Triton's own costs as much as half a launch.)"""
    return 1 << (number - 1).bit_length()


@functools.cache
def shared_limit() -> int:
    """Bytes of shared memory that a program may have on this thread's device: what Triton compares a kernel's need with.

    Tiles and stages are chosen by it; they change no bits. Where there is no device it is as on Hopper.
    """
    if INTERPRETED or not torch.cuda.is_available():
        return HOPPER_SHARED
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return int(properties["max_shared_mem"])


def watch_compiler(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` each kernel that Triton compiles (or finds in its cache on disk). Process-wide."""

    def begin(**_: Any) -> None:
        before()

    def end(**_: Any) -> None:
        after()

    triton.knobs.runtime.jit_cache_hook = begin
    triton.knobs.runtime.jit_post_compile_hook = end


def is_device_lost(error: Exception) -> bool:
    """Whether ``error`` says that the CUDA context is unusable, as every CUDA error does but a lack of memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith(("CUDA error", "Triton Error [CUDA]", "CUDA driver"))
    )


def lost_by(error: Exception) -> Exception | None:
    """The error of a lost device that ``error`` is, or is a consequence of: a library that meets one may raise something else."""
    if is_device_lost(error):
        return error
    if isinstance(error, RuntimeError) and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as found:
            return found if is_device_lost(found) else None
    return None


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Raise a CUDA error of the body as DeviceLostError, and as DoesNotFitError that the device is too small for a kernel."""
    try:
        yield
    except OutOfResources as error:
        raise DoesNotFitError(
            f"a kernel needs more {error.name} than this GPU has: {error.required}, the limit is {error.limit}; "
            "serve with another GPU or --backend cpu, and please report the GPU's name"
        ) from error
    except Exception as error:
        lost = lost_by(error)
        if lost is not None:
            first = str(lost).splitlines()[0]
            raise DeviceLostError(f"the GPU failed: {first}; this worker ends") from error
        raise


class OwnDevice:
    """The device that this process's threads work on.

    A thread begins on the first device, whoever's that is, and what it then asks of CUDA opens a context there: half a GiB of
    another worker's memory, and seconds of waiting while that worker is busy, in which a step looks hung.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads = threading.local()

    def enter(self) -> None:
        """Before anything that the calling thread does there."""
        if not hasattr(self._threads, "entered"):
            torch.cuda.set_device(self._name)
            self._threads.entered = True


@triton.jit
def pdl_start(PDL: tl.constexpr):
    """Wait for the kernel before this one; afterwards the next one may be scheduled."""
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
