"""Processes that hold a GPU's weights for several workers: nobody's worker, so found by what they run."""

import os
import signal
from pathlib import Path

from relay.chaos.leaks import descendants

MODULE = b"relay.worker.weights_process"


def holders(server: int) -> list[int]:
    """Those below process ``server``, oldest first."""
    return sorted(pid for pid in descendants(server) if _runs(pid))


def strike(pid: int, number: signal.Signals) -> bool:
    """Signal the holder ``pid``; False when it is gone, whoever has its number now."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _runs(pid):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _runs(pid: int) -> bool:
    try:
        return MODULE in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
