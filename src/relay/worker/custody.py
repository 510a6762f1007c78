"""Whose the held sequences are: owners, orphans, and what happens to a sequence when either changes."""

from collections import Counter

from relay.engine.scheduler import Scheduler
from relay.ids import SequenceKey
from relay.protocol.messages import Message, SequenceFailed, Tokens, Work
from relay.protocol.messages import Orphans as OrphanList
from relay.worker.commands import AbortTransfer, CloseGateway, Command, SendToGateway, SetTimer
from relay.worker.held import Held
from relay.worker.orphans import Orphans
from relay.worker.owners import Owners
from relay.worker.report import LoadReporter
from relay.worker.table import HeldTable
from relay.worker.token_log import TokenLog

ORPHANS_TIMER = "orphans"
ALONE_TIMER = "alone"


class Custody:
    """A part of the worker core: shares its table, scheduler, counters and list of commands.

    ``hold_ns`` 0: what a lost gateway ordered is dropped at once and nothing is logged.
    """

    def __init__(
        self,
        held: HeldTable,
        scheduler: Scheduler,
        reporter: LoadReporter,
        counters: Counter[str],
        commands: list[Command],
        max_orphans: int,
        hold_ns: int,
    ) -> None:
        self.owners = Owners()
        self.orphans = Orphans(max_orphans)
        self._held = held
        self._scheduler = scheduler
        self._reporter = reporter
        self._counters = counters
        self._commands = commands
        self._hold_ns = hold_ns

    # --- sequences --------------------------------------------------------------------------------------------------

    def hold(self, held: Held) -> None:
        """A sequence begins. What may be asked for again has its tokens logged."""
        work = held.work
        if work.resume_key and self._hold_ns:
            held.log = TokenLog(len(work.token_ids) - work.num_prompt)
        self._held.add(held)

    def fail(self, held: Held, reason: str, retry: bool) -> None:
        """It cannot go on: tell the owner, if it has one, and free everything."""
        if held.gateway is not None:
            self._commands.append(SendToGateway(held.gateway, SequenceFailed(*held.name, reason=reason, retry=retry)))
        self.drop(held, reason)

    def drop(self, held: Held, reason: str) -> None:
        """Stop and free everything of a sequence, in any state."""
        if held.transfer is not None:
            self._commands.append(AbortTransfer(held.transfer, reason))
        self._scheduler.cancel(held.key)
        self.forget(held)

    def forget(self, held: Held) -> None:
        """It is held no more."""
        self._held.remove(held)
        self.orphans.ended(held)

    def finished(self, held: Held) -> None:
        """It has all its tokens. An orphan's are kept."""
        self._held.remove(held)
        if held.gateway is None:
            self.orphans.finished(held)

    def runs(self, held: Held) -> None:
        """A reserved sequence runs: from now on an orphan can be taken over."""
        if held.gateway is None:
            self.orphans.changed = True

    # --- owners -----------------------------------------------------------------------------------------------------

    def gateway_connected(self, gateway: int, name: str, epoch: int, now_ns: int) -> None:
        """Tell it what it has to know, unless it is an older life of a gateway that has been here since."""
        counts, over = self.owners.connected(gateway, name, epoch)
        if not counts:
            self._commands.append(CloseGateway(gateway))
            self.gateway_lost(gateway, now_ns, keep=True)
            return
        for older in over:
            self._commands.append(CloseGateway(older))
            self.gateway_lost(older, now_ns, keep=True)
        self._commands += [SendToGateway(gateway, message) for message in self._reporter.snapshot(now_ns)]
        self._commands.append(SendToGateway(gateway, OrphanList(self.orphans.keys())))

    def gateway_lost(self, gateway: int, now_ns: int, *, keep: bool) -> None:
        """What it ordered is kept for others if its client can come back, and freed if not (or if not to ``keep``)."""
        self.owners.lost(gateway, now_ns)
        for held in [held for held in self._held.by_key.values() if held.gateway == gateway]:
            if held.log is None or not keep:
                self.drop(held, "its gateway is lost")
                continue
            for leaving in self.orphans.add(held, now_ns + self._hold_ns):
                self.drop(leaving, "another one of its key is held")
        self._watch_orphans()
        if self.owners.alone_since_ns is not None:
            self._commands.append(SetTimer(ALONE_TIMER, self.owners.alone_since_ns + self._hold_ns))

    def alone(self, now_ns: int) -> bool:
        """No gateway has been here for as long as orphans are held."""
        since_ns = self.owners.alone_since_ns
        return since_ns is not None and now_ns - since_ns >= self._hold_ns

    # --- orphans ----------------------------------------------------------------------------------------------------

    def adopt(self, gateway: int, work: Work, name: SequenceKey) -> bool:
        """Let an orphan of ``work`` go on as ``name``, and say all that its new owner has not heard. False: there is none."""
        orphan = self.orphans.find(work)
        if orphan is None:
            return False
        self.orphans.remove(orphan)
        self._counters["orphans_adopted"] += 1
        before = self._held.attempt(name.request, name.choice)
        if before is not None and before is not orphan.held:
            self.drop(before, "superseded")
        if orphan.held is not None:
            self._held.rename(orphan.held, name, gateway)
        else:
            self._held.is_now_over(name)  # all of it is said below
        entry = orphan.log.entry(name, orphan.work, len(work.token_ids) - work.num_prompt)
        if entry is not None:
            self._commands.append(SendToGateway(gateway, Tokens([entry])))
        return True

    def expire_orphans(self, now_ns: int) -> None:
        for held in self.orphans.expired(now_ns):
            self.drop(held, "nobody asked for it")
        self._watch_orphans()

    def abandon_orphans(self) -> None:
        """The worker drains: who asks for them has them computed elsewhere."""
        for held in self.orphans.clear():
            self.drop(held, "draining")

    def news(self) -> list[Message]:
        """The list of orphans, if it has changed since the last call."""
        if not self.orphans.changed:
            return []
        self.orphans.changed = False
        return [OrphanList(self.orphans.keys())]

    def _watch_orphans(self) -> None:
        next_ns = self.orphans.next_ns()
        if next_ns is not None:
            self._commands.append(SetTimer(ORPHANS_TIMER, next_ns))
