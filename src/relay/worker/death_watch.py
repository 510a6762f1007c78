"""Learns of a process's death before the kernel has taken down its memory, which may be gigabytes.

A robust mutex in shared memory: whoever is watched holds it for life, and the kernel hands it on as the first thing it does for a
thread that ends (``set_robust_list(2)``), before it gives back memory, closes sockets and wakes whoever waits on a pidfd.
"""

import ctypes
import errno
import mmap
import threading
from collections.abc import Callable

MUTEX_BYTES = 64  # pthread_mutex_t is 40 to 48 on the machines there are
_PROCESS_SHARED = _ROBUST = 1
_libc = ctypes.CDLL(None)


class DeathWatch:
    """One side of a mutex at ``offset`` of memory that two processes share."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._mutex = (ctypes.c_char * MUTEX_BYTES).from_buffer(memory, offset)

    def prepare(self) -> None:
        """Before the other process maps the memory. Raises OSError."""
        attributes = ctypes.create_string_buffer(MUTEX_BYTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._mutex, attributes))

    def hold(self) -> None:
        """Until the calling thread ends, with the memory still mapped. It must be one that lives as long as its process, and that
        mostly sleeps: it dies at once, others when a processor is free."""
        _check(_libc.pthread_mutex_lock(self._mutex))

    def watch(self, died: Callable[[], None]) -> None:
        """Call ``died``, on a thread of its own, once the holder is dying. Only when it holds."""
        threading.Thread(target=self._wait, args=(died,), name="death-watch", daemon=True).start()

    def _wait(self, died: Callable[[], None]) -> None:
        if _libc.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD:
            died()


def _check(error: int) -> None:
    if error:
        raise OSError(error, "pthread_mutex")
