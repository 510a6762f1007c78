"""The pure core of an engine process: events in, commands out.

It owns what the worker holds and drives the scheduler; the shell owns sockets, threads and clocks. Between events the shell
calls ``advance``, which plans steps ahead and reports load. Roles are the router's business: any worker takes any order.
"""

from collections import Counter
from dataclasses import dataclass

from relay.engine.scheduler import CannotFit, QueueFull, Scheduler
from relay.engine.sequence import SequenceUpdate
from relay.ids import SequenceKey
from relay.kernels.backend import SampledToken
from relay.protocol.messages import (
    GATEWAY_LOST_STATUS,
    HANDED_BACK,
    Accept,
    Cancel,
    Drain,
    Drained,
    Prefill,
    Refuse,
    RefuseReason,
    Reserve,
    Run,
    TokenEntry,
    Tokens,
    Work,
)
from relay.transfer.contract import (
    FINISHED,
    ReceiveCompleted,
    ReceiveFailed,
    SendAcknowledged,
    SendFailed,
)
from relay.worker.announce import Announcer
from relay.worker.commands import (
    Command,
    Exit,
    ForgetUnsent,
    OpenReceive,
    OpenSend,
    SendHandoff,
    SendToGateway,
    SetTimer,
    StartStep,
)
from relay.worker.custody import ALONE_TIMER, ORPHANS_TIMER, Custody
from relay.worker.entries import DigestKv, handoff_of, token_entry
from relay.worker.events import (
    DrainRequested,
    Event,
    GatewayConnected,
    GatewayLost,
    OrderReceived,
    StepFinished,
    TimerFired,
)
from relay.worker.held import Held, HeldEvent, HeldState
from relay.worker.kv_counters import count_received, count_sent
from relay.worker.orders import receive_order, send_order
from relay.worker.orphans import Orphans
from relay.worker.parking import PARK_TIMER, ParkingLot
from relay.worker.report import LoadReporter
from relay.worker.table import HeldTable

