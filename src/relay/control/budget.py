"""Budgets of extra work: integer token buckets that fill with the work that was asked for."""

from relay.config import SECOND


class TokenBucket:
    """Holds at most ``burst`` tokens. Earns ``per_mille`` of work done and ``per_second`` by itself; may run into debt.

    Counts in thousandths, so nothing is rounded away. ``full``: begins with the burst instead of nothing.
    """

    def __init__(self, per_mille: int, burst: int, now_ns: int = 0, *, per_second: int = 0, full: bool = False) -> None:
        self._per_mille = per_mille
        self._burst = burst * 1000
        self._per_second = per_second
        self._milli = self._burst if full else 0
        self._since_ns = now_ns

    @property
    def tokens(self) -> int:
        """What is left; negative is debt."""
        return self._milli // 1000

    def earn(self, tokens: int) -> None:
        """So much work was accepted or done."""
        self._milli = min(self._burst, self._milli + tokens * self._per_mille)

    def pass_time(self, now_ns: int) -> None:
        """Add what the time since the last call earns; what is less than a thousandth stays for the next one."""
        if self._per_second:
            earned = (now_ns - self._since_ns) * self._per_second * 1000 // SECOND
            self._since_ns += earned * SECOND // (self._per_second * 1000)
            self._milli = min(self._burst, self._milli + earned)

    def affords(self, tokens: int) -> bool:
        """What costs more than the whole burst can be had for all of it."""
        return self._milli >= min(tokens * 1000, self._burst)

    def spend(self, tokens: int) -> None:
        self._milli -= tokens * 1000

    def wait_ns(self, tokens: int) -> int:
        """How long time alone takes until ``affords(tokens)``."""
        missing = min(tokens * 1000, self._burst) - self._milli
        return max(0, missing * SECOND // (self._per_second * 1000)) if self._per_second else 0
