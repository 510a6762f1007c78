"""Prompts that P has computed and no decode worker has room for: their KV stays pinned under a lease, within a bound; pure.

So a full D delays only those who must decode there: P goes on with other prompts, and half of its pool and places stays theirs.
"""

from relay.engine.limits import SchedulerLimits
from relay.ids import SequenceKey
from relay.worker.held import Held, HeldState
from relay.worker.table import HeldTable

PARK_TIMER = "park"


class ParkingLot:
    """Who is parked, or will be once the first token is drawn, and until when. At most half of the pool's tokens
    and half of ``max_held`` sequences at once.

    Whoever ``held`` knows no more has left, however that came.
    """

    def __init__(self, held: HeldTable, limits: SchedulerLimits, max_held: int) -> None:
        self._held = held
        self._max_tokens = limits.num_blocks * limits.block_size // 2
        self._max_sequences = max_held // 2
        self._lease_ns: dict[SequenceKey, int] = {}
        self._until_ns: dict[SequenceKey, int] = {}

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._lease_ns

    def admits(self, num_tokens: int) -> bool:
        """Whether a prompt of ``num_tokens`` may still come."""
        self._forget_gone()
        if len(self._lease_ns) >= self._max_sequences:
            return False
        taken = sum([len(self._held.by_key[key].work.token_ids) for key in self._lease_ns])
        return taken + num_tokens <= self._max_tokens

    def expect(self, key: SequenceKey, lease_ns: int) -> None:
        """``key`` is to be parked for ``lease_ns`` from its first token on."""
        self._lease_ns[key] = lease_ns

    def park(self, key: SequenceKey, now_ns: int) -> None:
        """Its first token is drawn."""
        self._until_ns[key] = now_ns + self._lease_ns[key]

    def next_end_ns(self) -> int | None:
        """When the next lease ends."""
        self._forget_gone()
        return min(self._until_ns.values(), default=None)

    def expired(self, now_ns: int) -> list[Held]:
        """Those whose lease is over."""
        self._forget_gone()
        return [self._held.by_key[key] for key, until_ns in self._until_ns.items() if until_ns <= now_ns]

    def all(self) -> list[Held]:
        """Those that are parked now."""
        self._forget_gone()
        return [held for key in self._until_ns if (held := self._held.by_key[key]).state is HeldState.PARKED]

    def _forget_gone(self) -> None:
        for table in (self._lease_ns, self._until_ns):
            for key in [key for key in table if key not in self._held.by_key]:
                del table[key]
