"""Anonymous memory that costs nothing until it is written, on huge pages where the kernel grants them."""

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from relay.errors import DoesNotFitError


def address(buffer: Any) -> int:
    """Of the first byte of contiguous memory (any buffer object), 0 of an empty one. numpy's ``data`` costs ten times as much."""
    view = memoryview(buffer)
    if not view.nbytes:
        return 0
    if view.readonly:
        pointer: int = np.frombuffer(view, np.uint8).ctypes.data
        return pointer
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def reserve(num_bytes: int, what: str) -> np.ndarray:
    """uint8 [num_bytes], zero, page aligned. Raises DoesNotFitError naming ``what`` if the machine has less memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > physical:
        raise DoesNotFitError(f"{what} needs {num_bytes / 2**30:.1f} GiB, the machine has {physical / 2**30:.1f} GiB")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        region = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    except OSError as error:
        raise DoesNotFitError(f"{what} needs {num_bytes / 2**30:.1f} GiB: {error.strerror}") from None
    if num_bytes >= 4 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != 22:  # EINVAL: a kernel without huge pages
                raise
    return np.frombuffer(region, dtype=np.uint8, count=num_bytes)
