"""Who starts and ends worker processes, as the gateway's shell sees it."""

from collections.abc import Sequence
from typing import Protocol

from relay.ids import WorkerKey
from relay.protocol.messages import EngineExited, Role


class WorkerLauncher(Protocol):
    """What the shell asks of whoever starts processes. Ends are told by ``GatewayShell.launcher_exited``."""

    def start(self, worker: WorkerKey, role: Role) -> None: ...

    def stop(self, worker: WorkerKey, *, kill: bool, word: EngineExited | None = None) -> None: ...

    def leaving(self, workers: Sequence[str], *, stay_out: bool) -> None:
        """An operator's order was taken: whoever else starts ``workers`` (empty: all) must know."""
        ...
