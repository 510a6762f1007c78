"""The NIXL library behind ``bridge.Agent``: UCX backend, host memory, no progress thread.

Without a progress thread NIXL works only inside calls, so an idle agent costs nothing (with one it takes a third of a core);
``get_new_notifs`` and ``check_xfer_state`` move everything forward. NIXL has no timeout of its own: the transfer's byte
watchdog ends what hangs. Loaded in agent processes alone: a crash of native code ends a connection, not an engine.
"""

import ctypes
import importlib
import importlib.util
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from relay.transfer.nixl.bridge import AgentFailed

PACKAGES = ("nixl_cu13", "nixl_cu12")  # one build a CUDA version; neither needs CUDA for host memory
T = TypeVar("T")


def installed() -> str | None:
    """The package to import, or None."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


class NixlWrite:
    """A posted write."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def done(self) -> bool:
        state = _call("check_xfer_state", lambda: self._agent.check_xfer_state(self._handle))
        if state == "ERR":
            raise AgentFailed("NIXL reports an error of a write")
        if state != "DONE":
            return False
        _call("release_xfer_handle", lambda: self._agent.release_xfer_handle(self._handle))
        return True


class NixlAgent:
    """An agent with one registered region, and after ``join`` one peer."""

    def __init__(self, region: memoryview) -> None:
        """``region`` must live as long as the process. Raises AgentFailed."""
        package = installed()
        if package is None:
            raise AgentFailed("NIXL is not installed")
        nixl = importlib.import_module(package)
        config = nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        self._agent: Any = _call("nixl_agent", lambda: nixl.nixl_agent(f"relay-{secrets.token_hex(8)}", config))
        if "UCX" not in self._agent.backends:
            raise AgentFailed("NIXL has no UCX backend")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        descriptors = [(self.address, len(region), 0, "")]
        _call("register_memory", lambda: self._agent.register_memory(descriptors, "DRAM"))
        self._peer = ""
        self._peer_address = 0

    def metadata(self) -> bytes:
        """What a peer needs to join."""
        raw: bytes = _call("get_agent_metadata", self._agent.get_agent_metadata)
        return raw

    def join(self, metadata: bytes, address: int) -> None:
        """Get to know the peer, whose region begins at ``address``. Raises AgentFailed."""
        name = _call("add_remote_agent", lambda: self._agent.add_remote_agent(metadata))
        self._peer = name.decode() if isinstance(name, bytes) else name  # bytes, whatever its annotation says
        self._peer_address = address
        _call("make_connection", lambda: self._agent.make_connection(self._peer))

    def write(self, offset: int, size: int, note: bytes) -> NixlWrite:
        agent = self._agent

        def post() -> tuple[Any, str]:
            local = agent.get_xfer_descs([(self.address + offset, size, 0)], "DRAM")
            remote = agent.get_xfer_descs([(self._peer_address + offset, size, 0)], "DRAM")
            handle = agent.initialize_xfer("WRITE", local, remote, self._peer, note)
            return handle, agent.transfer(handle)

        handle, state = _call("transfer", post)
        if state == "ERR":
            raise AgentFailed("NIXL refused a write")
        return NixlWrite(agent, handle)

    def notify(self, note: bytes) -> None:
        _call("send_notif", lambda: self._agent.send_notif(self._peer, note))

    def notes(self) -> list[bytes]:
        notes: list[bytes] = _call("get_new_notifs", self._agent.get_new_notifs).get(self._peer, [])
        return notes


def _call(name: str, call: Callable[[], T]) -> T:
    """NIXL's exceptions have no base class of their own."""
    try:
        return call()
    except Exception as error:
        raise AgentFailed(f"NIXL {name}: {type(error).__name__}: {error}") from error
