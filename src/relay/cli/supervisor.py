"""``relay serve --gateways N``: owns the port, the workers and the gateways, and holds no request, so it has nothing to lose."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import uvloop

from relay.cli.banner import say_banner
from relay.cli.console import Console
from relay.cli.gateway_process import encode_config
from relay.cli.listener import open_listener
from relay.cli.server import (
    CONSOLE_WAIT_S,
    STOP_GRACE_S,
    Phases,
    WorkerLog,
    context_of,
    found_devices,
    log_to,
    open_served_model,
)
from relay.config import ServeConfig
from relay.errors import PortInUseError, RelayError, StartupError
from relay.ids import WorkerKey
from relay.local.channel import Channel
from relay.local.supervision import (
    Begin,
    GatewayFailed,
    GatewayLife,
    GatewayLives,
    GatewayReady,
    GatewayToSupervisor,
    KillWorker,
    Ping,
    Pong,
    StartWorker,
    WorkerExited,
    WorkerHopeless,
    WorkerPresent,
    WorkersLeave,
)
from relay.local.workers import LocalWorkers
from relay.protocol.messages import EngineExited
from relay.worker.agent import engine_state as process_state

STABLE_S = 5.0  # a gateway that lived so long is started again at once
MAX_DELAY_S = 5.0
FIRST_DELAY_S = 0.1
START_ATTEMPTS = 3  # of a gateway, before all were ever ready
DRAIN_SLACK_S = 5.0
PING_S = 1.0
STOPPED_S = 2.0  # a gateway in state T for so long is dead to its clients
HUNG_S = 15.0  # no answer for so long: its event loop does not turn
logger = logging.getLogger("relay.supervisor")


def run_supervisor(config: ServeConfig) -> int:
    """Serve until a signal; returns the exit code. Raises RelayError for a start that failed; nothing is left running then."""
    console = Console(sys.stderr.fileno())
    log_to(console, config.log_level)
    try:
        with (
            contextlib.closing(open_listener(config.host, config.port)) as listener,
            contextlib.closing(Supervisor(config, listener, console)) as supervisor,
        ):
            return uvloop.run(supervisor.run())
    finally:
        console.finish(CONSOLE_WAIT_S)


class Gateway:
    """One gateway over all its lives. Its workers' listener is ours, so its address stays."""

    def __init__(self, name: str, port: int) -> None:
        """``port`` for its workers; 0 takes a free one. Raises PortInUseError."""
        self.name = name
        try:
            self.listener = open_listener("127.0.0.1", port)
        except PortInUseError as error:
            raise PortInUseError(f"--worker-port: {port}, for {name}, is already in use") from error
        host, port = self.listener.getsockname()[:2]
        self.address = f"tcp://{host}:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.epoch = 0
        self.started_s = 0.0
        self.failures = 0
        self.ready = False
        self.heard_s = 0.0
        self.stopped_s = 0.0  # since when it is in state T; 0: it is not

    def send(self, message: Any) -> None:
        if self.channel is not None:
            self.channel.send(message)


