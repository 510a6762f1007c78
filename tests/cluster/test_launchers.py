"""What every launcher must do, run against the local one and against a fake remote one."""

import asyncio
import os
import sys

import pytest
from remote import RemoteLauncher

from relay.cluster.launcher import LaunchExit, LaunchSpec
from relay.cluster.local import LocalLauncher

LAUNCHERS = [LocalLauncher, RemoteLauncher]


class Bench:
    """A launcher, what it reported, and waiting for reports."""

    def __init__(self, kind) -> None:
        self.exits: dict[str, LaunchExit] = {}
        self.lines: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        self.launcher = kind(self._exited, self._line)

    def _exited(self, end: LaunchExit) -> None:
        assert end.name not in self.exits, "reported twice"
        self.exits[end.name] = end
        self.changed.set()

    def _line(self, name: str, text: str) -> None:
        self.lines.append((name, text))
        self.changed.set()

    def start(self, name: str, code: str, **environment: str) -> None:
        self.launcher.start(LaunchSpec(name=name, argv=[sys.executable, "-c", code], environment=environment))

    async def exit_of(self, name: str) -> LaunchExit:
        while name not in self.exits:
            await self.changed.wait()
            self.changed.clear()
        return self.exits[name]

    async def line(self, text: str) -> str:
        while True:
            for _, line in self.lines:
                if line.startswith(text):
                    return line
            await self.changed.wait()
            self.changed.clear()


def with_bench(kind, scenario) -> None:
    async def body() -> None:
        bench = Bench(kind)
        try:
            await scenario(bench)
        finally:
            await bench.launcher.close(1.0)

    asyncio.run(asyncio.wait_for(body(), 30))


@pytest.fixture(params=LAUNCHERS, ids=["local", "remote"])
def kind(request):
    return request.param


def test_status_signal_and_output(kind) -> None:
    async def scenario(bench: Bench) -> None:
        bench.start("a.1", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
        bench.start("b.1", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        a, b = await bench.exit_of("a.1"), await bench.exit_of("b.1")
        assert (a.status, a.signal) == (7, None)
        assert set(a.last_lines) == {"out", "err"}
        assert ("a.1", "out") in bench.lines
        assert (b.status, b.signal) == (None, 11)

    with_bench(kind, scenario)


def test_what_cannot_start_is_an_exit_with_a_reason(kind) -> None:
    async def scenario(bench: Bench) -> None:
        bench.launcher.start(LaunchSpec(name="a.1", argv=["/nonexistent/program"]))
        assert "a.1" not in bench.exits, "reported from within start"
        end = await bench.exit_of("a.1")
        assert end.reason
        assert end.status is None
        assert end.signal is None

    with_bench(kind, scenario)


def test_stop_asks_and_kill_forces(kind) -> None:
    async def scenario(bench: Bench) -> None:
        polite = (
            "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(3));"
            "print('up', flush=True); time.sleep(60)"
        )
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf up', flush=True); time.sleep(60)"
        bench.start("a.1", polite)
        bench.start("b.1", deaf)
        await bench.line("up")
        await bench.line("deaf up")
        bench.launcher.stop("a.1", kill=False)
        bench.launcher.stop("b.1", kill=False)
        assert (await bench.exit_of("a.1")).status == 3
        assert "b.1" not in bench.exits
        bench.launcher.stop("b.1", kill=True)
        assert (await bench.exit_of("b.1")).signal == 9
        bench.launcher.stop("b.1", kill=True)
        bench.launcher.stop("unknown", kill=True)

    with_bench(kind, scenario)


def test_a_kill_reaches_grandchildren(kind) -> None:
    async def scenario(bench: Bench) -> None:
        code = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print('child', child.pid, flush=True); time.sleep(60)"
        )
        bench.start("a.1", code)
        grandchild = int((await bench.line("child")).split()[1])
        bench.launcher.stop("a.1", kill=True)
        await bench.exit_of("a.1")
        while _running(grandchild):
            await asyncio.sleep(0.01)

    with_bench(kind, scenario)


def test_close_leaves_nothing(kind) -> None:
    async def scenario(bench: Bench) -> None:
        for index in range(3):
            bench.start(
                f"w-{index}.1",
                "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                "print('pid', os.getpid(), flush=True); time.sleep(60)",
            )
        while len(bench.lines) < 3:
            await asyncio.sleep(0.01)
        pids = [int(text.split()[1]) for _, text in bench.lines]
        await bench.launcher.close(0.1)
        assert set(bench.exits) == {"w-0.1", "w-1.1", "w-2.1"}
        assert not any(_running(pid) for pid in pids)

    with_bench(kind, scenario)


def test_names_are_unique_while_running(kind) -> None:
    async def scenario(bench: Bench) -> None:
        bench.start("a.1", "import time; time.sleep(60)")
        with pytest.raises(ValueError, match=r"a\.1 is running"):
            bench.start("a.1", "pass")

    with_bench(kind, scenario)


def test_environment_is_added_and_descriptors_are_not_inherited(kind) -> None:
    async def scenario(bench: Bench) -> None:
        read_end, write_end = os.pipe()
        os.set_inheritable(write_end, True)
        code = "import os; print('fds', sorted(map(int, os.listdir('/proc/self/fd')))[-1], os.environ['RELAY_TEST'])"
        bench.start("a.1", code, RELAY_TEST="x")
        end = await bench.exit_of("a.1")
        os.close(read_end)
        os.close(write_end)
        _, highest, value = end.last_lines[-1].split()
        assert int(highest) <= 3  # 3 is listdir's own
        assert value == "x"

    with_bench(kind, scenario)


def test_a_long_line_is_cut() -> None:
    async def scenario(bench: Bench) -> None:
        bench.start("a.1", "print('x' * 100000)")
        await bench.exit_of("a.1")
        assert max(len(line) for _, line in bench.lines) <= 8192

    with_bench(LocalLauncher, scenario)


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
