"""When it is worth asking again after a refusal for lack of room: a worker that said it, and a choice that heard it; pure.

A worker that said it is asked nothing of that kind until news of room comes from it, or the time that it named is over; each
refusal in a row doubles that time. A choice that heard it goes to whoever has room, but after a few refusals in a row it waits
longer from one to the next, whatever the news: so it is asked for ever fewer times, however many workers say whatever.
"""

from dataclasses import dataclass

from relay.config import MILLISECOND, SECOND
from relay.control_config import RetryConfig

FREE_REFUSALS = 4  # of one choice in a row, before it waits by itself
MAX_HINT_NS = 10 * SECOND  # a worker can ask for no more
MAX_DOUBLINGS = 16


def grown(base_ns: int, doublings: int, most_ns: int) -> int:
    """``base_ns``, doubled so often as long as that is not more than ``most_ns``. Never less than ``base_ns``."""
    return max(base_ns, min(most_ns, base_ns << min(doublings, MAX_DOUBLINGS)))


def choice_delay_ns(refusals: int, retry: RetryConfig) -> int:
    """How long a choice waits that was refused so often in a row."""
    if refusals <= FREE_REFUSALS:
        return 0
    return grown(int(retry.backoff_s * SECOND), refusals - FREE_REFUSALS - 1, int(retry.max_backoff_s * SECOND))


def hint_ns(retry_after_ms: int) -> int:
    """What a worker asks for, within reason."""
    return max(0, min(retry_after_ms * MILLISECOND, MAX_HINT_NS))


@dataclass(slots=True)
class Refusals:
    """What one worker said to one kind of order. ``blocked``: it is not asked now."""

    blocked: bool = False
    in_a_row: int = 0
    since_ns: int = 0
    until_ns: int = 0

    def refused(self, hint_ns: int, retry: RetryConfig, now_ns: int) -> None:
        """Orders that were on their way when the first one was refused are not further refusals in a row."""
        if self.blocked:
            return
        self.blocked = True
        self.since_ns = now_ns
        base_ns = hint_ns or int(retry.backoff_s * SECOND)
        self.until_ns = now_ns + grown(base_ns, self.in_a_row, int(retry.max_backoff_s * SECOND))
        self.in_a_row += 1

    def taken(self, asked_ns: int) -> None:
        """An order of ``asked_ns`` was taken."""
        if asked_ns >= self.since_ns:
            self.in_a_row = 0

    def pass_time(self, now_ns: int) -> None:
        if now_ns >= self.until_ns:
            self.blocked = False
