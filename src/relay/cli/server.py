"""One run of ``relay serve``: listener, gateway, workers, HTTP, signals, and the end of all of them."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvloop

from relay.cli.banner import say_banner
from relay.cli.console import Console
from relay.cli.listener import open_listener
from relay.config import ServeConfig
from relay.control.contract import ModelInfo
from relay.control.core import GatewayCore
from relay.control.record import GatewayRecorder
from relay.control.shell import GatewayShell
from relay.errors import DoesNotFitError, PortInUseError, StartupError, UsageError
from relay.local.workers import LocalWorkers

if TYPE_CHECKING:
    from relay.models.store import LoadedModel

STOP_GRACE_S = 3.0
HELD_LINES = 200
CONSOLE_WAIT_S = 1.0


def run_server(config: ServeConfig) -> int:
    """Serve until a signal; returns the exit code. Raises RelayError for a start that failed; nothing is left running then."""
    console = Console(sys.stderr.fileno())
    log_to(console, config.log_level)
    try:
        with contextlib.closing(open_listener(config.host, config.port)) as listener:
            return uvloop.run(Server(config, listener, console).run())
    finally:
        console.finish(CONSOLE_WAIT_S)


def log_to(console: Console, log_level: str) -> None:
    """Send this process's log to ``console``."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=log_level.upper(), handlers=[console], format=form, force=True)
    for noisy in ("uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


class Phases:
    """Seconds of each phase of the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{time.monotonic() - self._start:.1f} s ({parts})"


class WorkerLog:
    """Workers' output: held back while the cluster starts, so that a failed start stays one line; then passed to stderr."""

    def __init__(self, console: Console, *, hold: bool) -> None:
        self._console = console
        self._held: deque[str] | None = deque(maxlen=HELD_LINES) if hold else None

    def line(self, name: str, text: str) -> None:
        if self._held is not None:
            self._held.append(f"[{name}] {text}")
        else:
            self._console.say(f"[{name}] {text}")

    def release(self) -> None:
        held, self._held = self._held, None
        for text in held or ():
            self._console.say(text)


class Server:
    """``run`` returns when everything has ended."""

    def __init__(self, config: ServeConfig, listener: socket.socket, console: Console) -> None:
        self._config = config
        self._console = console
        self._listener = listener
        self._phases = Phases()
        self._signals = 0
        self._drain = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        config = self._config
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        with self._phases.measure("model"):
            model = await asyncio.to_thread(open_served_model, config)
        info = model_info(config, model, context_of(config, model))
        devices = await asyncio.to_thread(found_devices, config, model)
        log = WorkerLog(self._console, hold=config.log_level != "debug")
        workers = LocalWorkers(
            config.worker,
            str(model.pack.path),
            model.digest,
            log.line,
            slots=config.slots,
            perturb=config.perturbations,
        )
        folder = config.worker.record
        recorder = GatewayRecorder(folder / f"gateway-{os.getpid()}.relay") if folder else None
        shell = GatewayShell(GatewayCore(config.resolved_control(), info, config.slots), workers, recorder=recorder)
        workers.attach(shell)
        http: HttpServer | None = None
        try:
            workers.gateway = await self._listen(shell)
            started = time.monotonic()
            shell.start()
            with self._phases.measure("api"):
                app = await asyncio.to_thread(create_served_app, config, shell, model)
            http = HttpServer(app, self._listener)
            http.start()
            if await self._complete(shell, workers, http):
                self._phases.seconds["workers"] = time.monotonic() - started
                fit_context(config, shell)
                log.release()
                say_banner(config, self._listener, model, shell.model.max_model_len, self._phases.line(), devices)
                await self._serve(shell, http)
        finally:
            shell.stop()
            if http is not None:
                await http.stop()
            await workers.close(0.0 if self._hurry.is_set() else STOP_GRACE_S)
            await shell.close()
        return 0

    async def _listen(self, shell: GatewayShell) -> str:
        """Open the workers' listener; returns the address they are told. Raises PortInUseError."""
        port = self._config.worker_port
        try:
            address = await shell.listen(port=port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortInUseError(f"--worker-port {port} is already in use") from error
        return self._config.worker_address or address

    async def _complete(self, shell: GatewayShell, workers: LocalWorkers, http: "HttpServer") -> bool:
        """Until the cluster is ready. False: a signal came first. Raises StartupError or the worker's own kind of error."""
        waits: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(wait)
            for wait in (shell.wait_complete(), self._drain.wait(), self._hurry.wait(), http.ended.wait())
        }
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        http.check()
        gave_up = shell.gave_up
        if gave_up is not None:
            raise workers.explain(gave_up.worker, gave_up.status, gave_up.reason)
        return not self._drain.is_set()

    async def _serve(self, shell: GatewayShell, http: "HttpServer") -> None:
        """Until a signal or the end of the HTTP server; then let running requests finish within the grace period."""
        waits: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(wait) for wait in (self._drain.wait(), http.ended.wait())
        }
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        http.check()
        draining = asyncio.ensure_future(shell.drain(self._config.grace_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for wait in (draining, hurry):
            wait.cancel()

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._console.say("relay: finishing running requests; a second signal ends them")
            self._drain.set()
        else:
            self._drain.set()
            self._hurry.set()


class HttpServer:
    """uvicorn as a task. Signals are ours; its end is awaited, never assumed."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        import uvicorn

        from relay.api.app import UVICORN_OPTIONS

        class _Uvicorn(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        options: dict[str, Any] = {**UVICORN_OPTIONS, "timeout_graceful_shutdown": 2}
        self._server = _Uvicorn(uvicorn.Config(app, **options))
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._server.serve([self._listener]))
        self._task.add_done_callback(lambda task: self.ended.set())

    def check(self) -> None:
        """Raises StartupError if the server ended although nobody asked it to."""
        if self._task is not None and self._task.done() and not self._server.should_exit:
            error = self._task.exception()
            raise StartupError(f"the HTTP server ended: {error or 'no reason given'}")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task})
            if not self._task.cancelled() and self._task.exception() is not None:
                logging.getLogger("relay.http").error("HTTP server: %s", self._task.exception())


def open_served_model(config: ServeConfig) -> "LoadedModel":
    from relay.models.progress import console_progress
    from relay.models.store import default_cache_dir, open_model

    cache_dir = config.cache_dir or default_cache_dir(os.environ)
    on_device = config.worker.backend == "cuda"
    return open_model(
        config.model, cache_dir=cache_dir, offline=config.offline, progress=console_progress(), for_device=on_device
    )


def found_devices(config: ServeConfig, model: "LoadedModel") -> list[str]:
    """Lines for the banner; none for backends without devices. Raises UsageError or DoesNotFitError, before anything starts."""
    from relay.kernels.ranks.split import check_ranks
    from relay.models.llama import geometry

    check_ranks(geometry(model.config), config.worker.by_role.ranks)
    if config.worker.backend != "cuda":
        return []
    from relay.cli.devices import device_lines
    from relay.cluster.nvml import detect

    return device_lines(config, model.config, detect(os.environ))


def create_served_app(config: ServeConfig, shell: GatewayShell, model: "LoadedModel") -> Any:
    from relay.api.app import create_app

    return create_app(shell, model.tokenizer, model.chat_template, seed=config.seed)


def model_info(config: ServeConfig, model: "LoadedModel", context: int) -> ModelInfo:
    """The model as the API names it; its numerics are named by the first worker."""
    return ModelInfo(
        name=config.served_model_name or model.name,
        model_digest=model.digest,
        numerics_id="",
        vocab_size=model.config.vocab,
        max_model_len=context,
        created=int(time.time()),
        eos_token_ids=model.config.eos_token_ids,
    )


def context_of(config: ServeConfig, model: "LoadedModel") -> int:
    """The longest sequence asked for, or the model's. Raises UsageError for more than the model can."""
    asked, limit = config.worker.max_model_len, model.max_model_len
    if asked is not None and asked > limit:
        raise UsageError(f"--max-model-len {asked} is over the {limit} positions of {model.name}")
    return asked or limit


def fit_context(config: ServeConfig, shell: GatewayShell) -> None:
    """No context longer than every worker's whole KV cache. Raises DoesNotFitError if a longer one was asked for."""
    asked, holds = shell.model.max_model_len, shell.kv_tokens()
    if asked <= holds:
        return
    worker = config.worker
    if worker.max_model_len is not None:
        size = f"of {worker.kv_cache_memory_bytes} bytes (--kv-cache-memory)"
        if not worker.kv_cache_memory_bytes:
            size = f"in {worker.gpu_memory_utilization:g} of the GPU's memory (--gpu-memory-utilization)"
        raise DoesNotFitError(f"--max-model-len {asked} does not fit: a KV cache {size} holds {holds} tokens")
    shell.limit_context(holds)
