"""Load and prefix-cache reports to the gateways, bounded in rate and size."""

from collections.abc import Mapping

import msgspec

from relay.engine.scheduler import Scheduler
from relay.protocol.messages import CacheChanged, Load, Message

MAX_HASHES = 8192  # a message


class LoadReporter:
    """Says what changed since the last report, at most once an interval. ``counters``: the worker's own, beside the scheduler's."""

    def __init__(self, scheduler: Scheduler, counters: Mapping[str, float], interval_ns: int) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._interval_ns = interval_ns
        self._next_ns = 0
        self._timer_set = False
        self._sequence = 0
        self._last: Load | None = None

    def timer_fired(self) -> None:
        self._timer_set = False

    def due(self, now_ns: int) -> tuple[list[Message], int | None]:
        """(messages to send now, when to call again if that needs a timer)."""
        if now_ns < self._next_ns:
            if self._timer_set:
                return [], None
            self._timer_set = True
            return [], self._next_ns
        messages: list[Message] = self._cache_changes()
        load = self._load()
        if load != self._last:
            self._last = load
            messages.append(load)
        if messages:
            self._next_ns = now_ns + self._interval_ns
        return messages, None

    def _cache_changes(self) -> list[Message]:
        added, removed = self._scheduler.cache_changes()
        messages: list[Message] = []
        while added or removed:
            self._sequence += 1
            messages.append(CacheChanged(self._sequence, added[:MAX_HASHES], removed[:MAX_HASHES]))
            added, removed = added[MAX_HASHES:], removed[MAX_HASHES:]
        return messages

    def snapshot(self, now_ns: int) -> list[Message]:
        """For a gateway that has heard nothing yet; what ``due`` returns from now on follows without a gap."""
        self._next_ns = now_ns + self._interval_ns
        units = self._scheduler.cached_units()
        parts = [units[first : first + MAX_HASHES] for first in range(0, len(units), MAX_HASHES)] or [[]]
        first = self._sequence - len(parts) + 1
        messages: list[Message] = [
            CacheChanged(first + index, part, reset=index == 0) for index, part in enumerate(parts)
        ]
        return [*messages, self._load()]

    def _load(self) -> Load:
        load = self._scheduler.load()
        return msgspec.structs.replace(load, counters={**load.counters, **self._counters})
