"""The gateway processes of a server that has several: who they are, as its status says, and what was done to them."""

import os
import select
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from relay.ids import epoch_of


@dataclass(slots=True)
class GatewayLife:
    """One life of one gateway. It is held by pidfd: its number may be used again."""

    name: str
    epoch: int
    pid: int
    pidfd: int
    struck: bool = False

    @property
    def running(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]

    def signal(self, number: signal.Signals) -> bool:
        """False when it has ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True


@dataclass(slots=True)
class Gateways:
    """``status``: what one of them says, whichever answers. ``faults``: (kind, monotonic seconds) of all that was done."""

    status: Callable[[], Awaitable[dict[str, Any]]]
    lives: dict[str, GatewayLife] = field(default_factory=dict)  # the latest of each
    past: list[GatewayLife] = field(default_factory=list)
    faults: list[tuple[str, float]] = field(default_factory=list)

    async def refresh(self) -> None:
        """Learn of new lives. A gateway that was just stopped or killed may be the one that was asked: then nothing is learnt."""
        try:
            status = await self.status()
        except (OSError, ValueError, EOFError, TimeoutError):
            return
        for entry in status["gateways"]:
            known = self.lives.get(entry["id"])
            if known is not None and known.epoch >= entry["epoch"]:
                continue
            try:
                pidfd = os.pidfd_open(entry["pid"])
            except ProcessLookupError:
                continue
            if known is not None:
                self.past.append(known)
            self.lives[entry["id"]] = GatewayLife(entry["id"], entry["epoch"], entry["pid"], pidfd)

    def unhurt(self) -> list[GatewayLife]:
        """Those that run and that nothing was done to."""
        return [life for life in self.lives.values() if not life.struck and life.running]

    def of(self, request: int) -> GatewayLife | None:
        """The one that gave ``request`` its number, if it still can be struck."""
        epoch = epoch_of(request)
        return next((life for life in self.unhurt() if life.epoch == epoch), None)

    def strike(self, kind: str, life: GatewayLife, number: signal.Signals) -> bool:
        """False when it is gone."""
        life.struck = True
        self.faults.append((kind, time.monotonic()))
        return life.signal(number)

    def cause(self, broken_s: float) -> tuple[str, float] | None:
        """The latest fault before a client's connection broke."""
        return next((fault for fault in reversed(self.faults) if fault[1] <= broken_s), None)

    def running(self) -> list[GatewayLife]:
        return [life for life in (*self.past, *self.lives.values()) if life.running]

    def close(self) -> None:
        for life in (*self.past, *self.lives.values()):
            os.close(life.pidfd)
        self.past.clear()
        self.lives.clear()
