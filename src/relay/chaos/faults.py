"""Carries out a plan: waits for each fault's turn and moment, strikes, and undoes what has to be undone."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from relay.chaos.gateways import GatewayLife, Gateways
from relay.chaos.holders import strike
from relay.chaos.kinds import KINDS, Kind
from relay.chaos.packets import Flow, Packets
from relay.chaos.pipe import Injury, Pipe
from relay.chaos.plan import Fault
from relay.chaos.proxy import KvFrame, Life, Proxy
from relay.chaos.resume import Resumes
from relay.chaos.signals import SIGNALS, Signals
from relay.chaos.watch import Placement, Seen
from relay.ids import epoch_of

MOMENT_PATIENCE_S = 3.0
BUSY_PATIENCE_S = 2.0
KV_PATIENCE_S = 8.0
POLL_S = 0.01
GATEWAY_POLL_S = 0.1
ORDER_TAKEN = 202
LOSS_PERCENT = 30
INSTEAD = "kill_engine"


class Injector:
    """``run`` works a plan off; ``done`` counts what was really done."""

    def __init__(
        self,
        proxy: Proxy,
        gateways: Gateways,
        resumes: Resumes,
        say: Callable[[str], None],
        order: Callable[[str, Any], Awaitable[int]],
    ) -> None:
        """``order``: give the server an operator's order; returns the status of its answer."""
        self._order = order
        self._proxy = proxy
        self._gateways = gateways
        self._packets = Packets()
        self.signals: Counter[str] = Counter()  # by name
        self._signals = Signals(self.signals, self._later, self._record)
        self.packets_lost: Counter[str] = Counter()  # by kind
        self.roles_struck: Counter[str] = Counter()  # role → faults that left no unhurt worker of it
        self._resumes = resumes
        self._say = say
        self._waiting: Callable[[Seen], None] | None = None
        self._afterwards: set[asyncio.Task[None]] = set()
        self.by_kind: Counter[str] = Counter()
        self.moments: Counter[tuple[str, str]] = Counter()  # (kind, moment of one choice it struck)
        self.num_done = 0
        self.problems: list[str] = []
        self.progress = asyncio.Event()  # set after every fault, and when requests are needed for the next
        self.hungry = False  # waits for requests to do something
        self.patience_s = 30.0  # with a worker that starts; longer where a start takes longer
        self.holders: Callable[[], list[int]] = list  # processes that hold weights for several workers
        self.starved: Callable[[], bool] = lambda: False  # no request runs or may begin: nothing is left to wait for

    def seen(self, seen: Seen) -> None:
        """The watch's: something happened to a choice. Strikes before the bytes that say so are passed on."""
        if self._waiting is not None:
            self._waiting(seen)

    async def run(self, plan: list[Fault], turn: Callable[[int], Awaitable[None]]) -> None:
        """``turn(i)`` is awaited before fault ``i``. Returns when every fault was done and undone."""
        for index, fault in enumerate(plan):
            await turn(index)
            await asyncio.sleep(fault.wait_s)
            await self._one(fault)
            self.num_done += 1
            self.progress.set()
        while self._afterwards:
            await asyncio.gather(*self._afterwards)

    async def _one(self, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        if kind.target == "gateway":
            await self._on_gateway(fault, kind)
            return
        if kind.target == "holder":
            await self._on_holder(fault, kind)
            return
        if kind.target == "kv":
            if await self._on_kv(fault, kind):
                return
            fault, kind = (
                replace(fault, kind=INSTEAD),
                KINDS[INSTEAD],
            )  # no request is left that would use a KV connection
        elif kind.deed in ("leave", "roll"):
            if await self._leave(fault, kind):
                return
            fault, kind = replace(fault, kind=INSTEAD), KINDS[INSTEAD]  # it has such an order already
        elif fault.moment and await self._at_moment(fault, kind):
            return
        life = await self._victim(fault)
        if life is None:
            self._nobody(fault)
            return
        pending = self._strike_now(fault, kind, life)
        if pending is not None:
            await pending

    def _nobody(self, fault: Fault) -> None:
        lives = ", ".join(str(life) for life in self._proxy.lives.values())
        self.problems.append(f"{fault.kind}: no {fault.role} was ready within {self.patience_s:.0f} s: {lives}")

    async def _on_holder(self, fault: Fault, kind: Kind) -> None:
        """A GPU's worker goes with the process that holds its weights, and so do all others there."""
        life = await self._victim(fault)
        pids = self.holders()
        if life is None or not pids:
            self._nobody(fault)
            return
        for one in [one for one in self._proxy.lives.values() if one.ready]:
            self._record(fault.kind, one)
            one.hurt = True
        self.by_kind[fault.kind] += 1
        number = SIGNALS[kind.deed]
        self.signals[number.name] += strike(pids[fault.aim % len(pids)], number)

    async def _leave(self, fault: Fault, kind: Kind) -> bool:
        """Order a worker, or one after another, to be restarted; False when the server can't now."""
        life = await self._victim(fault)
        if life is None:
            return False
        body = {"rolling": True} if kind.deed == "roll" else {"workers": [life.worker]}
        if await self._order("restart", body) != ORDER_TAKEN:
            return False
        self._record(fault.kind, life)
        life.draining = True
        self.by_kind[fault.kind] += 1
        return True

    async def _until(self, happened: "asyncio.Future[Any]", patience_s: float) -> bool:
        """Wait while requests run; False when ``patience_s`` is over, or no request is left."""
        self.hungry = True
        self.progress.set()
        deadline = time.monotonic() + patience_s
        while not happened.done() and not self.starved() and time.monotonic() < deadline:
            await asyncio.wait({happened}, timeout=0.05)
        self.hungry = False
        return happened.done()

    async def _at_moment(self, fault: Fault, kind: Kind) -> bool:
        """Wait for a choice at the fault's moment and strike there and then; False when none came."""
        struck: asyncio.Future[asyncio.Future[None] | None] = asyncio.get_running_loop().create_future()

        def look(seen: Seen) -> None:
            if seen.placement.moment != fault.moment or struck.done():
                return
            for name in [seen.worker, *sorted(seen.placement.holders)]:
                life = self._proxy.lives.get(name)
                if life is not None and life.ready and not life.hurt and life.role in (fault.role, "both"):
                    struck.set_result(self._strike_now(fault, kind, life))
                    return

        self._waiting = look
        came = await self._until(struck, MOMENT_PATIENCE_S)
        self._waiting = None
        if came and (pending := struck.result()) is not None:
            await pending
        return came

    async def _on_gateway(self, fault: Fault, kind: Kind) -> None:
        """One that a choice at the fault's moment (or any, if it has none) came from; else whichever, one with work first."""
        watch, gateways = self._proxy.watch, self._gateways
        deadline = time.monotonic() + self.patience_s
        await gateways.refresh()
        while not gateways.unhurt():
            if time.monotonic() > deadline:
                self.problems.append(f"{fault.kind}: no gateway was there within {self.patience_s:.0f} s")
                return
            await asyncio.sleep(GATEWAY_POLL_S)
            await gateways.refresh()
        if not fault.idle:
            struck: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def look(seen: Seen) -> None:
                life = gateways.of(seen.placement.key[0])
                if fault.moment in ("", seen.placement.moment) and life is not None and not struck.done():
                    self._strike_gateway(fault, kind, life)
                    struck.set_result(None)

            self._waiting = look
            came = await self._until(struck, MOMENT_PATIENCE_S)
            self._waiting = None
            if came:
                return
        working = [life for placement in watch.placements.values() if (life := gateways.of(placement.key[0]))]
        candidates = working or gateways.unhurt()
        if candidates:
            self._strike_gateway(fault, kind, candidates[fault.aim % len(candidates)])
        else:
            self.problems.append(f"{fault.kind}: the gateways ended by themselves")

    def _strike_gateway(self, fault: Fault, kind: Kind, life: GatewayLife) -> None:
        number = SIGNALS[kind.deed]
        struck = [one for one in self._proxy.watch.placements.values() if epoch_of(one.key[0]) == life.epoch]
        for placement in struck:
            self.moments[(fault.kind, placement.moment)] += 1
        if not struck:
            self.moments[(fault.kind, "idle")] += 1
        self.by_kind[fault.kind] += 1
        self.signals[number.name] += self._gateways.strike(fault.kind, life, number)
        self._say(f"{fault.kind} on {life.name} ({len(struck)} choices)")
        if kind.deed == "stop":
            self._later(self._continue_gateway(life, fault.hold_s))

    async def _continue_gateway(self, life: GatewayLife, hold_s: float) -> None:
        await asyncio.sleep(hold_s)
        self.signals["SIGCONT"] += life.signal(signal.SIGCONT)
        life.struck = False

    async def _victim(self, fault: Fault) -> Life | None:
        """A ready worker of the fault's role that nothing was done to yet, one with work where there is one."""
        began_s = time.monotonic()
        try:
            while (waited_s := time.monotonic() - began_s) < self.patience_s:
                ready = [
                    life
                    for life in self._proxy.lives.values()
                    if life.role == fault.role and life.ready and not life.hurt
                ]
                busy = [life for life in ready if self._proxy.watch.held_by(life.worker)]
                settle = fault.idle or self.starved() or waited_s > BUSY_PATIENCE_S
                if busy or (ready and settle):
                    candidates = busy or ready
                    return candidates[fault.aim % len(candidates)]
                if not self.hungry and not settle:
                    self.hungry = True
                    self.progress.set()
                await asyncio.sleep(POLL_S)
        finally:
            self.hungry = False
        return None

    def _strike_now(self, fault: Fault, kind: Kind, life: Life) -> "asyncio.Future[None] | None":
        """Do it. What is returned must be awaited: a fault that waits for bytes to spoil."""
        lives = [life]
        if kind.target == "role":
            lives = [one for one in self._proxy.lives.values() if one.role == life.role and one.ready]
        if kind.target == "control" and kind.on_packets:
            self._record(fault.kind, life)
            self.by_kind[fault.kind] += 1
            life.hurt = True
            up = [flow for link in life.welcomed for flow in life.connections[link].flows]
            self._lose(fault, kind, up, life)
            return None
        if kind.target == "control":
            return self._on_control(fault, kind, life)
        for one in lives:
            self._record(fault.kind, one)
            self._signals.send(fault, kind, one)
        self.by_kind[fault.kind] += 1
        if kind.fatal and not any(
            one.role == life.role and one.ready and not one.hurt for one in self._proxy.lives.values()
        ):
            self.roles_struck[life.role] += 1
        return None

    def _on_control(self, fault: Fault, kind: Kind, life: Life) -> "asyncio.Future[None] | None":
        process, gateway = ("engine", "agent")[fault.aim & 1], (fault.aim >> 20) % life.gateways
        connection = life.connections[(process, gateway)]
        pipe = connection.up if fault.aim & 6 else connection.down  # three times of four from the worker
        life.hurt = True
        injury = Injury(kind.deed, 0, fault.hold_s, fault.aim >> 8)  # type: ignore[arg-type] # a wire kind's deeds are harms
        self.by_kind[fault.kind] += 1
        if life.gateways > 1:
            self._later(self._forgive(life, fault.hold_s))  # it dials again and lives on
        if kind.deed in ("truncate", "corrupt"):
            spoil = Injury(injury.harm, (fault.aim >> 12) % 40, 0.0, injury.bit)
            return asyncio.ensure_future(self._spoil(fault, life, gateway, pipe, spoil))
        self._record(fault.kind, life)
        if kind.deed == "delay":
            self._later(self._forgive(life, fault.hold_s))
        pipe.hurt(injury)
        return None

    async def _spoil(self, fault: Fault, life: Life, gateway: int, pipe: Pipe, injury: Injury) -> None:
        """Spoil the next bytes of a control connection; where none come, the agent's next heartbeat."""
        struck: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            self._record(fault.kind, life)
            struck.set_result(None)

        pipe.arm(injury, done)
        await asyncio.wait({struck}, timeout=MOMENT_PATIENCE_S)
        if not struck.done():
            pipe.disarm()
            life.connections[("agent", gateway)].up.arm(injury, done)
            await asyncio.wait({struck}, timeout=MOMENT_PATIENCE_S)

    async def _on_kv(self, fault: Fault, kind: Kind) -> bool:
        """At the ``nth`` KV frame of a transfer, or at the handoff of one that has fewer; False when none is to come."""
        struck: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def look(frame: KvFrame) -> Injury | None:
            life = self._proxy.lives.get(frame.target)
            if struck.done() or life is None or not (frame.handoff or frame.number >= fault.nth):
                return None
            self._record(fault.kind, life, only=frame.placement)
            struck.set_result(None)
            if kind.on_packets:
                self._lose(fault, kind, [Flow(0, port) for port in life.kv_ports])
                return None
            return Injury(kind.deed, 60 + fault.aim % 4096, fault.hold_s, fault.aim >> 12)  # type: ignore[arg-type]

        self._proxy.kv_injury = look
        came = await self._until(struck, KV_PATIENCE_S)
        self._proxy.kv_injury = lambda frame: None
        if came:
            self.by_kind[fault.kind] += 1
        return came

    def _lose(self, fault: Fault, kind: Kind, flows: list[Flow], life: Life | None = None) -> None:
        """Packets of ``flows`` and of the way back, or of one of the two; ``life`` is well again afterwards, if it lives."""
        ways = [flows, [flow.back for flow in flows]]
        if kind.deed == "half_partition":
            ways = [ways[fault.aim & 1]]
        table = self._packets.lose([flow for way in ways for flow in way], LOSS_PERCENT if kind.deed == "loss" else 100)
        self._later(self._heal(table, fault, life))

    async def _heal(self, table: str, fault: Fault, life: Life | None) -> None:
        await asyncio.sleep(fault.hold_s)
        self.packets_lost[fault.kind] += self._packets.lost(table)
        self._packets.heal(table)
        if life is not None:
            life.hurt = False

    def _record(self, kind: str, life: Life, only: Placement | None = None) -> None:
        """Note what every choice it strikes is doing."""
        now_s = time.monotonic()
        struck = self._proxy.watch.held_by(life.worker) if only is None else [only]
        for placement in struck:
            moment = "draining" if life.draining else placement.moment
            self.moments[(kind, moment)] += 1
            self._resumes.harmed(kind, moment, placement, now_s)
        if not struck:
            self.moments[(kind, "idle")] += 1
        life.struck = (kind, now_s)
        self._say(f"{kind} on {life.worker} ({len(struck)} choices)")

    async def _forgive(self, life: Life, hold_s: float) -> None:
        await asyncio.sleep(hold_s)
        life.hurt = False

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        running = asyncio.ensure_future(work)
        self._afterwards.add(running)
        running.add_done_callback(self._afterwards.discard)
