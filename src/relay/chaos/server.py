"""``relay serve`` as a child process: started on free ports, its output read, its processes looked at through /proc."""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import relay
from relay.chaos.client import get_json
from relay.errors import StartupError

MODEL_NAME = "chaos"  # in every request, whatever model it is
START_S = 180.0
STOP_S = 60.0
LAST_LINES = 400
STATUS_TRIES = 20
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_parent(parent: int) -> None:
    """In the child before it runs: nothing of a run survives it, however and whenever it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports in a row that nobody listens on now, from below the range the kernel hands out by itself: they
    stay free until they are used."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(200):
        port = 10_000 + int.from_bytes(os.urandom(2), "little") % max(1, low - 10_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for each in range(port, port + count):
                probe = probes.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", each))
            return port
    raise StartupError("no free port found")


class Server:
    """One run of ``relay serve``. ``start`` returns when it is ready; ``stop`` ends it and says with which exit code."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._banner: asyncio.Future[str] | None = None
        self.log: deque[str] = deque(maxlen=LAST_LINES)
        self.host, self.port = "", 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Raises StartupError with the server's own last line, and its exit code if it ended with one."""
        command = [sys.executable, "-m", "relay.cli.main", "serve", "--port", "0", "--served-model-name", MODEL_NAME]
        command += [*self._arguments]
        source = str(Path(relay.__file__).parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        self._banner = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            preexec_fn=partial(_die_with_parent, os.getpid()),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._reading = [
            asyncio.ensure_future(self._read(self._process.stdout, self._look_for_banner)),
            asyncio.ensure_future(self._read(self._process.stderr, self.log.append)),
        ]
        ended = asyncio.ensure_future(self._process.wait())
        waits: set[asyncio.Future[Any]] = {ended, self._banner}
        await asyncio.wait(waits, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._banner.done():
            ended.cancel()
            await self.kill()
            raise _not_started(self.log[-1] if self.log else "it said nothing", self._process.returncode)
        ended.cancel()
        self.host, _, port = self._banner.result().removeprefix("http://").rpartition(":")
        self.port = int(port)

    async def status(self) -> dict[str, Any]:
        """What ``relay status --json`` prints. Raises OSError, ValueError, EOFError or TimeoutError."""
        return await get_json(self.host, self.port, "/status")

    async def statuses(self, gateways: int) -> list[dict[str, Any]]:
        """Of every gateway that answers within some tries: which one takes a connection is the kernel's choice."""
        found: dict[str, dict[str, Any]] = {}
        for _ in range(STATUS_TRIES * gateways):
            status = await self.status()
            found[status.get("gateway", "")] = status
            if len(found) == gateways:
                break
        return list(found.values())

    async def metric(self, name: str) -> int:
        """Of /metrics, summed over labels; 0 where it has not appeared."""
        text = await asyncio.to_thread(_get_text, self.host, self.port, "/metrics")
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
        return int(sum(float(value) for value in found))

    async def stop(self) -> int:
        """SIGTERM, then wait; the exit code, -9 if it had to be killed."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        await asyncio.gather(*self._reading)
        assert self._process.returncode is not None
        return self._process.returncode

    async def kill(self) -> None:
        """SIGKILL, if it still runs: its workers end with it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _read(self, stream: asyncio.StreamReader, take: Any) -> None:
        async for line in stream:
            take(line.decode(errors="replace").rstrip())

    def _look_for_banner(self, line: str) -> None:
        found = re.search(r"at (http://\S+)", line)
        if found and self._banner is not None and not self._banner.done():
            self._banner.set_result(found[1])


def _not_started(last_line: str, status: int | None) -> StartupError:
    """``relay chaos`` ends as ``relay serve`` would have; with its own code if that was killed or hung."""
    error = StartupError(f"relay serve did not start: {last_line.removeprefix('relay: ')}")
    if status is not None and status > 0:
        error.exit_code = status
    return error


def _get_text(host: str, port: int, path: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as response:
        text: str = response.read().decode()
    return text
