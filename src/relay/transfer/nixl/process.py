"""An engine's view of one agent process."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from relay.transfer.nixl.child import Role
from relay.transfer.nixl.talk import Joined, Offer, listen, tell
from relay.transfer.shm import Ring

JOIN_TIMEOUT_S = 8.0  # loading NIXL takes about a second of processor time
LOOPBACK_INTERFACE = "lo"
LOOPBACK_LANES = "tcp,posix,sysv,self"
OTHER_LANES = "^cma,xpmem"
"""Lanes through which a peer writes by itself into memory of a *process* (cma, xpmem) are left out: UCX checks no key there."""


class AgentProcess(Protocol):
    """What ``NixlWire`` needs of an agent process."""

    def offer(self) -> Offer:
        """What it offers to the peer. Raises ChannelClosed, FrameError."""
        ...

    def join(self, theirs: Offer) -> None:
        """Have it join the peer's agent. Raises ChannelClosed, FrameError."""
        ...

    def kill(self) -> None:
        """Idempotent; returns at once."""
        ...


Launch = Callable[[Role, Ring, Callable[[], None]], AgentProcess]
"""Start one for this end of a ring; the last argument is called once, when the process has ended and was waited for."""


def environment(loopback: bool) -> dict[str, str]:
    """Variables for agent processes. What the user set counts more."""
    chosen = {"NIXL_LOG_LEVEL": "WARN", "UCX_TLS": LOOPBACK_LANES if loopback else OTHER_LANES}
    if loopback:
        chosen["UCX_NET_DEVICES"] = LOOPBACK_INTERFACE
    return chosen | dict(os.environ)


class ChildProcess:
    """An agent process as a child of this one."""

    def __init__(self, role: Role, ring: Ring, ended: Callable[[], None], loopback: bool = True) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(JOIN_TIMEOUT_S)
        numbers = [ring.memory.number, ring.frames.number, ring.space.number, theirs.fileno()]
        command = [sys.executable, "-m", "relay.transfer.nixl.child", role, *map(str, numbers)]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=numbers, env=environment(loopback)
            )
        self._ended = ended
        self._talking = threading.Lock()  # the socket is not closed under somebody who waits for it
        threading.Thread(target=self._wait, name="kv-nixl-agent", daemon=True).start()

    def offer(self) -> Offer:
        with self._talking:
            return listen(self._control, Offer)

    def join(self, theirs: Offer) -> None:
        with self._talking:
            tell(self._control, theirs)
            listen(self._control, Joined)

    def kill(self) -> None:
        self._process.kill()

    def _wait(self) -> None:
        self._process.wait()
        with self._talking:  # whoever waits there hears the end
            self._control.close()
        self._ended()
