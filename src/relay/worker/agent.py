"""The agent process: ``python -m relay.worker.agent --spec FILE_OR_JSON [--launcher PID]``.

Starts the engine at once, then beats to the gateways from a process that shares no thread, lock or loop with the data path; only a
thread beside its loop waits for a lock that the engine holds for life (``death_watch.py``).
Either process dying ends the other: the engine has PR_SET_PDEATHSIG, the agent holds the engine's pidfd. The agent ends too when a
gateway's connection ends. With ``--launcher`` it has PR_SET_PDEATHSIG too, so that it ends with its launcher even while it is
stopped. That signal comes when the *thread* that started the agent ends: only a launcher whose starting thread lives as long as
itself may ask for it.
SIGTERM drains the engine; a second one kills it.
"""

import argparse
import os
import signal
import sys
import time

from relay.worker.host import die_with_parent
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
    parser.add_argument("--launcher", type=int, default=0, help="end with this parent process")
    arguments = parser.parse_args()
    if arguments.launcher and not die_with_parent(arguments.launcher):
        sys.exit("the launcher ended before its agent started")
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
