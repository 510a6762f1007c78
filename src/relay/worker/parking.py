"""Prompts that P has computed and nobody has room for: their KV stays pinned under a lease, within a bound; pure.

So a full decode worker delays only those who must decode there: P goes on with other prompts, and half of its pool stays theirs.
"""

from relay.ids import SequenceKey

PARK_TIMER = "park"


class ParkingLot:
    """Who is parked, or will be once its first token is drawn, and until when. ``max_tokens``: how many prompt tokens may be."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: dict[SequenceKey, int] = {}
        self._lease_ns: dict[SequenceKey, int] = {}
        self._until_ns: dict[SequenceKey, int] = {}

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._tokens

    def admits(self, num_tokens: int) -> bool:
        """Whether a prompt of ``num_tokens`` may still come."""
        return sum(self._tokens.values()) + num_tokens <= self._max_tokens

    def expect(self, key: SequenceKey, num_tokens: int, lease_ns: int) -> None:
        """``key`` is to be parked for ``lease_ns`` from its first token on."""
        self._tokens[key] = num_tokens
        self._lease_ns[key] = lease_ns

    def park(self, key: SequenceKey, now_ns: int) -> int:
        """Its first token is drawn; when the next lease of all ends."""
        self._until_ns[key] = now_ns + self._lease_ns[key]
        return min(self._until_ns.values())

    def forget(self, key: SequenceKey) -> None:
        """It is held no more. Idempotent."""
        for table in (self._tokens, self._lease_ns, self._until_ns):
            table.pop(key, None)

    def expired(self, now_ns: int) -> list[SequenceKey]:
        """Those whose lease is over."""
        return [key for key, until_ns in self._until_ns.items() if until_ns <= now_ns]

    def next_end_ns(self) -> int | None:
        return min(self._until_ns.values(), default=None)

    @property
    def parked(self) -> list[SequenceKey]:
        return list(self._until_ns)
