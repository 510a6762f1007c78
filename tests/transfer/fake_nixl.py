"""NIXL without NIXL: agents whose writes land when the fabric says so, and agent processes that are threads."""

import contextlib
import ctypes
import itertools
import socket
import threading

from relay.transfer.nixl.bridge import AgentFailed
from relay.transfer.nixl.child import serve
from relay.transfer.nixl.talk import Joined, Offer, listen, tell
from relay.transfer.nixl.wire import NixlWire

_names = itertools.count()


class Fabric:
    """Every agent there is. Writes land at once, or while ``held`` wait for ``land``; agents that are gone are not written."""

    def __init__(self):
        self.lock = threading.RLock()
        self.agents = {}
        self.pending = []
        self.held = False
        self.latest_first = False  # notifications overtake each other

    def land(self):
        with self.lock:
            pending, self.pending = self.pending, []
            for write in reversed(pending) if self.latest_first else pending:
                write.land()

    def remove(self, agent):
        """As when its process is killed: nothing can land there any more, and its own writes are not read any more."""
        with self.lock:
            self.agents.pop(agent.name, None)
            self.pending = [write for write in self.pending if write.source is not agent]
            agent.region = None


class FakeWrite:
    def __init__(self, fabric, source, target, offset, size, note):
        self.fabric, self.source, self.target = fabric, source, target
        self.offset, self.size, self.note = offset, size, note
        self.landed = False

    def land(self):
        target = self.fabric.agents.get(self.target)
        if target is not None:
            end = self.offset + self.size
            target.region[self.offset : end] = self.source.region[self.offset : end]
            target.inbox.append(self.note)
        self.landed = True

    def done(self):
        return self.landed


class FakeAgent:
    """``bridge.Agent`` and what comes before it."""

    def __init__(self, fabric, region):
        self.fabric = fabric
        self.region = region
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self.name = f"agent-{next(_names)}".encode()
        self.inbox = []
        self.peer = None
        fabric.agents[self.name] = self

    def metadata(self):
        return self.name

    def join(self, metadata, address):
        self.peer = bytes(metadata)
        if self.peer not in self.fabric.agents:
            raise AgentFailed("no such agent")
        assert self.fabric.agents[self.peer].address == address

    def write(self, offset, size, note):
        with self.fabric.lock:
            write = FakeWrite(self.fabric, self, self.peer, offset, size, note)
            self.fabric.pending.append(write)
        return write

    def notify(self, note):
        with self.fabric.lock:
            peer = self.fabric.agents.get(self.peer)
            if peer is None:
                raise AgentFailed("the peer is gone")
            peer.inbox.append(note)

    def notes(self):
        if not self.fabric.held:
            self.fabric.land()
        with self.fabric.lock:
            notes, self.inbox = self.inbox, []
            return notes


class FakeProcess:
    """An agent process that is a thread. ``may_end`` cleared: killed and yet there, as inside a driver that does not return."""

    def __init__(self, fabric, role, ring, ended):
        self.fabric = fabric
        self.agent = None
        self.ended = ended
        self.may_end = threading.Event()
        self.may_end.set()
        self.killed = False
        self.control, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=self._run, args=(role, ring), daemon=True).start()

    def offer(self):
        return listen(self.control, Offer)

    def join(self, theirs):
        tell(self.control, theirs)
        listen(self.control, Joined)

    def kill(self):
        self.killed = True
        with contextlib.suppress(OSError):  # it may have ended by itself
            self.control.shutdown(socket.SHUT_RDWR)

    def _run(self, role, ring):
        serve(role, ring, self.theirs, self._make)
        self.may_end.wait()
        if self.agent is not None:
            self.fabric.remove(self.agent)
        self.agent = None
        self.theirs.close()
        self.control.close()
        self.ended()

    def _make(self, region):
        self.agent = FakeAgent(self.fabric, region)
        return self.agent


def fake_wire(fabric, processes=None, **other):
    """A NixlWire on a fabric; its processes are kept in ``processes``."""

    def launch(role, ring, ended):
        process = FakeProcess(fabric, role, ring, ended)
        if processes is not None:
            processes.append(process)
        return process

    return NixlWire(launch=launch, **other)
