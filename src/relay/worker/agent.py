"""The agent process: ``python -m relay.worker.agent --spec FILE_OR_JSON``.

Starts the engine at once, then beats to the gateways from a process that shares no thread, lock or loop with the data path.
Either process dying ends the other: the engine has PR_SET_PDEATHSIG, the agent holds the engine's pidfd. The agent ends too when a
gateway's connection ends. (It sets no PDEATHSIG of its own: that fires when the *thread* that started it ends, which a launcher
may let happen.)
SIGTERM drains the engine; a second one kills it.
"""

import argparse
import os
import signal
import sys
import time

from relay.worker.status_page import StatusPage

HEARTBEAT_NS = 200_000_000
FLUSH_S = 0.5


def start_engine(spec_text: str, status_path: str) -> int:
    """Pid of a new engine process that ends with this one."""
    arguments = ["--spec", spec_text, "--agent-pid", str(os.getpid()), "--status", status_path]
    command = [sys.executable, "-m", "relay.worker.engine_process", *arguments]
    return os.posix_spawn(sys.executable, command, os.environ)


def engine_state(pid: int) -> str:
    """The kernel's state letter of a process; "X" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def main() -> None:
    parser = argparse.ArgumentParser(prog="relay-agent")
    parser.add_argument("--spec", required=True, help="WorkerSpec as JSON, or the path of a file holding it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's business
    page, status_path = StatusPage.create()
    engine = start_engine(arguments.spec, status_path)
    # Everything below is imported while the engine starts.
    from relay.errors import UsageError
    from relay.worker.agent_loop import AgentLoop
    from relay.worker.spec import decode_spec

    try:
        spec = decode_spec(arguments.spec)
    except UsageError:
        _, status = os.waitpid(engine, 0)  # the engine says what is wrong with the spec
        sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit(AgentLoop(spec, engine, page, time.monotonic_ns).run())


if __name__ == "__main__":
    main()
