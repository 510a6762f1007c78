"""Workers as child processes of this one, watched through pidfds in the event loop."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable

from relay.cluster.launcher import ExitCallback, LaunchExit, LaunchSpec

LAST_LINES = 20
MAX_LINE_BYTES = 8192
OUTPUT_WAIT_S = 0.05


LineCallback = Callable[[str, str], None]  # (name of the launch, one line without its end)


class _Output(asyncio.Protocol):
    """The merged stdout and stderr of one child, split into lines and passed on; the last lines are kept."""

    def __init__(self, name: str, on_line: LineCallback) -> None:
        self._name = name
        self._on_line = on_line
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._line(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        self.ended.set()

    def _line(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r")
        self.lines.append(text)
        self._on_line(self._name, text)


class _Child:
    """One running launch."""

    def __init__(self, spec: LaunchSpec, process: "subprocess.Popen[bytes]", pidfd: int) -> None:
        self.spec = spec
        self.process = process
        self.pidfd = pidfd
        self.reaped = False
        self.watching: asyncio.Task[None] | None = None


class LocalLauncher:
    """Implements ``launcher.Launcher``. Each child leads a process group, so that a kill reaches whatever it started.

    ``on_line`` gets everything children write, line by line.
    """

    def __init__(self, on_exit: ExitCallback, on_line: LineCallback) -> None:
        self._on_exit = on_exit
        self._on_line = on_line
        self._children: dict[str, _Child] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def start(self, spec: LaunchSpec) -> None:
        if spec.name in self._children:
            raise ValueError(f"{spec.name} is running")
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_end)
            loop.call_soon(
                self._on_exit, LaunchExit(spec.name, reason=f"cannot start {spec.argv[0]}: {error.strerror}")
            )
            return
        finally:
            os.close(write_end)
        child = _Child(spec, process, os.pidfd_open(process.pid))
        self._children[spec.name] = child
        self._empty.clear()
        child.watching = loop.create_task(self._watch(child, read_end))

    def stop(self, name: str, *, kill: bool) -> None:
        child = self._children.get(name)
        if child is None or child.reaped:
            return
        # Not reaped yet, so the pid and its process group are still ours.
        with contextlib.suppress(ProcessLookupError):
            if kill:
                os.killpg(child.process.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)

    async def close(self, grace_s: float) -> None:
        for name in list(self._children):
            self.stop(name, kill=False)
        try:
            await asyncio.wait_for(self._empty.wait(), grace_s)
        except TimeoutError:
            for name in list(self._children):
                self.stop(name, kill=True)
            await self._empty.wait()

    async def _watch(self, child: _Child, read_end: int) -> None:
        loop = asyncio.get_running_loop()
        spec = child.spec
        output = _Output(spec.name, self._on_line)
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: output, pipe)
        ended = asyncio.Event()
        loop.add_reader(child.pidfd, ended.set)
        await ended.wait()
        loop.remove_reader(child.pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                child.process.pid, signal.SIGKILL
            )  # what it left behind, while its zombie still holds the group's name
        child.reaped = True
        code = child.process.wait()
        os.close(child.pidfd)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(output.ended.wait(), OUTPUT_WAIT_S)
        transport.close()
        del self._children[spec.name]
        if not self._children:
            self._empty.set()
        status, number = (None, -code) if code < 0 else (code, None)
        self._on_exit(LaunchExit(spec.name, status, number, last_lines=tuple(output.lines)))
