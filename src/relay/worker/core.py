"""The pure core of an engine process: events in, commands out.

It owns what the worker holds and drives the scheduler; the shell owns sockets, threads and clocks. Between events the shell
calls ``advance``, which plans steps ahead and reports load. Roles are the router's business: any worker takes any order.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from relay.engine.scheduler import CannotFit, QueueFull, Scheduler
from relay.engine.sequence import SequenceUpdate
from relay.ids import SequenceKey
from relay.kernels.backend import SampledToken
from relay.protocol.messages import (
    GATEWAY_LOST_STATUS,
    Accept,
    Cancel,
    Drain,
    Drained,
    Prefill,
    Refuse,
    RefuseReason,
    Reserve,
    Run,
    SequenceFailed,
    TokenEntry,
    Tokens,
    Work,
)
from relay.transfer.contract import (
    FINISHED,
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveOrder,
    SendAcknowledged,
    SendFailed,
    SendOrder,
)
from relay.transfer.frame import Handoff
from relay.worker.commands import (
    AbortTransfer,
    Command,
    Exit,
    ForgetUnsent,
    OpenReceive,
    OpenSend,
    SendHandoff,
    SendToGateway,
    SetTimer,
    SinkRow,
    StartStep,
)
from relay.worker.entries import DigestKv, handoff_of, token_entry
from relay.worker.events import (
    DrainRequested,
    Event,
    GatewayLost,
    OrderReceived,
    StepFinished,
    TimerFired,
)
from relay.worker.held import Held, HeldEvent, HeldState
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


class WorkerCore:
    """``digest_kv(block_table, num_tokens)`` hashes KV bytes for capturing requests; it must read the blocks at once."""

    def __init__(
        self,
        config: WorkerConfig,
        scheduler: Scheduler,
        digest_kv: DigestKv,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._digest_kv = digest_kv
        self._held = HeldTable()
        self._steps_in_flight = 0
        self._failures = 0  # steps that raised
        self._draining = False
        self._exited = False
        self._counters: Counter[str] = Counter()
        self._reporter = LoadReporter(scheduler, self._counters, config.report_interval_ns)
        self._commands: list[Command] = []

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def held(self) -> HeldTable:
        """To look at, not to change."""
        return self._held

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take one event. The commands must be carried out before the next call."""
        match event:
            case StepFinished():
                self._steps_in_flight -= 1
                if event.result.error is not None:
                    self._failures += 1
                    for held in self._held.by_slot.values():
                        held.announced = 0  # what the step did not reach comes again; known ranges are ignored
                self._report_updates(self._scheduler.update(event.result))
            case OrderReceived(gateway, order):
                self._obey(gateway, order, now_ns)
            case ReceiveCompleted(transfer, handoff):
                self._activate(transfer, handoff)
            case ReceiveFailed(transfer, reason):
                self._receive_failed(transfer, reason)
            case SendAcknowledged(transfer):
                self._send_ended(transfer)
            case SendFailed(transfer, reason, handed_off):
                self._send_failed(transfer, reason, handed_off)
            case TimerFired(name):
                if name == DRAIN_TIMER:
                    self._hand_back_all()
                elif name == REPORT_TIMER:
                    self._reporter.timer_fired()
            case DrainRequested():
                self._drain(now_ns)
            case GatewayLost(gateway, reason):
                self._exit(GATEWAY_LOST_STATUS, f"gateway {gateway} is lost: {reason}")
        return self._take_commands()

    def advance(self, now_ns: int) -> list[Command]:
        """After a batch of events: plan what can be planned, report what is due, end a finished drain."""
        while self._steps_in_flight <= self._config.plan_ahead and self._scheduler.has_work():
            plan = self._scheduler.plan()
            if plan is None:
                break
            self._steps_in_flight += 1
            self._revoke_preempted(plan.released)
            sinks = {
                index: sink
                for index, row in enumerate(plan.rows)
                if (sink := self._sink(row.slot, row.start, row.count))
            }
            manifest = self._held.manifest(plan, self._scheduler.key_of_slot)
            self._commands.append(StartStep(plan, sinks, self._failures, manifest))
        messages, timer_ns = self._reporter.due(now_ns)
        self._commands += [SendToGateway(None, message) for message in messages]
        if timer_ns is not None:
            self._commands.append(SetTimer(REPORT_TIMER, timer_ns))
        if self._draining and not self._held and not self._exited:
            self._commands.append(SendToGateway(None, Drained()))
            self._exit(0, "drained")
        return self._take_commands()

    # --- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, gateway: int, order: Run | Reserve | Prefill | Cancel | Drain, now_ns: int) -> None:
        match order:
            case Cancel():
                held = self._held.attempt(order.request, order.choice)
                if held is not None and held.key.attempt <= order.attempt:
                    self._drop(held, "cancelled")
            case Drain():
                self._drain(now_ns)
            case Run() | Reserve() | Prefill():
                work = order.work
                key = _key(work)
                held = self._held.attempt(work.request, work.choice)
                if held is not None:
                    if held.key.attempt >= key.attempt:
                        return  # fenced: an old attempt, or the same message again
                    self._drop(held, "superseded")
                elif self._held.is_over(gateway, key):
                    return
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
                        self._scheduler.add(work)
                        self._held.add(Held(key, gateway, work, HeldState.RUNNING))
                    case Reserve():
                        self._reserve(gateway, order, key)
                    case Prefill():
                        self._prefill(gateway, order, key)
            except QueueFull:
                self._refuse(gateway, work, "full")
            except CannotFit:
                self._refuse(gateway, work, "too_long")

    def _reserve(self, gateway: int, order: Reserve, key: SequenceKey) -> None:
        reservation = self._scheduler.reserve(order.work)
        if reservation is None:
            self._refuse(gateway, order.work, "full")
            return
        cached = reservation.cached_tokens
        self._held.add(Held(key, gateway, order.work, HeldState.RESERVED, order.transfer, announced=cached))
        receive = ReceiveOrder(
            transfer=order.transfer,
            attempt=key.attempt,
            source=order.source,
            source_incarnation=order.source_incarnation,
            first_token=cached,
            num_tokens=len(order.work.token_ids),
            block_table=tuple(reservation.block_table),
        )
        accept = Accept(*key, transfer=order.transfer, cached_tokens=cached)
        self._commands += [OpenReceive(receive), SendToGateway(gateway, accept)]

    def _prefill(self, gateway: int, order: Prefill, key: SequenceKey) -> None:
        num_tokens = len(order.work.token_ids)
        self._scheduler.add(order.work, prefill_only=True)
        first = min(order.first_token, num_tokens)
        self._held.add(Held(key, gateway, order.work, HeldState.PREFILLING, order.transfer, announced=first))
        send = SendOrder(
            transfer=order.transfer,
            attempt=key.attempt,
            target=order.target,
            target_incarnation=order.target_incarnation,
            addresses=tuple(order.addresses),
            first_token=first,
            num_tokens=num_tokens,
        )
        self._commands.append(OpenSend(send))

    def _refuse(self, gateway: int, work: Work, reason: RefuseReason) -> None:
        retry_after_ms = self._config.retry_after_ms if reason == "full" else 0
        refusal = Refuse(*_key(work), reason=reason, retry_after_ms=retry_after_ms)
        self._commands.append(SendToGateway(gateway, refusal))

    # --- steps ------------------------------------------------------------------------------------------------------

    def _sink(self, slot: int, start: int, count: int) -> SinkRow | None:
        """What the row at ``slot`` means to a transfer; None for rows that stay here."""
        held = self._held.by_slot.get(slot)
        if held is None:
            held = self._held.by_key.get(self._scheduler.key_of_slot(slot))
            if held is None or held.state is not HeldState.PREFILLING:
                return None
            held.slot = slot
            self._held.by_slot[slot] = held
        end = start + count
        if held.transfer is None or end <= held.announced:
            return None
        table = np.array(self._scheduler.block_table(held.key), np.int32)
        gap = held.announced
        first = max(start, gap)
        held.announced = end
        return SinkRow(held.transfer, gap, first, end - first, table)

    def _revoke_preempted(self, released: list[int]) -> None:
        """A prompt that lost its slot before its first token lost its blocks too: it will be computed and announced anew."""
        for slot in released:
            held = self._held.by_slot.pop(slot, None)
            if held is not None and held.state is HeldState.PREFILLING and held.transfer is not None:
                held.slot = None
                held.announced = 0
                self._commands.append(ForgetUnsent(held.transfer))

    def _report_updates(self, updates: list[SequenceUpdate]) -> None:
        """One Tokens message a gateway for the whole step."""
        entries: dict[int, list[TokenEntry]] = {}
        handoffs: list[tuple[Held, SequenceUpdate]] = []
        for update in updates:
            held = self._held.by_key.get(update.key)
            if held is None:
                continue
            if update.failed is not None:
                self._fail(held, update.failed, retry=False)
                continue
            entries.setdefault(held.gateway, []).append(token_entry(held.work, update, self._digest_kv))
            if held.state is HeldState.PREFILLING:
                handoffs.append((held, update))
            elif update.finish is not None:
                self._held.remove(held)
        for gateway, batch in entries.items():
            self._commands.append(SendToGateway(gateway, Tokens(batch)))
        for held, update in handoffs:
            self._hand_off(held, update)

    def _hand_off(self, held: Held, update: SequenceUpdate) -> None:
        """P drew the first token: pass it to D, or free D if it was also the last."""
        if update.finish is not None:
            self._drop(held, FINISHED)
            return
        held.move(HeldEvent.FIRST_TOKEN_DRAWN)
        if held.transfer is None:  # the transfer failed before; nobody waits for these blocks
            self._drop(held, "no transfer")
        else:
            self._commands.append(SendHandoff(held.transfer, handoff_of(update)))

    # --- transfers --------------------------------------------------------------------------------------------------

    def _activate(self, transfer: int, handoff: Handoff) -> None:
        """D has everything. The first token is reported again, so that it survives P and comes before D's next one."""
        held = self._held.by_transfer.get(transfer)
        if held is None or held.state is not HeldState.RESERVED:
            return
        held.move(HeldEvent.TRANSFER_COMPLETED)
        self._counters["kv_transfers_received"] += 1
        self._counters["kv_tokens_received"] += len(held.work.token_ids) - held.announced
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
        self._report_updates([first])

    def _receive_failed(self, transfer: int, reason: str) -> None:
        held = self._held.by_transfer.get(transfer)
        if held is None:
            return
        if reason == FINISHED:
            self._drop(held, reason)
        else:
            self._fail(held, reason, retry=True)

    def _send_ended(self, transfer: int) -> None:
        held = self._held.by_transfer.get(transfer)
        if held is not None:
            self._scheduler.release(held.key)
            self._held.remove(held)

    def _send_failed(self, transfer: int, reason: str, handed_off: bool) -> None:
        """Before the handoff left, the attempt has failed; after it D's word counts and P only frees."""
        held = self._held.by_transfer.get(transfer)
        if held is None:
            return
        if handed_off:
            self._drop(held, reason)
        else:
            self._fail(held, reason, retry=True)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _fail(self, held: Held, reason: str, retry: bool) -> None:
        self._commands.append(SendToGateway(held.gateway, SequenceFailed(*held.key, reason=reason, retry=retry)))
        self._drop(held, reason)

    def _drop(self, held: Held, reason: str) -> None:
        """Stop and free everything of a sequence, in any state."""
        if held.transfer is not None:
            self._commands.append(AbortTransfer(held.transfer, reason))
        self._scheduler.cancel(held.key)
        self._held.remove(held)

    def _drain(self, now_ns: int) -> None:
        if not self._draining:
            self._draining = True
            self._commands.append(SetTimer(DRAIN_TIMER, now_ns + self._config.drain_timeout_ns))

    def _hand_back_all(self) -> None:
        """The drain took too long: the gateway resumes the rest elsewhere from the committed tokens."""
        for held in list(self._held.by_key.values()):
            self._fail(held, "draining", retry=True)

    def _exit(self, status: int, reason: str) -> None:
        if not self._exited:
            self._exited = True
            self._commands.append(Exit(status, reason))

    def _take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands


def _key(work: Work) -> SequenceKey:
    return SequenceKey(work.request, work.choice, work.attempt)
