"""A gateway's launcher when a supervisor has the workers: asks it for incarnations, and passes on what it tells."""

from collections.abc import Sequence

from relay.control.shell import GatewayShell
from relay.ids import WorkerKey
from relay.local.channel import Channel
from relay.local.supervision import GatewayLives, KillWorker, StartWorker, WorkerExited, WorkerPresent, WorkersLeave
from relay.protocol.messages import EngineExited, Role

Told = WorkerExited | WorkerPresent | GatewayLives | WorkersLeave


class SupervisedWorkers:
    """Implements the shell's ``WorkerLauncher``. Workers are everybody's: this gateway's end stops none of them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._shell: GatewayShell | None = None
        self._early: list[Told] = []

    def attach(self, shell: GatewayShell) -> None:
        self._shell = shell
        early, self._early = self._early, []
        for message in early:
            self.told(message)

    def start(self, worker: WorkerKey, role: Role, cause: str = "") -> None:
        self._channel.send(StartWorker(worker.worker, worker.incarnation, role, cause))

    def stop(self, worker: WorkerKey, *, kill: bool, word: EngineExited | None = None) -> None:
        if kill:
            self._channel.send(KillWorker(worker.worker, worker.incarnation, word))

    def leaving(self, workers: Sequence[str], *, stay_out: bool) -> None:
        self._channel.send(WorkersLeave(list(workers), stay_out))

    def told(self, message: Told) -> None:
        """What the supervisor says, to the shell."""
        shell = self._shell
        if shell is None:  # before there is one; bounded by the start
            self._early.append(message)
            return
        match message:
            case WorkerPresent(worker, incarnation):
                shell.worker_started(WorkerKey(worker, incarnation))
            case WorkerExited(worker, incarnation, status, signal, reason, engine):
                shell.launcher_exited(WorkerKey(worker, incarnation), status, signal, reason, engine)
            case GatewayLives(gateways):
                shell.gateways = [{"id": life.id, "epoch": life.epoch, "pid": life.pid} for life in gateways]
            case WorkersLeave(workers, stay_out):
                shell.leave_told(workers, stay_out=stay_out)
