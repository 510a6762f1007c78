"""Bugs in what several gateways need: owners, orphans, taking over."""

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


def _forgets_what_was_said(original: Any) -> Any:
    """The new owner hears only what comes from now on."""

    def entry(log: TokenLog, name: SequenceKey, old: Work, position: int) -> TokenEntry | None:
        return None

    return entry


def _skips_a_token(original: Any) -> Any:
    def entry(log: TokenLog, name: SequenceKey, old: Work, position: int) -> Any:
        return original(log, name, old, position + 1)

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


def _never_expires(original: Any) -> Any:
    return lambda orphans, now_ns: []


def _drops_instead_of_keeping(original: Any) -> Any:
    def lost(custody: Custody, gateway: int, now_ns: int, *, keep: bool) -> None:
        original(custody, gateway, now_ns, keep=False)

    return lost


def _cut_is_death(original: Any) -> Any:
    """A worker whose connection to one gateway was lost is killed for all."""

    def lose(membership: Membership, *arguments: Any, cut: bool = False, **keywords: Any) -> None:
        original(membership, *arguments, **keywords)

    return lose


TABLE = (
    Mutant("an orphan's tokens are not told", "I16", TokenLog, "entry", _forgets_what_was_said),
    Mutant("an orphan's tokens are told from one too late", "I16", TokenLog, "entry", _skips_a_token),
    Mutant("an adopted sequence stays with its first owner", "I3", HeldTable, "rename", _keeps_the_old_owner),
    Mutant("any orphan is taken over", "I16", Orphans, "find", _any_sequence_will_do),
    Mutant("orphans are kept for ever", "I8", Orphans, "expired", _never_expires),
    Mutant("nothing is kept for a gateway that died", "scenario", Custody, "gateway_lost", _drops_instead_of_keeping),
    Mutant("a lost connection kills the worker", "scenario", Membership, "lose", _cut_is_death),
)
