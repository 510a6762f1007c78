"""One of several gateways: ``python -m relay.cli.gateway_process --supervisor FD --http FD --workers FD``.

Its listeners are the supervisor's, so that addresses outlive it; workers are started by the supervisor. It ends when that does.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from relay.cli.console import Console
from relay.cli.server import (
    CONSOLE_WAIT_S,
    HttpServer,
    context_of,
    create_served_app,
    fit_context,
    log_to,
    model_info,
    open_served_model,
)
from relay.config import ServeConfig
from relay.control.core import GatewayCore
from relay.control.record import GatewayRecorder
from relay.control.shell import GatewayShell
from relay.errors import RelayError
from relay.local.channel import Channel
from relay.local.supervised import SupervisedWorkers
from relay.local.supervision import (
    Begin,
    GatewayFailed,
    GatewayReady,
    Ping,
    Pong,
    SupervisorToGateway,
    WorkerHopeless,
    WorkersLeave,
)
from relay.worker.host import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="relay-gateway")
    for name in ("supervisor", "http", "workers", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    if not die_with_parent(arguments.parent):
        sys.exit(1)
    console = Console(sys.stderr.fileno())
    try:
        with contextlib.ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.socket(fileno=fd))
                for fd in (arguments.supervisor, arguments.http, arguments.workers)
            ]
            for listener in sockets[1:]:
                listener.setblocking(False)
            status = uvloop.run(GatewayProcess(console, *sockets).run())
    finally:
        console.finish(CONSOLE_WAIT_S)
    sys.stdout.flush()
    os._exit(status)  # a tokenizer thread must not keep the port from the next life


def decode_config(raw: bytes) -> ServeConfig:
    return msgspec.json.decode(raw, type=ServeConfig, dec_hook=lambda kind, value: Path(value))


def encode_config(config: ServeConfig) -> bytes:
    return msgspec.json.encode(config, enc_hook=str)


class GatewayProcess:
    """``run`` returns the exit status when everything has ended."""

    def __init__(self, console: Console, end: socket.socket, http: socket.socket, workers: socket.socket) -> None:
        self._console = console
        self._end = end
        self._http = http
        self._workers = workers
        self._begin: asyncio.Future[Begin] | None = None
        self._drain = asyncio.Event()
        self._alone = asyncio.Event()
        self._channel = Channel(SupervisorToGateway, self._received, self._alone.set)
        self._launcher = SupervisedWorkers(self._channel)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._begin = loop.create_future()
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's Ctrl-C is the supervisor's business
        loop.add_signal_handler(signal.SIGTERM, self._drain.set)
        await self._channel.open(self._end)
        begin = await self._begin
        config = decode_config(begin.config)
        log_to(self._console, config.log_level)
        try:
            await self._serve(begin, config)
        except RelayError as error:
            self._channel.send(GatewayFailed(error.exit_code, str(error)))
            await self._until(self._alone, self._drain)
            return error.exit_code
        return 0

    def _received(self, message: Any) -> None:
        if isinstance(message, Begin):
            if self._begin is not None and not self._begin.done():
                for present in message.present:
                    self._launcher.told(present)
                if message.kept_out:  # before their ends are told, or they would be started again
                    self._launcher.told(WorkersLeave(message.kept_out, stay_out=True))
                for exited in message.exited:
                    self._launcher.told(exited)
                self._begin.set_result(message)
        elif isinstance(message, Ping):
            self._channel.send(Pong())
        else:
            self._launcher.told(message)

    async def _serve(self, begin: Begin, config: ServeConfig) -> None:
        model = await asyncio.to_thread(open_served_model, replace(config, offline=True))
        info = model_info(config, model, begin.max_model_len or context_of(config, model))
        control = replace(
            config.resolved_control(),
            gateway=begin.gateway,
            epoch=begin.epoch,
            shared_workers=True,
            was_complete=begin.complete,
        )
        folder = config.worker.record
        recorder = GatewayRecorder(folder / f"{begin.gateway}-{os.getpid()}.relay") if folder else None
        shell = GatewayShell(GatewayCore(control, info, config.slots), self._launcher, recorder=recorder)
        http: HttpServer | None = None
        try:
            await shell.listen(listener=self._workers)
            self._launcher.attach(shell)
            shell.start()
            http = HttpServer(await asyncio.to_thread(create_served_app, config, shell, model), self._http)
            http.start()
            if not begin.complete and not await self._complete(config, shell):
                return
            self._channel.send(GatewayReady(shell.model.max_model_len))
            await self._until(self._drain, self._alone, http.ended)
            http.check()
            if not self._alone.is_set():
                await shell.drain(config.grace_s)
        finally:
            shell.stop()
            if http is not None:
                await http.stop()
            await shell.close()

    async def _complete(self, config: ServeConfig, shell: GatewayShell) -> bool:
        """Until the cluster is ready for the first time. False: it will not be."""
        complete = asyncio.ensure_future(shell.wait_complete())
        ending = asyncio.ensure_future(self._until(self._drain, self._alone))
        await asyncio.wait({complete, ending}, return_when=asyncio.FIRST_COMPLETED)
        for wait in (complete, ending):
            wait.cancel()
        hopeless = shell.gave_up
        if hopeless is not None:
            self._channel.send(WorkerHopeless(hopeless.worker.worker, hopeless.status, hopeless.reason))
            await self._until(self._drain, self._alone)
            return False
        if self._drain.is_set() or self._alone.is_set():
            return False
        fit_context(config, shell)
        return True

    @staticmethod
    async def _until(*events: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


if __name__ == "__main__":
    main()
