"""Bugs in what lets one gateway continue the streams of another: owners, orphans, the log of tokens."""

from typing import Any

from relay.control.membership import Membership
from relay.ids import SequenceKey
from relay.protocol.messages import TokenEntry, Work
from relay.sim.planted.mutant import Mutant
from relay.worker.custody import Custody
from relay.worker.held import Held
from relay.worker.orphans import Orphans
from relay.worker.table import HeldTable
from relay.worker.token_log import TokenLog


def _never_expired(original: Any) -> Any:
    return lambda orphans, now_ns: []


def _dropped_at_once(original: Any) -> Any:
    """What a lost gateway ordered is not kept."""

    def gateway_lost(custody: Custody, gateway: int, now_ns: int, *, keep: bool) -> None:
        original(custody, gateway, now_ns, keep=False)

    return gateway_lost


def _silent(original: Any) -> Any:
    return lambda custody: []


def _one_late(original: Any) -> Any:
    """The new owner is told what follows the next token, not the next token."""

    def entry(log: TokenLog, name: Any, old: Any, position: int) -> Any:
        return original(log, name, old, position + 1)

    return entry


def _forgets_what_was_said(original: Any) -> Any:
    """The new owner hears only what comes from now on."""

    def entry(log: TokenLog, name: SequenceKey, old: Work, position: int) -> TokenEntry | None:
        return None

    return entry


def _keeps_the_old_owner(original: Any) -> Any:
    def rename(table: HeldTable, held: Held, name: SequenceKey, gateway: int) -> None:
        original(table, held, name, 1)

    return rename


def _any_sequence_will_do(original: Any) -> Any:
    """The first orphan is as good as the one that was asked for."""

    def find(orphans: Orphans, work: Work) -> Any:
        return next((o for o in orphans._all.values() if o.held is not None), None)

    return find


def _cut_is_death(original: Any) -> Any:
    """A worker whose connection to one gateway was lost is killed for all."""

    def lose(membership: Membership, *arguments: Any, cut: bool = False, **keywords: Any) -> None:
        original(membership, *arguments, **keywords)

    return lose


def _both_orphans_stay(original: Any) -> Any:
    """What has to make way for another orphan of its key goes on, and nobody knows of it."""

    def add(orphans: Orphans, held: Any, until_ns: int) -> list[Any]:
        original(orphans, held, until_ns)
        return []

    return add


TABLE = (
    Mutant("what makes way for an orphan goes on", "I8", Orphans, "add", _both_orphans_stay),
    Mutant("an adopted stream begins one late", "I16", TokenLog, "entry", _one_late),
    Mutant("orphans are dropped at once", "I16", Custody, "gateway_lost", _dropped_at_once),
    Mutant("orphans are never freed", "I8", Orphans, "expired", _never_expired),
    Mutant("the list of orphans is not told", "I16", Custody, "news", _silent),
    Mutant("an orphan's tokens are not told", "I16", TokenLog, "entry", _forgets_what_was_said),
    Mutant("an adopted sequence stays with its first owner", "I3", HeldTable, "rename", _keeps_the_old_owner),
    Mutant("any orphan is taken over", "I16", Orphans, "find", _any_sequence_will_do),
    Mutant("a lost connection kills the worker", "scenario", Membership, "lose", _cut_is_death),
)