class Supervisor:
    """``run`` returns when everything has ended."""

    def __init__(self, config: ServeConfig, listener: socket.socket, console: Console) -> None:
        self._config = config
        self._listener = listener
        self._console = console
        self._phases = Phases()
        self._log = WorkerLog(console, hold=config.log_level != "debug")
        ports = [config.worker_port + index if config.worker_port else 0 for index in range(config.gateways)]
        self._gateways = [Gateway(f"gateway-{index}", port) for index, port in enumerate(ports)]
        self._workers: LocalWorkers
        self._present: dict[str, int] = {}  # worker → newest incarnation
        self._exited: dict[str, WorkerExited] = {}  # of those, the ones that have ended
        self._kept_out: dict[str, None] = {}  # drained for good by an operator
        self._epoch = 0
        self._complete = False
        self._max_model_len = 0
        self._stopping = False
        self._signals = 0
        self._failure: RelayError | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        config = self._config
        with self._phases.measure("model"):
            model = await asyncio.to_thread(open_served_model, config)
        context_of(config, model)
        devices = await asyncio.to_thread(found_devices, config, model)
        self._workers = LocalWorkers(
            config.worker,
            str(model.pack.path),
            model.digest,
            self._log.line,
            slots=config.slots,
            perturb=config.perturbations,
        )
        self._workers.gateways = config.worker_addresses or [gateway.address for gateway in self._gateways]
        self._workers.orphan_hold_s = config.orphan_hold_s
        self._workers.attach(self)
        try:
            with self._phases.measure("gateways and workers"):
                for gateway in self._gateways:
                    await self._start(gateway)
                await self._wait(lambda: self._complete or self._signals > 0)
            if self._complete:
                self._spawn(self._look_after())
                self._log.release()
                say_banner(config, self._listener, model, self._max_model_len, self._phases.line(), devices)
                await self._wait(lambda: self._signals > 0)
        finally:
            await self._stop()
        return 0

    async def _wait(self, condition: Any) -> None:
        """Until ``condition``; raises what made the start fail."""
        while self._failure is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._console.say("relay: finishing running requests; a second signal ends them")
        self._changed.set()

    # --- gateways -------------------------------------------------------------------------------------------------

    async def _start(self, gateway: Gateway) -> None:
        self._epoch += 1
        gateway.epoch, gateway.started_s, gateway.ready = self._epoch, time.monotonic(), False
        gateway.stopped_s = 0.0
        ours, theirs = socket.socketpair()
        descriptors = {"supervisor": theirs, "http": self._listener, "workers": gateway.listener}
        command = [sys.executable, "-m", "relay.cli.gateway_process", "--parent", str(os.getpid())]
        for name, end in descriptors.items():
            command += [f"--{name}", str(end.fileno())]
        with theirs:
            gateway.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[end.fileno() for end in descriptors.values()],
                start_new_session=True,
            )
        epoch = gateway.epoch
        channel = Channel(GatewayToSupervisor, lambda message: self._received(gateway, epoch, message), lambda: None)
        await channel.open(ours)
        gateway.channel = channel
        present = [WorkerPresent(worker, incarnation) for worker, incarnation in self._present.items()]
        config = encode_config(self._config)
        exited, kept_out = list(self._exited.values()), list(self._kept_out)
        begin = Begin(gateway.name, epoch, config, self._complete, self._max_model_len, present, exited, kept_out)
        channel.send(begin)
        self._spawn(self._watch(gateway, gateway.process, channel))
        self._tell_lives()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, gateway: Gateway, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        """Until the process ends; then another life of it begins."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        code = process.wait()
        channel.close()
        if gateway.process is process:
            gateway.process = gateway.channel = None
        self._changed.set()
        if self._stopping:
            return
        how = f"signal {-code}" if code < 0 else f"status {code}"
        gateway.failures = 0 if time.monotonic() - gateway.started_s >= STABLE_S else gateway.failures + 1
        if not self._complete and gateway.failures >= START_ATTEMPTS:
            self._failure = self._failure or StartupError(f"{gateway.name} cannot start (exited with {how})")
            return
        logger.warning("restarting %s: exited with %s", gateway.name, how)
        if gateway.failures > 1:
            await asyncio.sleep(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (gateway.failures - 2)))
        if not self._stopping:
            await self._start(gateway)

    async def _look_after(self) -> None:
        """Kill gateways that stand still: their clients go on elsewhere. Our own stalls are nobody's death."""
        last_s = time.monotonic()
        while not self._stopping:
            await asyncio.sleep(PING_S)
            now_s = time.monotonic()
            late_s, last_s = now_s - last_s - PING_S, now_s
            for gateway in self._gateways:
                if gateway.process is None or not gateway.ready:
                    continue
                gateway.send(Ping())
                if late_s > PING_S:
                    gateway.heard_s, gateway.stopped_s = now_s, 0.0
                frozen = process_state(gateway.process.pid) in ("T", "t")
                gateway.stopped_s = (gateway.stopped_s or now_s) if frozen else 0.0
                why = ""
                if gateway.stopped_s and now_s - gateway.stopped_s >= STOPPED_S - PING_S:
                    why = "is stopped"
                elif now_s - gateway.heard_s >= HUNG_S:
                    why = f"has not answered for {now_s - gateway.heard_s:.0f} s"
                if why:
                    logger.warning("killing %s: it %s", gateway.name, why)
                    gateway.process.kill()

    def _tell_lives(self) -> None:
        lives = [GatewayLife(g.name, g.epoch, g.process.pid) for g in self._gateways if g.process is not None]
        self._tell(GatewayLives(lives))

    def _tell(self, message: Any, *, but: Gateway | None = None) -> None:
        for gateway in self._gateways:
            if gateway is not but:
                gateway.send(message)

    def _received(self, gateway: Gateway, epoch: int, message: Any) -> None:
        if gateway.epoch != epoch or self._stopping:
            return
        match message:
            case StartWorker():
                self._start_worker(gateway, message)
            case Pong():
                gateway.heard_s = time.monotonic()
            case KillWorker(worker, incarnation, word):
                self._workers.stop(WorkerKey(worker, incarnation), kill=True, word=word)
            case WorkersLeave(workers, stay_out):
                for worker in workers or list(self._present):
                    self._kept_out.pop(worker, None)
                    if stay_out:
                        self._kept_out[worker] = None
                self._tell(message, but=gateway)
            case GatewayReady(max_model_len):
                gateway.ready, gateway.heard_s = True, time.monotonic()
                self._max_model_len = self._max_model_len or max_model_len
                self._complete = self._complete or all(each.ready for each in self._gateways)
                self._changed.set()
            case WorkerHopeless(worker, status, reason):
                key = WorkerKey(worker, self._present.get(worker, 0))
                self._failure = self._failure or self._workers.explain(key, status, reason)
                self._changed.set()
            case GatewayFailed(exit_code, text):
                kinds = {kind.exit_code: kind for kind in RelayError.__subclasses__()}
                self._failure = self._failure or kinds.get(exit_code, StartupError)(text)
                self._changed.set()

    # --- workers --------------------------------------------------------------------------------------------------

    def _start_worker(self, gateway: Gateway, order: StartWorker) -> None:
        worker, present = order.worker, self._present.get(order.worker, 0)
        if order.incarnation <= present:
            gateway.send(WorkerPresent(worker, present))
            if worker in self._exited:
                gateway.send(self._exited[worker])
            return
        if present and worker not in self._exited:
            self._workers.stop(WorkerKey(worker, present), kill=True)
        self._present[worker] = order.incarnation
        self._exited.pop(worker, None)
        role = next((role for name, role in self._config.slots if name == worker), None)
        if role is not None:
            self._workers.start(WorkerKey(worker, order.incarnation), role)
            self._tell(WorkerPresent(worker, order.incarnation), but=gateway)

    def launcher_exited(
        self, worker: WorkerKey, status: int | None, signal: int | None, reason: str, engine: EngineExited | None
    ) -> None:
        """A worker's processes have ended: everybody is told before anybody can ask for the next life."""
        message = WorkerExited(worker.worker, worker.incarnation, status, signal, reason, engine)
        if self._present.get(worker.worker) == worker.incarnation:
            self._exited[worker.worker] = message
        self._tell(message)

    # --- the end --------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Gateways finish their requests, then everything ends; a second signal ends it at once."""
        self._stopping = True
        hurry = self._failure is not None or self._signals > 1
        deadline_s = time.monotonic() + (0.0 if hurry else self._config.grace_s + DRAIN_SLACK_S)
        self._signal_gateways(signal.SIGKILL if hurry else signal.SIGTERM)
        while any(gateway.process is not None for gateway in self._gateways):
            self._changed.clear()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._signals > 1:
                self._signal_gateways(signal.SIGKILL)
                left_s = STOP_GRACE_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        await self._workers.close(0.0 if hurry or self._signals > 1 else STOP_GRACE_S)

    def close(self) -> None:
        """After ``run``, also where it raised before anything was started."""
        for gateway in self._gateways:
            gateway.listener.close()

    def _signal_gateways(self, number: signal.Signals) -> None:
        for gateway in self._gateways:
            if gateway.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    gateway.process.send_signal(number)