DRAIN_TIMER = "drain"
REPORT_TIMER = "report"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Bounds of one worker core."""

    max_held: int = 4096  # sequences at once, queued ones included
    plan_ahead: int = 1  # steps planned beyond the one that runs
    retry_after_ms: int = 250  # told with a refusal for lack of room
    report_interval_ns: int = 50_000_000
    drain_timeout_ns: int = 30_000_000_000
    orphan_hold_ns: int = 0  # how long to live on, and to keep what a lost gateway ordered; 0: not at all


class WorkerCore:
    """``digest_kv(block_table, num_tokens)`` hashes KV bytes for capturing requests; it must read the blocks at once."""

    def __init__(self, config: WorkerConfig, scheduler: Scheduler, digest_kv: DigestKv) -> None:
        self._config = config
        self._scheduler = scheduler
        self._digest_kv = digest_kv
        self._held = HeldTable()
        self._parking = ParkingLot(self._held, scheduler.limits, config.max_held)
        self._announcer = Announcer(scheduler, self._held)
        self._steps_in_flight = 0
        self._failures = 0  # steps that raised
        self._draining = False
        self._exited = False
        self._counters: Counter[str] = Counter()
        self._reporter = LoadReporter(scheduler, self._counters, config.report_interval_ns)
        self._commands: list[Command] = []
        bounds = (config.max_held, config.orphan_hold_ns)
        self._custody = Custody(self._held, scheduler, self._reporter, self._counters, self._commands, *bounds)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def held(self) -> HeldTable:
        """To look at, not to change."""
        return self._held

    @property
    def orphans(self) -> Orphans:
        """To look at, not to change. A hello tells their keys."""
        return self._custody.orphans

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take one event. The commands must be carried out before the next call."""
        match event:
            case StepFinished():
                self._steps_in_flight -= 1
                if event.result.error is not None:
                    self._failures += 1
                    self._announcer.start_over()
                self._report_updates(self._scheduler.update(event.result), now_ns)
            case OrderReceived(gateway, order):
                self._obey(gateway, order, now_ns)
            case ReceiveCompleted():
                self._activate(event, now_ns)
            case ReceiveFailed(transfer, reason):
                self._transfer_failed(transfer, reason, quietly=reason == FINISHED)
            case SendAcknowledged(transfer, stats):
                count_sent(self._counters, stats)
                self._send_ended(transfer)
            case SendFailed(transfer, reason, handed_off):
                self._transfer_failed(transfer, reason, quietly=handed_off)
            case TimerFired(name):
                if name == DRAIN_TIMER:
                    self._hand_back_all()
                elif name == REPORT_TIMER:
                    self._reporter.timer_fired()
                elif name == PARK_TIMER:
                    self._unpark(self._parking.expired(now_ns), "lease ended")
                elif name == ORPHANS_TIMER:
                    self._custody.expire_orphans(now_ns)
                elif name == ALONE_TIMER and self._custody.alone(now_ns):
                    self._exit(GATEWAY_LOST_STATUS, "no gateway came back")
            case DrainRequested():
                self._drain(now_ns)
            case GatewayConnected(gateway, name, epoch):
                self._custody.gateway_connected(gateway, name, epoch, now_ns)
            case GatewayLost(gateway, reason):
                self._custody.gateway_lost(gateway, now_ns, keep=not self._draining)
                if not self._config.orphan_hold_ns and self._custody.alone(now_ns):
                    self._exit(GATEWAY_LOST_STATUS, f"gateway {gateway} is lost: {reason}")
        return self._take_commands()

    def advance(self, now_ns: int) -> list[Command]:
        """After a batch of events: plan what can be planned, report what is due, end a finished drain."""
        while self._steps_in_flight <= self._config.plan_ahead and self._scheduler.has_work():
            plan = self._scheduler.plan()
            if plan is None:
                parked = self._parking.all() if not self._steps_in_flight else []
                if not parked:
                    break
                self._unpark(parked[:1], "its room is needed")  # D may hold what it waits for, for what waits here
                continue
            self._steps_in_flight += 1
            self._commands += [ForgetUnsent(transfer) for transfer in self._announcer.preempted(plan.released)]
            sinks = {
                index: sink
                for index, row in enumerate(plan.rows)
                if (sink := self._announcer.sink(row.slot, row.start, row.count))
            }
            manifest = self._held.manifest(plan, self._scheduler.key_of_slot)
            self._commands.append(StartStep(plan, sinks, self._failures, manifest))
        messages, timer_ns = self._reporter.due(now_ns)
        messages += self._custody.news()
        self._commands += [SendToGateway(None, message) for message in messages]
        if timer_ns is not None:
            self._commands.append(SetTimer(REPORT_TIMER, timer_ns))
        if self._draining and not self._held and not self._exited:
            self._commands.append(SendToGateway(None, Drained()))
            self._exit(0, "drained")
        return self._take_commands()

    # --- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, gateway: int, order: Run | Reserve | Prefill | Cancel | Drain, now_ns: int) -> None:
        if gateway not in self._custody.owners:
            self._counters["orders_of_lost_gateways"] += 1
            return
        match order:
            case Cancel():
                held = self._held.attempt(order.request, order.choice)
                if held is not None and held.gateway == gateway and held.name.attempt <= order.attempt:
                    self._custody.drop(held, "cancelled")
            case Drain():
                self._drain(now_ns)
            case Run() | Reserve() | Prefill():
                work = order.work
                key = _key(work)
                held = self._held.attempt(work.request, work.choice)
                if self._held.is_old(key) or (held is not None and held.gateway not in (gateway, None)):
                    return  # fenced: old, the same message again (nobody would cancel it now), or somebody else's name
                if isinstance(order, Run) and not self._draining and self._custody.adopt(gateway, work, key):
                    return
                if held is not None:
                    self._custody.drop(held, "superseded")
                self._take(gateway, order, key)

    def _take(self, gateway: int, order: Run | Reserve | Prefill, key: SequenceKey) -> None:
        work = order.work
        if self._draining:
            self._refuse(gateway, work, "draining")
        elif len(self._held) >= self._config.max_held:
            self._refuse(gateway, work, "full")
        else:
            try:
                match order:
                    case Run():
                        self._run(gateway, order, key)
                    case Reserve():
                        self._reserve(gateway, order, key)
                    case Prefill():
                        self._prefill(gateway, order, key)
            except QueueFull:
                self._refuse(gateway, work, "full")
            except CannotFit:
                self._refuse(gateway, work, "too_long")

    def _run(self, gateway: int, order: Run, key: SequenceKey) -> None:
        parks = order.park_ms > 0
        if parks and not self._parking.admits(len(order.work.token_ids)):
            self._refuse(gateway, order.work, "full")
            return
        self._scheduler.add(order.work, prefill_only=parks)
        held = Held(key, key, gateway, order.work, HeldState.PREFILLING if parks else HeldState.RUNNING)
        self._custody.hold(held)
        if parks:
            held.log = None  # it would never go on: nobody can take it over
            self._parking.expect(key, order.park_ms * 1_000_000)

    def _reserve(self, gateway: int, order: Reserve, key: SequenceKey) -> None:
        reservation = self._scheduler.reserve(order.work)
        if reservation is None:
            self._refuse(gateway, order.work, "full")
            return
        cached = reservation.cached_tokens
        self._custody.hold(Held(key, key, gateway, order.work, HeldState.RESERVED, order.transfer, announced=cached))
        accept = Accept(*key, transfer=order.transfer, cached_tokens=cached)
        self._commands += [OpenReceive(receive_order(order, key, reservation)), SendToGateway(gateway, accept)]

    def _prefill(self, gateway: int, order: Prefill, key: SequenceKey) -> None:
        self._scheduler.add(order.work, prefill_only=True)
        first = min(order.first_token, len(order.work.token_ids))
        self._custody.hold(Held(key, key, gateway, order.work, HeldState.PREFILLING, order.transfer, announced=first))
        self._commands.append(OpenSend(send_order(order, key, first)))

    def _refuse(self, gateway: int, work: Work, reason: RefuseReason) -> None:
        retry_after_ms = self._config.retry_after_ms if reason == "full" else 0
        self._counters[f"refused_{reason}"] += 1
        self._held.is_now_over(_key(work))
        self._commands.append(SendToGateway(gateway, Refuse(*_key(work), reason=reason, retry_after_ms=retry_after_ms)))

    # --- steps ------------------------------------------------------------------------------------------------------

    def _report_updates(self, updates: list[SequenceUpdate], now_ns: int) -> None:
        """One Tokens message a gateway for the whole step."""
        entries: dict[int, list[TokenEntry]] = {}
        handoffs: list[tuple[Held, SequenceUpdate]] = []
        for update in updates:
            held = self._held.by_key.get(update.key)
            if held is None:
                continue
            if update.failed is not None:
                self._custody.fail(held, update.failed, retry=False)
                continue
            entry = token_entry(held.name, held.work, update, self._digest_kv)
            if held.log is not None:
                held.log.add(entry)
            if held.gateway is not None:
                entries.setdefault(held.gateway, []).append(entry)
            if held.state is HeldState.PREFILLING:
                handoffs.append((held, update))
            elif update.finish is not None:
                self._custody.finished(held)
        for gateway, batch in entries.items():
            self._commands.append(SendToGateway(gateway, Tokens(batch)))
        for held, update in handoffs:
            self._hand_off(held, update, now_ns)

    def _hand_off(self, held: Held, update: SequenceUpdate, now_ns: int) -> None:
        """P drew the first token: pass it to D, or free D if it was also the last; without a D, keep the KV."""
        if update.finish is not None:
            self._custody.drop(held, FINISHED)
            return
        if held.key in self._parking:
            held.move(HeldEvent.PARKED)
            self._counters["parked"] += 1
            self._parking.park(held.key, now_ns)
            self._set_park_timer()
            return
        held.move(HeldEvent.FIRST_TOKEN_DRAWN)
        if held.transfer is None:  # the transfer failed before; nobody waits for these blocks
            self._custody.drop(held, "no transfer")
        else:
            self._commands.append(SendHandoff(held.transfer, handoff_of(update)))

    # --- transfers --------------------------------------------------------------------------------------------------

    def _activate(self, event: ReceiveCompleted, now_ns: int) -> None:
        """D has everything. The first token is reported again, so that it survives P and comes before D's next one."""
        handoff = event.handoff
        held = self._held.by_transfer.get(event.transfer)
        if held is None or held.state is not HeldState.RESERVED:
            return
        held.move(HeldEvent.TRANSFER_COMPLETED)
        self._custody.runs(held)
        count_received(self._counters, len(held.work.token_ids) - held.announced, event.stats)
        self._held.end_transfer(held)
        token = SampledToken(handoff.token_id, handoff.logprob, handoff.top)
        updates = self._scheduler.activate(held.key, token)
        first = SequenceUpdate(
            key=held.key,
            position=len(held.work.token_ids) - held.work.num_prompt,
            tokens=[token],
            cached_tokens=handoff.cached_tokens,
            logit_digests=[handoff.logit_digest] if handoff.logit_digest is not None else None,
        )
        if updates:
            first.finish = updates[0].finish
            first.block_table = updates[0].block_table
            first.num_computed = updates[0].num_computed
        self._report_updates([first], now_ns)

    def _send_ended(self, transfer: int) -> None:
        held = self._held.by_transfer.get(transfer)
        if held is not None:
            self._scheduler.release(held.key)
            self._custody.forget(held)

    def _transfer_failed(self, transfer: int, reason: str, *, quietly: bool) -> None:
        """``quietly``: P's token was the last, or D has the handoff and its word counts."""
        held = self._held.by_transfer.get(transfer)
        if held is not None and quietly:
            self._custody.drop(held, reason)
        elif held is not None:  # the peer's words: that it drains does not mean that this engine does
            self._custody.fail(held, f"transfer: {reason}", retry=True)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _unpark(self, parked: list[Held], reason: str) -> None:
        """Free what is parked and say so; whoever comes for it computes it again."""
        for held in parked:
            self._counters["parked_in_vain"] += 1
            self._custody.fail(held, reason, retry=True)
        self._set_park_timer()

    def _set_park_timer(self) -> None:
        at_ns = self._parking.next_end_ns()
        if at_ns is not None:
            self._commands.append(SetTimer(PARK_TIMER, at_ns))

    def _drain(self, now_ns: int) -> None:
        if not self._draining:
            self._draining = True
            self._custody.abandon_orphans()
            self._unpark(self._parking.all(), "draining")
            self._commands.append(SetTimer(DRAIN_TIMER, now_ns + self._config.drain_timeout_ns))

    def _hand_back_all(self) -> None:
        """The drain took too long: the gateway resumes the rest elsewhere from the committed tokens."""
        for held in list(self._held.by_key.values()):
            self._custody.fail(held, HANDED_BACK, retry=True)

    def _exit(self, status: int, reason: str) -> None:
        if not self._exited:
            self._exited = True
            self._commands.append(Exit(status, reason))

    def _take_commands(self) -> list[Command]:
        commands = self._commands.copy()
        self._commands.clear()
        return commands


def _key(work: Work) -> SequenceKey:
    return SequenceKey(work.request, work.choice, work.attempt)
