"""CRC32C of any buffer, by the processor's instruction where it has one; for the transfer layer."""

from collections.abc import Callable
from functools import cache

import numpy as np

from relay.kernels.cpu import library


def crc32c(data: "bytes | bytearray | memoryview", crc: int = 0) -> int:
    """CRC32C (Castagnoli) of ``data``, continuing from ``crc``; crc32c(b"123456789") == 0xE3069283. Releases the GIL."""
    array = np.frombuffer(data, dtype=np.uint8)
    if not array.size:
        return crc
    return int(_kernel()(crc, array.ctypes.data, array.size))


@cache
def _kernel() -> Callable[[int, int, int], int]:
    """Found once: asking which libraries there are costs more than a small buffer."""
    kernel: Callable[[int, int, int], int] = library.load(library.choose(None)).relay_crc32c
    return kernel
