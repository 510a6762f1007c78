"""A network namespace of our own: nothing but a loopback, where packets can be lost without anybody else's losing any.

The calling process enters it, and everything it starts is born there. It has no name: it ends, with all rules in it, when the last
process in it does, however that ends. Needs root (CAP_SYS_ADMIN) and nft.
"""

import ctypes
import fcntl
import os
import shutil
import socket
import struct

from relay.chaos.packets import Flow, Packets, PacketsUnavailable

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Go into a new namespace. Raises PacketsUnavailable, in the old one."""
    if shutil.which("nft") is None:
        raise PacketsUnavailable("--netns skipped: there is no program nft (Debian: apt-get install nftables)")
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            why = os.strerror(ctypes.get_errno())
            raise PacketsUnavailable(f"--netns skipped: a network namespace needs root (CAP_SYS_ADMIN): {why}")
        try:
            _loopback_up()
            packets = Packets()
            packets.heal(packets.lose([Flow(1, 1)], percent=1))
        except (OSError, PacketsUnavailable) as error:
            if _libc.setns(before, _CLONE_NEWNET) != 0:
                raise
            raise PacketsUnavailable(f"--netns skipped: {error}") from error
    finally:
        os.close(before)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
