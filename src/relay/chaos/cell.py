"""One cluster of one shape under the faults of one seed, from start to the check that nothing is left of it."""

import asyncio
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from relay.chaos import leaks
from relay.chaos.client import Outcome, Progress, ask, order
from relay.chaos.faults import Injector
from relay.chaos.gateways import Gateways
from relay.chaos.holders import holders
from relay.chaos.kinds import KINDS
from relay.chaos.plan import draw_plan
from relay.chaos.proxy import Life, Proxy
from relay.chaos.requests import POISON_ID, ChatOrCompletion, poison_requests
from relay.chaos.resume import Resumes
from relay.chaos.server import MODEL_NAME, Server, free_port
from relay.chaos.settings import CellResult, ChaosSettings
from relay.chaos.shapes import Shape
from relay.chaos.traces import play_again
from relay.chaos.watch import Watch

QUIET_S = 30.0
STARTS = (
    4  # or so many times what the cluster's start took: on a GPU that is long, and the last fault may be a second one
)
EXIT_S = 5.0
LENT_FAULTS = 2
MAX_CRASHES = 3  # engines that one poison request may take with it, from each gateway that it is sent to
PAST_PROXY = {"auto": 1 / 3, "ipc": 2 / 3, "tcp": 0.0}  # share of lives whose KV goes unseen; all, of other transports
SENT = "kv_transfers_sent_"  # and the scheme: a counter of workers
SETTLE_S = 5.0  # in which a gateway that was struck has all its workers again


