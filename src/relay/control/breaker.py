"""Outcome statistics of a worker or a P→D link, and the breaker that they open."""

from enum import Enum

from relay.config import SECOND
from relay.control_config import BreakerConfig

SLOTS = 10  # parts of the sliding window
EVERYTHING = 1 << 30
MAX_SLOW_TRANSFERS = 64  # what slow start of a link grows to, before there is no bound any more


class BreakerState(Enum):
    """What the statistics say."""

    CLOSED = "closed"
    OPEN = "open"  # left alone
    HALF_OPEN = "half_open"  # slow start: a few at once, then more


class Breaker:
    """Closed → open → half open → closed. Time only enters as an argument, and states change with it: ask with ``at``."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._slot_ns = max(1, int(config.window_s * SECOND) // SLOTS)
        self._slots: dict[int, list[int]] = {}  # number of the slot → [successes, failures]
        self._opened_ns: int | None = None
        self._slow_since_ns: int | None = None
        self._open_s = config.open_s
        self._was_open = False  # half open after having been open, not after a mere restart

    @property
    def opened_ns(self) -> int | None:
        """Since when it is open, as far as anybody has asked; None: it is not."""
        return self._opened_ns

    def at(self, now_ns: int) -> BreakerState:
        """The state at that time."""
        if self._opened_ns is not None:
            if now_ns - self._opened_ns < int(self._open_s * SECOND):
                return BreakerState.OPEN
            self._slow_since_ns = self._opened_ns + int(self._open_s * SECOND)
            self._opened_ns = None
        if self._slow_since_ns is None:
            return BreakerState.CLOSED
        if now_ns - self._slow_since_ns < int(self._config.slow_start_s * SECOND):
            return BreakerState.HALF_OPEN
        self._slow_since_ns = None
        self._open_s = self._config.open_s
        return BreakerState.CLOSED

    def allowance(self, now_ns: int, most: int) -> int:
        """How many may be there at once: none while open, growing to ``most`` in slow start, then no bound."""
        state = self.at(now_ns)
        if state is BreakerState.CLOSED:
            return EVERYTHING
        if state is BreakerState.OPEN or self._slow_since_ns is None:
            return 0
        first = min(self._config.slow_start_seqs, most)
        grown_ns = now_ns - self._slow_since_ns
        return first + (most - first) * grown_ns // int(self._config.slow_start_s * SECOND)

    def succeeded(self, now_ns: int) -> None:
        self._slot(now_ns)[0] += 1

    def failed(self, now_ns: int) -> None:
        """May open it: by the statistics when closed, at once when half open."""
        self._slot(now_ns)[1] += 1
        state = self.at(now_ns)
        if state is BreakerState.HALF_OPEN and self._was_open:
            self._open_s = min(self._config.max_open_s, 2 * self._open_s)
            self._open(now_ns)
        elif state is not BreakerState.OPEN:
            good = sum(slot[0] for slot in self._slots.values())
            bad = sum(slot[1] for slot in self._slots.values())
            config = self._config
            if bad >= config.min_failures and 1000 * bad >= config.failure_per_mille * (good + bad):
                self._open(now_ns)

    def start_slowly(self, now_ns: int) -> None:
        """Its worker is new: nothing is cached there. What was said of it before still counts."""
        if self.at(now_ns) is BreakerState.CLOSED:
            self._slow_since_ns = now_ns
            self._was_open = False

    def _open(self, now_ns: int) -> None:
        self._opened_ns, self._slow_since_ns = now_ns, None
        self._was_open = True
        self._slots.clear()

    def _slot(self, now_ns: int) -> list[int]:
        number = now_ns // self._slot_ns
        slot = self._slots.get(number)
        if slot is None:
            for old in [n for n in self._slots if n <= number - SLOTS]:
                del self._slots[old]
            slot = self._slots[number] = [0, 0]
        return slot


class Breakers:
    """Those of all workers and links, by id; links get one with their first failure."""

    def __init__(self, config: BreakerConfig, workers: list[str]) -> None:
        self._config = config
        self.workers = {worker: Breaker(config) for worker in workers}
        self.links: dict[tuple[str, str], Breaker] = {}

    def link_failed(self, prefill: str, decode: str, now_ns: int) -> None:
        self.links.setdefault((prefill, decode), Breaker(self._config)).failed(now_ns)

    def link_succeeded(self, prefill: str, decode: str, now_ns: int) -> None:
        breaker = self.links.get((prefill, decode))
        if breaker is not None:
            breaker.succeeded(now_ns)

    def link_allowance(self, prefill: str, decode: str, now_ns: int) -> int:
        """How many transfers may use the link at once."""
        breaker = self.links.get((prefill, decode))
        return EVERYTHING if breaker is None else breaker.allowance(now_ns, MAX_SLOW_TRANSFERS)
