"""A launcher whose processes are not ours: specs cross a socket as JSON to a host process, ends come back the same way.

Nothing is inherited, no pidfd is watched, every answer takes a round trip: what the local launcher could take for granted.
"""

import asyncio
import json
import sys

import msgspec

from relay.cluster.launcher import ExitCallback, LaunchExit, LaunchSpec

HOST = r"""
import json, os, signal, subprocess, sys, threading
children, lock = {}, threading.Lock()

def say(**answer):
    with lock:
        print(json.dumps(answer), flush=True)

def watch(name, process):
    lines = []
    for line in process.stdout:
        line = line.decode(errors="replace").rstrip("\n")
        lines.append(line)
        say(line=line, name=name)
    code = process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    del children[name]
    say(name=name, status=None if code < 0 else code, signal=-code if code < 0 else None, last_lines=lines[-20:])

for line in sys.stdin:
    order = json.loads(line)
    if "spec" in order:
        spec = order["spec"]
        try:
            process = subprocess.Popen(spec["argv"], env={**os.environ, **spec.get("environment", {})}, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            say(name=spec["name"], reason=f"cannot start {spec['argv'][0]}: {error.strerror}")
            continue
        children[spec["name"]] = process
        threading.Thread(target=watch, args=(spec["name"], process)).start()
    else:
        process = children.get(order["stop"])
        if process is not None:
            if order["kill"]:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.terminate()
"""


class RemoteLauncher:
    """Implements ``Launcher`` by talking to one host process."""

    def __init__(self, on_exit: ExitCallback, on_line) -> None:
        self._on_exit = on_exit
        self._on_line = on_line
        self._running: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._talk())

    def start(self, spec: LaunchSpec) -> None:
        if spec.name in self._running:
            raise ValueError(f"{spec.name} is running")
        self._running.add(spec.name)
        self._empty.clear()
        self._outbox.put_nowait(json.dumps({"spec": msgspec.to_builtins(spec)}).encode() + b"\n")

    def stop(self, name: str, *, kill: bool) -> None:
        if name in self._running:
            self._outbox.put_nowait(json.dumps({"stop": name, "kill": kill}).encode() + b"\n")

    async def close(self, grace_s: float) -> None:
        for kill, wait_s in ((False, grace_s), (True, 10.0)):
            for name in self._running:
                self.stop(name, kill=kill)
            try:
                await asyncio.wait_for(self._empty.wait(), wait_s)
                break
            except TimeoutError:
                continue
        self._outbox.put_nowait(None)
        await self._task

    async def _talk(self) -> None:
        host = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HOST, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        reading = asyncio.ensure_future(self._read(host.stdout))
        while (data := await self._outbox.get()) is not None:
            host.stdin.write(data)
        host.stdin.close()
        await reading
        await host.wait()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            answer = json.loads(line)
            if "line" in answer:
                self._on_line(answer["name"], answer["line"])
                continue
            self._running.discard(answer["name"])
            if not self._running:
                self._empty.set()
            self._on_exit(msgspec.convert(answer, LaunchExit))
