"""From the gateway's "launch decode-0, incarnation 3" to a process: worker specs for the local launcher."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from relay.cluster.launcher import LaunchExit, LaunchSpec
from relay.cluster.local import LocalLauncher
from relay.config import WorkerConfig
from relay.devices import place
from relay.errors import RelayError, StartupError
from relay.ids import WorkerKey
from relay.protocol.messages import EngineExited, Role
from relay.worker.last_word import find_last_word
from relay.worker.spec import WorkerSpec, encode_spec


class ExitListener(Protocol):
    """Who is told of workers' ends: the gateway's shell, or a supervisor."""

    def launcher_exited(
        self, worker: WorkerKey, status: int | None, signal: int | None, reason: str, engine: EngineExited | None
    ) -> None: ...


class LocalWorkers:
    """Implements the shell's ``WorkerLauncher`` with child processes of this one. Call ``attach`` before the first start."""

    def __init__(
        self,
        config: WorkerConfig,
        pack_path: str,
        model_digest: str,
        on_line: Callable[[str, str], None],
        *,
        slots: Sequence[tuple[str, Role]] = (),
        perturb: Mapping[str, str] | None = None,
    ) -> None:
        """``slots``: all workers, so that each knows its devices and how many share them.

        ``perturb``: worker id → perturbation, for ``relay verify --inject`` alone.
        """
        self._devices = place(slots, config.devices, config.by_role) if config.backend == "cuda" else {}
        self._config = config
        self._pack_path = pack_path
        self._model_digest = model_digest
        self._launcher = LocalLauncher(self._exited, on_line)
        self._keys: dict[str, WorkerKey] = {}
        self._words: dict[str, EngineExited] = {}  # of those that run: what whoever has them killed says of them
        self._shell: ExitListener | None = None
        self._last_exits: dict[str, LaunchExit] = {}
        self._perturb = perturb or {}
        self._holders: set[str] = set()  # names of running processes that hold a GPU's weights
        self._secret = secrets.token_hex(8)  # sockets of this cluster's holders
        self.gateway = ""
        self.gateways: list[str] = []  # all of them, where there are several
        self.orphan_hold_s = 0.0

    def attach(self, shell: ExitListener) -> None:
        self._shell = shell

    def start(self, worker: WorkerKey, role: Role) -> None:
        name = _name(worker)
        self._keys[name] = worker
        self._hold_weights(worker, role)
        spec = encode_spec(self._spec(worker, role))
        argv = [sys.executable, "-m", "relay.worker.agent", "--spec", spec, "--launcher", str(os.getpid())]
        self._launcher.start(LaunchSpec(name=name, argv=argv))

    def _hold_weights(self, worker: WorkerKey, role: Role) -> None:
        """Start the process that holds the weights of the worker's GPU, if several share it and it does not run."""
        spec = self._spec(worker, role)
        name = f"weights-{spec.device}"
        if spec.weights_socket and name not in self._holders:
            self._holders.add(name)
            argv = [sys.executable, "-m", "relay.worker.weights_process", "--spec", encode_spec(spec)]
            argv += ["--launcher", str(os.getpid())]
            self._launcher.start(LaunchSpec(name=name, argv=argv))

    def stop(self, worker: WorkerKey, *, kill: bool, word: EngineExited | None = None) -> None:
        """``word`` is passed on with its end, unless its agent leaves one of its own."""
        name = _name(worker)
        if word is not None and name in self._keys:
            self._words.setdefault(name, word)
        self._launcher.stop(name, kill=kill)

    def leaving(self, workers: Sequence[str], *, stay_out: bool) -> None:
        """Nobody else starts these workers."""

    async def close(self, grace_s: float) -> None:
        await self._launcher.close(grace_s)

    def explain(self, worker: WorkerKey, status: int | None, reason: str) -> RelayError:
        """The error of a worker that cannot start: in its own words and with its own exit code where it has any."""
        last = self._last_exits.get(worker.worker)
        words = next((line for line in reversed(last.last_lines if last else ()) if line.strip()), "")
        kinds = {kind.exit_code: kind for kind in RelayError.__subclasses__()}
        if words and status in kinds:
            return kinds[status](words)
        return StartupError(f"{worker.worker} cannot start ({reason})" + (f": {words}" if words else ""))

    def _spec(self, worker: WorkerKey, role: Role) -> WorkerSpec:
        config = self._config
        devices = self._devices.get(worker.worker, config.devices[:1])
        device = devices[0]
        sharers = max(1, list(self._devices.values()).count(devices))
        shared = config.backend == "cuda" and sharers > 1 and len(devices) == 1  # a rank loads its own part
        return WorkerSpec(
            worker=worker.worker,
            incarnation=worker.incarnation,
            role=role,
            gateways=self.gateways or [self.gateway],
            orphan_hold_s=self.orphan_hold_s,
            pack_path=self._pack_path,
            model_digest=self._model_digest,
            backend=config.backend,
            threads=config.threads,
            device=device,
            ranks=config.by_role.ranks,
            rank_devices=list(devices) if len(devices) > 1 else [],
            gpu_memory_fraction=config.gpu_memory_utilization / sharers,
            weights_socket=f"relay-weights-{self._secret}-{device}" if shared else "",
            gpu_sharers=sharers,
            kv_cache_dtype=config.resolved_kv_dtype,
            quantization=config.quantization,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            growth_tokens=config.growth_tokens,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            max_model_len=config.max_model_len or 0,
            transport=config.transport,
            perturb=self._perturb.get(worker.worker, ""),
            record=str(config.record.absolute()) if config.record else "",
        )

    def _exited(self, end: LaunchExit) -> None:
        if end.name in self._holders:
            self._holders.discard(end.name)  # its workers end too; the first that is started again starts another
            return
        worker = self._keys.pop(end.name)
        self._last_exits[worker.worker] = end
        given = self._words.pop(end.name, None)
        if self._shell is not None:
            word = find_last_word(end.last_lines) or given
            self._shell.launcher_exited(worker, end.status, end.signal, end.reason, word)


def _name(worker: WorkerKey) -> str:
    return f"{worker.worker}.{worker.incarnation}"
