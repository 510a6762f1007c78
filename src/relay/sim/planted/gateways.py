"""Bugs in what lets one gateway continue the streams of another: owners, orphans, the log of tokens."""

from typing import Any

from relay.sim.planted.mutant import Mutant
from relay.worker.custody import Custody
from relay.worker.orphans import Orphans
from relay.worker.owners import Owners
from relay.worker.token_log import TokenLog


def _never_expired(original: Any) -> Any:
    return lambda orphans, now_ns: []


def _any_epoch(original: Any) -> Any:
    """Every life of a gateway counts, the old one beside the new one."""

    def connected(owners: Owners, connection: int, gateway: str, epoch: int) -> tuple[bool, list[int]]:
        owners._epochs[gateway] = 0
        original(owners, connection, gateway, epoch)
        return True, []

    return connected


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


TABLE = (
    Mutant("an adopted stream begins one late", "I16", TokenLog, "entry", _one_late),
    Mutant("orphans are dropped at once", "I16", Custody, "gateway_lost", _dropped_at_once),
    Mutant("orphans are never freed", "I8", Orphans, "expired", _never_expired),
    Mutant("old lives of a gateway count", "I3", Owners, "connected", _any_epoch),
    Mutant("the list of orphans is not told", "I16", Custody, "news", _silent),
)
