"""CRC32C of any buffer, by the processor's instruction where it has one; for the transfer layer."""

from collections.abc import Callable
from functools import cache

from relay.kernels.cpu import library
from relay.kernels.cpu.memory import address


def crc32c(data: "bytes | bytearray | memoryview", crc: int = 0) -> int:
    """CRC32C (Castagnoli) of ``data``, continuing from ``crc``; crc32c(b"123456789") == 0xE3069283. Releases the GIL."""
    if isinstance(data, bytes):
        return _kernel()(crc, data, len(data))
    return _kernel()(crc, address(data), memoryview(data).nbytes)


@cache
def _kernel() -> Callable[[int, int | bytes, int], int]:
    """Found once: asking which libraries there are costs more than a small buffer."""
    kernel: Callable[[int, int | bytes, int], int] = library.load(library.choose(None)).relay_crc32c
    return kernel
