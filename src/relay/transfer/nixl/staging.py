"""Which staging areas may be written, and when one may be used again; pure.

NIXL writes into D's memory without asking D: nobody there can drop a late write. So its target is never the block pool but a
staging area, and an area whose connection has ended is quarantined until no write can land in it any more: until the agent
that registered it is gone, and with it every address, key and mapping a peer could still be using. The peer's word is not
needed, for a frozen peer gives none. An area is lent again only when also nobody here reads it.
"""

from dataclasses import dataclass
from enum import StrEnum


class AreaState(StrEnum):
    FREE = "free"
    LENT = "lent"  # a connection reads it, its agent lets a peer write it
    QUARANTINED = "quarantined"  # nobody reads it; a write may still land
    UNWRITABLE = "unwritable"  # no write can land; somebody may still read it


class AreaEvent(StrEnum):
    LENT = "lent"
    RELEASED = "released"  # the connection is over and nothing refers to the bytes
    AGENT_GONE = "agent_gone"  # the process that registered the area has ended and was waited for


_S, _E = AreaState, AreaEvent

TRANSITIONS: dict[tuple[AreaState, AreaEvent], AreaState] = {
    (_S.FREE, _E.LENT): _S.LENT,
    (_S.LENT, _E.RELEASED): _S.QUARANTINED,
    (_S.LENT, _E.AGENT_GONE): _S.UNWRITABLE,
    (_S.QUARANTINED, _E.AGENT_GONE): _S.FREE,
    (_S.UNWRITABLE, _E.RELEASED): _S.FREE,
}
"""Pairs that are missing cannot happen: an area has one connection and one agent at a time."""


class NoArea(Exception):
    """Every area is lent or quarantined."""


@dataclass(frozen=True, slots=True)
class StagingLoad:
    """How many areas are in which state."""

    free: int
    lent: int
    quarantined: int  # those that only wait for a reader to end included


class StagingAreas:
    """The states of at most ``limit`` areas, numbered from 0; whoever holds the bytes keeps them by number."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"{limit} staging areas")
        self._limit = limit
        self._states: list[AreaState] = []

    def lend(self) -> int:
        """A free area, lowest number first, or a new one. Raises NoArea."""
        number = next((n for n, state in enumerate(self._states) if state is _S.FREE), len(self._states))
        if number == self._limit:
            load = self.load()
            raise NoArea(f"all {self._limit} staging areas are taken, {load.quarantined} of them in quarantine")
        if number == len(self._states):
            self._states.append(_S.FREE)
        self._move(number, _E.LENT)
        return number

    def released(self, number: int) -> None:
        self._move(number, _E.RELEASED)

    def agent_gone(self, number: int) -> None:
        self._move(number, _E.AGENT_GONE)

    def state(self, number: int) -> AreaState:
        return self._states[number]

    def load(self) -> StagingLoad:
        free, lent = self._states.count(_S.FREE), self._states.count(_S.LENT)
        return StagingLoad(free, lent, len(self._states) - free - lent)

    def _move(self, number: int, event: AreaEvent) -> None:
        before = self._states[number]
        after = TRANSITIONS.get((before, event))
        if after is None:
            raise AssertionError(f"staging area {number} is {before} and was told {event}")
        self._states[number] = after
