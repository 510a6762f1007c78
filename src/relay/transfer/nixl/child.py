"""The agent process: ``python -m relay.transfer.nixl.child ROLE MEMORY FRAMES SPACE CONTROL``, the last four inherited descriptors.

It maps its engine's ring, registers it with NIXL, joins the peer's agent and moves records until its engine ends it: by
SIGKILL, or by the end of the control socket. One a connection, so that its end is the end of every write a peer could make
to that ring, and to no other.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Literal, Protocol

from relay.transfer.channel import ChannelClosed
from relay.transfer.frame import FrameError
from relay.transfer.nixl.agent import NixlAgent
from relay.transfer.nixl.bridge import Agent, AgentFailed, SourceBridge, TargetBridge
from relay.transfer.nixl.talk import Failed, Joined, Offer, listen, tell
from relay.transfer.shm import Descriptor, Ring

Role = Literal["source", "target"]
SHORTEST_NAP_S = 0.0001
LONGEST_NAP_S = 0.004  # what the first frame after a pause may wait at D; NIXL has nothing to sleep on
REST_S = 0.25  # while only the engine can begin something; NIXL's own keepalive goes on
_PR_SET_PDEATHSIG = 1


class JoiningAgent(Agent, Protocol):
    """An agent before and after it knows its peer."""

    @property
    def address(self) -> int: ...

    def metadata(self) -> bytes: ...

    def join(self, metadata: bytes, address: int) -> None: ...


def serve(role: Role, ring: Ring, control: socket.socket, make_agent: Callable[[memoryview], JoiningAgent]) -> None:
    """Join and move records until the engine closes ``control``. What ends it otherwise is told there, and on stderr."""
    try:
        agent = make_agent(ring.bytes)
        tell(control, Offer(agent.metadata(), agent.address))
        theirs = listen(control, Offer)
        agent.join(theirs.metadata, theirs.address)
        tell(control, Joined())
        bridge = SourceBridge(agent, ring.bytes) if role == "source" else TargetBridge(agent, ring.bytes)
        told, tells = (ring.frames, ring.space) if role == "source" else (ring.space, ring.frames)
        _move(bridge, control, told, tells)
    except ChannelClosed:
        return  # the engine ended it
    except (AgentFailed, FrameError) as error:
        print(f"NIXL agent process ({role}): {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(ChannelClosed):  # the engine may have ended at the same time
            tell(control, Failed(str(error)))


def _move(bridge: SourceBridge | TargetBridge, control: socket.socket, told: Descriptor, tells: Descriptor) -> None:
    """Naps while nothing happens grow, so that an idle connection takes no processor time from compute."""
    nap_s = SHORTEST_NAP_S
    while True:
        ready, _, _ = select.select([told.number, control.fileno()], [], [], nap_s)
        if control.fileno() in ready:
            return  # nothing more is said there: it has ended
        count = os.eventfd_read(told.number) if told.number in ready else 0
        if count:
            bridge.advance(count)
        moved = bridge.poll()
        if moved:
            os.eventfd_write(tells.number, moved)
        nap_s = SHORTEST_NAP_S if moved or count or bridge.busy else min(nap_s * 2, LONGEST_NAP_S)
        if bridge.resting:
            nap_s = REST_S


def _low(number: int) -> int:
    lowest = os.dup(number)
    os.close(number)
    return lowest


def main() -> None:
    role, *numbers = sys.argv[1:]
    # They keep the engine's numbers, which may be too high for select; the lowest free ones are not.
    memory, frames, space, control_number = [_low(int(number)) for number in numbers]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also ends it inside a native call that never returns
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    os.dup2(2, 1)  # NIXL logs to stdout
    control = socket.socket(fileno=control_number)
    ring = Ring(Descriptor(memory), Descriptor(frames), Descriptor(space))
    serve("source" if role == "source" else "target", ring, control, NixlAgent)
    os._exit(0)  # tearing an agent down politely may wait for a peer that is frozen


if __name__ == "__main__":
    main()
