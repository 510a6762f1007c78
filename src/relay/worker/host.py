"""What a worker process knows of the machine it runs on."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def host_identity() -> str:
    """Boot id, network and IPC namespace: equal for two processes that can share memory and loopback."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return ":".join([boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/ipc")])


def die_with_parent(parent: int) -> bool:
    """Ask the kernel for SIGKILL when the thread that started this process ends; False if ``parent`` is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent
