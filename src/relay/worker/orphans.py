"""Sequences that have lost their gateway: kept for a while, for any gateway whose client asks again."""

from dataclasses import dataclass

from relay.protocol.messages import Work
from relay.worker.held import Held, HeldState
from relay.worker.token_log import TokenLog

OrphanKey = tuple[bytes, int]  # resume key, choice


@dataclass(slots=True)
class Orphan:
    """``held`` None: it has finished. Its log is kept, its blocks are not."""

    held: Held | None
    work: Work
    log: TokenLog
    until_ns: int


class Orphans:
    """At most one a (resume key, choice); the longer one stays. ``changed`` is set when the list to be told has changed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: dict[OrphanKey, Orphan] = {}
        self.changed = False
        self.num_adopted = 0

    def __len__(self) -> int:
        return len(self._all)

    def keys(self) -> list[OrphanKey]:
        """Those that can be taken over now: what is still prefilled or received cannot."""
        return [key for key, o in self._all.items() if o.held is None or o.held.state is HeldState.RUNNING]

    def add(self, held: Held, until_ns: int) -> list[Held]:
        """``held`` has lost its gateway. Returns what has to make way and be dropped: itself, an older one, or nothing."""
        held.gateway = None
        log = held.log
        if log is None:
            return [held]
        key = (held.work.resume_key, held.work.choice)
        known = self._all.get(key)
        if known is not None and len(known.work.token_ids) + len(known.log.token_ids) > (
            len(held.work.token_ids) + len(log.token_ids)
        ):
            return [held]
        leaving = self._take([key] if known is not None else [])
        if len(self._all) >= self._limit:
            leaving += self._take([next(iter(self._all))])
        self._all[key] = Orphan(held, held.work, log, until_ns)
        self.changed = True
        return leaving

    def find(self, work: Work) -> Orphan | None:
        """The orphan that ``work`` asks for."""
        orphan = self._all.get((work.resume_key, work.choice)) if work.resume_key else None
        if orphan is None or (orphan.held is not None and orphan.held.state is not HeldState.RUNNING):
            return None
        return orphan if orphan.log.fits(orphan.work, work) else None

    def remove(self, orphan: Orphan) -> None:
        """It has a gateway again."""
        self.num_adopted += 1
        del self._all[orphan.work.resume_key, orphan.work.choice]
        self.changed = True

    def ended(self, held: Held) -> None:
        """``held``, if it is one, has ended without its last token."""
        key = (held.work.resume_key, held.work.choice)
        orphan = self._all.get(key)
        if orphan is not None and orphan.held is held:
            del self._all[key]
            self.changed = True

    def finished(self, held: Held) -> None:
        """It has ended by itself: only its log is left."""
        self._all[held.work.resume_key, held.work.choice].held = None

    def expired(self, now_ns: int) -> list[Held]:
        """Forget those nobody asked for in time; returns what has to be dropped."""
        return self._take([key for key, orphan in self._all.items() if orphan.until_ns <= now_ns])

    def clear(self) -> list[Held]:
        """Forget all; returns what has to be dropped."""
        return self._take(list(self._all))

    def next_ns(self) -> int | None:
        """When the first of them expires."""
        return min((orphan.until_ns for orphan in self._all.values()), default=None)

    def _take(self, keys: list[OrphanKey]) -> list[Held]:
        gone = [self._all.pop(key) for key in keys]
        self.changed = self.changed or bool(gone)
        return [orphan.held for orphan in gone if orphan.held is not None]

    def check(self) -> None:
        """Assert that every orphan has no gateway (I8)."""
        assert len(self._all) <= self._limit
        for orphan in self._all.values():
            assert orphan.held is None or orphan.held.gateway is None, f"{orphan.held} has a gateway and is an orphan"