class Cell:
    """``run`` once. ``expected``: the calm outcome of every request."""

    def __init__(
        self,
        settings: ChaosSettings,
        shape: Shape,
        seed: int,
        requests: list[ChatOrCompletion],
        expected: list[Outcome],
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._shape = shape
        self._seed = seed
        self._requests = requests
        self._expected = expected
        self._say = say
        self._resumes = Resumes()
        self._watch = Watch(on_order=self._resumes.ordered, on_token=self._resumes.reported)
        worker_port = free_port(settings.gateways)
        addresses = [("127.0.0.1", worker_port + index) for index in range(settings.gateways)]
        self._proxy = Proxy(self._watch, addresses, self._life_ended, self._by_shared_memory)
        self._worker_port = worker_port
        self._gateways = Gateways(self._status)
        self._injector = Injector(self._proxy, self._gateways, self._resumes, say, self._order)
        self._watch.on_seen = self._injector.seen
        self._injector.starved = self._starved
        self._injector.holders = lambda: holders(self._server.pid) if self._server else []
        self._server: Server | None = None
        self._trace = settings.trace / f"{shape.name}-seed-{seed}" if settings.trace else None
        self._started = self._running_now = self._num_holders = 0
        self._patience_s = QUIET_S
        self._noting: set[asyncio.Future[None]] = set()
        self._moved = asyncio.Event()  # a request has begun or ended, or a fault was done
        self._result = CellResult(shape.name, seed, len(requests))

    async def run(self) -> CellResult:
        began_s = time.monotonic()
        if self._trace:
            shutil.rmtree(self._trace, ignore_errors=True)
            self._trace.mkdir(parents=True)
        shared_before = leaks.shared_memory()
        addresses = await self._proxy.start()
        server = Server(
            [
                self._settings.model,
                *self._shape.flags,
                *self._settings.serve,
                *self._perturbations(),
                *(["--record", str(self._trace)] if self._trace else []),
                "--worker-port",
                str(self._worker_port),
                "--worker-address",
                ",".join(addresses),
                "--gateways",
                str(self._settings.gateways),
            ]
        )
        self._server = server
        try:
            starting_s = time.monotonic()
            await server.start()
            await self._all_ready()
            self._patience_s = max(QUIET_S, STARTS * (time.monotonic() - starting_s))
            self._injector.patience_s = self._patience_s
            self._num_holders = len(holders(server.pid))
            self._say(f"{self._shape.name} seed {self._seed}: ready in {time.monotonic() - starting_s:.1f} s")
            before = leaks.descriptors(server.pid)
            await self._load(server)
            await asyncio.gather(*self._noting)
            await self._check_quiet(server, before)
        finally:
            code = await server.stop()
            await self._check_gone(code, shared_before)
            await self._proxy.close()
            self._gateways.close()
        if self._trace:
            await asyncio.to_thread(play_again, self._trace, self._result)
        if self._result.problems or self._result.failed or self._result.different:
            self._result.problems += [f"server: {line}" for line in list(server.log)[-400:]]
        self._result.seconds = round(time.monotonic() - began_s, 1)
        return self._result

    async def _order(self, what: str, body: dict[str, Any]) -> int:
        assert self._server is not None
        return await order(self._server.host, self._server.port, what, body)

    async def _status(self) -> dict[str, Any]:
        assert self._server is not None
        return await self._server.status()

    async def _all_ready(self) -> None:
        while len(self._proxy.lives) < self._shape.size or not all(life.ready for life in self._proxy.lives.values()):
            await asyncio.sleep(0.01)

    async def _load(self, server: Server) -> None:
        """All requests and all faults, each at its share of the other."""
        plan = draw_plan(
            self._seed, self._settings.ground(self._shape), self._settings.faults, list(self._settings.kinds)
        )
        injecting = asyncio.ensure_future(self._injector.run(plan, self._turn))
        gate = asyncio.Semaphore(self._settings.concurrency)
        asking = [asyncio.ensure_future(self._ask(server, index, gate)) for index in range(len(self._requests))]
        poisoning = asyncio.ensure_future(self._poison(server))
        watching = asyncio.ensure_future(self._watch_progress())
        try:
            outcomes = await asyncio.gather(*asking)
            await injecting
            await poisoning
        finally:
            watching.cancel()
            for task in [injecting, poisoning, *asking]:
                task.cancel()
        self._compare(outcomes)
        result, injector = self._result, self._injector
        result.faults = dict(sorted(injector.by_kind.items()))
        result.signals = dict(sorted(injector.signals.items()))
        result.packets_lost = dict(sorted(injector.packets_lost.items()))
        result.roles_struck = dict(sorted(injector.roles_struck.items()))
        result.problems += injector.problems
        for (kind, moment), count in sorted(injector.moments.items()):
            result.moments.setdefault(kind, {})[moment] = count
        for harm in self._resumes.finished:
            result.resume_ms.setdefault(harm.kind, []).append(round((harm.resumed_s - harm.at_s) * 1e3, 2))
            result.resumed_tokens.append(harm.num_tokens)
        result.kv_transfers = dict(sorted(self._kv_transfers().items()))
        result.disagreements = await server.metric("relay_token_disagreements_total")
        if result.disagreements:
            result.problems.append(f"{result.disagreements} tokens that two workers reported differently")

    def _kv_transfers(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for life in self._proxy.all_lives():
            for name, count in life.counters.items():
                if name.startswith(SENT):
                    found[name.removeprefix(SENT)] += int(count)
        return found

    def _perturbations(self) -> list[str]:
        flags = ["--perturb", f"{self._shape.last}={self._settings.inject}"] if self._settings.inject else []
        return flags + (["--perturb", f"all=crash:{POISON_ID}"] if self._settings.poison else [])

    async def _poison(self, server: Server) -> None:
        """The poison requests, one after the other, each at its share of the others. Each ends alone, after three engines."""
        result, count = self._result, self._settings.poison
        result.poison = count
        for index, request in enumerate(poison_requests(self._seed, count, MODEL_NAME)):
            while self._started < (index + 0.5) * len(self._requests) / count:
                await self._next_move()
            outcome = await self._answer(server, request)
            if outcome.status == 500 and '"quarantined"' in " ".join(outcome.problems):
                result.quarantined += 1
            else:
                result.problems.append(f"{request.name}: status {outcome.status}, {outcome.problems or 'an answer'}")
        result.crashes = sum(life.crashed for life in self._proxy.all_lives())
        if result.crashes > MAX_CRASHES * count * self._settings.gateways:
            result.problems.append(f"{count} poison requests crashed {result.crashes} engines")

    async def _turn(self, index: int) -> None:
        """Fault ``index`` comes when its share of the requests has begun."""
        due = (index + 0.5) * len(self._requests) / max(1, self._settings.faults)
        while self._started < min(due, len(self._requests)):
            await self._next_move()

    async def _ask(self, server: Server, index: int, gate: asyncio.Semaphore) -> Outcome:
        """Request ``index`` begins when its share of the faults, less what may run at once, was done."""
        async with gate:
            per_request = self._settings.faults / len(self._requests)
            due = max(0, int((index - self._settings.concurrency) * per_request))
            while not self._may_begin(due):
                await self._next_move()
            self._started += 1
            self._running_now += 1
            self._moved.set()
            request = self._requests[index]

            def arrived(choice: int, count: int, now_s: float) -> None:
                self._resumes.arrived(request.seed, choice, count, now_s)

            outcome = await self._answer(server, request, arrived)
            self._running_now -= 1
            self._moved.set()
            self._watch.ended(request.seed)
            self._resumes.ended(request.seed)
            return outcome

    async def _answer(self, server: Server, request: ChatOrCompletion, arrived: Progress | None = None) -> Outcome:
        """With several gateways as a client that resumes; what it waited for its next token is counted from the fault."""
        key = f"chaos {request.seed}" if self._settings.gateways > 1 else ""
        outcome = await ask(server.host, server.port, request, self._settings.request_timeout_s, arrived, key=key)
        self._result.reposted += bool(outcome.breaks_s)
        for broken_s, resumed_s in zip(outcome.breaks_s, outcome.resumed_s, strict=True):
            cause = self._gateways.cause(broken_s)
            if cause is None:
                outcome.problems.append("its connection broke although nothing was done to a gateway")
            elif resumed_s:
                kind, at_s = cause
                self._result.resume_ms.setdefault(kind, []).append(round((resumed_s - at_s) * 1e3, 2))
        return outcome

    def _may_begin(self, due: int) -> bool:
        """With ``due`` faults behind it. A fault that waits for requests is lent some of those that would begin after it."""
        return self._injector.num_done + (LENT_FAULTS if self._injector.hungry else 0) >= due

    def _starved(self) -> bool:
        waiting = len(self._requests) - self._started
        next_due = int((self._started - self._settings.concurrency) * self._settings.faults / len(self._requests))
        return not self._running_now and (not waiting or not self._may_begin(next_due))

    async def _next_move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _watch_progress(self) -> None:
        while True:
            await self._injector.progress.wait()
            self._injector.progress.clear()
            self._moved.set()

    def _compare(self, outcomes: list[Outcome]) -> None:
        result = self._result
        for request, calm, outcome in zip(self._requests, self._expected, outcomes, strict=True):
            problem = outcome.whole(request)
            if problem:
                result.failed += 1
                result.problems.append(f"{request.name}: {problem}")
            elif outcome.canonical() == calm.canonical():
                result.identical += 1
            else:
                result.different += 1
                result.problems.append(f"{request.name} differs: {difference(calm, outcome)}")

    async def _check_quiet(self, server: Server, before: list[str]) -> None:
        """Everything is given back while we are patient: blocks, sequences, descriptors, processes."""
        deadline = time.monotonic() + self._patience_s
        while (left := await self._unquiet(server, before)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        self._leak(left)

    async def _unquiet(self, server: Server, before: list[str]) -> list[str]:
        statuses = await server.statuses(self._settings.gateways)
        left = [line for status in statuses for line in leaks.unquiet(status)]
        if len(statuses) != self._settings.gateways:
            left.append(f"{len(statuses)} gateways of {self._settings.gateways} answer")
        now = leaks.descriptors(server.pid)
        if len(now) != len(before):
            left.append(f"relay serve has {len(now)} descriptors open instead of {len(before)}")
        processes, due = len(leaks.descendants(server.pid)), 2 * self._shape.size + self._num_holders
        if self._settings.gateways > 1:
            due += self._settings.gateways  # below their supervisor
        if processes != due:
            left.append(f"{processes} processes below relay serve instead of {due}")
        left += [
            f"{life.worker} incarnation {life.incarnation}: {process} still runs"
            for life in self._proxy.past
            for process in life.running()
        ]
        return left

    async def _check_gone(self, code: int, shared_before: set[str]) -> None:
        """After the end of the server nothing of it runs, and no memory has its name."""
        if code != 0:
            self._leak([f"relay serve ended with {code}"])
        deadline = time.monotonic() + EXIT_S
        while (running := self._running()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._leak([f"{process} of {life.worker} outlived the server" for life, process in running])
        self._leak([f"{life.name} outlived the server" for life in self._gateways.running()])
        for life, process in running:
            life.signal(process, signal.SIGKILL)
        self._leak([f"/dev/shm/{name} was left" for name in leaks.unowned(leaks.shared_memory() - shared_before)])

    def _running(self) -> list[tuple[Life, str]]:
        return [(life, process) for life in self._proxy.all_lives() for process in life.running()]

    def _leak(self, lines: list[str]) -> None:
        self._result.leaked += len(lines)
        self._result.problems += [f"leak: {line}" for line in lines]

    def _by_shared_memory(self, life: Life) -> bool:
        """Some lives get their KV as they would without a proxy, which only carries TCP."""
        share = PAST_PROXY.get(self._settings.transport, 1.0)
        return random.Random(f"shm {self._seed} {life.worker} {life.incarnation}").random() < share

    def _life_ended(self, life: Life) -> None:
        """A gateway has given it up; if one was struck of late, that may be why its connection ended."""
        if life.struck is not None and KINDS[life.struck[0]].fatal:
            kind, at_s = life.struck
            if any(fault_s >= at_s - SETTLE_S for _, fault_s in self._gateways.faults):
                return
            self._noting.add(asyncio.ensure_future(self._note_detection(life, kind, at_s)))

    async def _note_detection(self, life: Life, kind: str, at_s: float) -> None:
        """When the loss was noticed by the first gateway that did, in its own words; nothing if none can be asked now."""
        assert self._server is not None
        try:
            statuses = await self._server.statuses(self._settings.gateways)
        except (OSError, ValueError, EOFError, TimeoutError):
            return
        rows = [row for status in statuses for row in status["workers"] if row["id"] == life.worker]
        noticed = [row["last_loss_s"] for row in rows if (row["last_loss_s"] or 0.0) >= at_s]
        if noticed:
            self._result.detect_ms.setdefault(kind, []).append(round((min(noticed) - at_s) * 1e3, 2))


def difference(calm: Outcome, outcome: Outcome) -> str:
    """The first thing that differs, in words."""
    for index, left in sorted(calm.answers.items()):
        right = outcome.answers[index]
        for position, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=False)):
            if a != b:
                return f"choice {index}, token {position}: {b} instead of {a}"
        for what in ("token_ids", "text", "logprobs", "finishes"):
            if getattr(left, what) != getattr(right, what):
                return f"choice {index}: {what} {getattr(right, what)!r:.200} instead of {getattr(left, what)!r:.200}"
    return f"usage {outcome.usage} instead of {calm.usage}"
