"""What a sweep must have met: every fault in every moment of a request's life, and every interesting thing by its name."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from relay.sim import moments
from relay.sim.forgery import FORGERIES
from relay.sim.moments import MOMENTS
from relay.sim.swarm import FAULTS

if TYPE_CHECKING:
    from relay.sim.world import World

Cell = tuple[str, str]  # (fault, moment)

KV_DAMAGE = ("kv_corrupt", "kv_truncate", "kv_lose", "kv_repeat", "kv_forge")

IMPOSSIBLE: dict[Cell, str] = {
    **{
        (fault, moments.IDLE): "a KV frame is damaged on its way between two workers that wait for it"
        for fault in KV_DAMAGE
    },
    **{
        (fault, moments.IDLE): "a client that disconnects has a request"
        for fault in ("client_disconnect", "slow_reader", "client_retry")
    },
}
"""Cells that cannot occur, with the reason."""

SOMETIMES = (
    "a hung engine is noticed",
    "a step of one row raised",
    "a step of several rows raised",
    "an engine crashed on its start",
    "control message repeated",
    "failed: deadline_exceeded",
    "failed: engine_error",
    "failed: numerics_changed",
    "failed: quarantined",
    "gateway: blames",
    "gateway: hedges",
    "gateway: hedges_won",
    "gateway: messages_dropped",
    "gateway: moved",
    "gateway: own_stalls",
    "gateway: refused_full",
    "gateway: resumed",
    "gateway: resumes_delayed",
    "gateway: workers_drained",
    "gateway: workers_lost",
    "hello rejected",
    "kv frame: kv_corrupt",
    "kv frame: kv_lose",
    "kv frame: kv_repeat",
    "kv frame: kv_truncate",
    *[f"malformed KV: {way}" for way in FORGERIES],
    "preempted",
    "refused: context_length_exceeded",
    "refused: kv_cache_exceeded",
    "refused: no_workers",
    "refused: queue_full",
    "slow reader let go",
    "stale message",
    "stop string",
)
"""Names (``Kernel.sometimes``, and counters of the gateway's core) that a sweep of some hundred seeds must have counted."""


class Struck:
    """Counts in which moments the faults of one run strike."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._found: dict[str, None] | None = None  # of the fault that is being injected
        self.cells: Counter[Cell] = Counter()

    def begin(self) -> None:
        self._found = {}

    def hosts(self, *hosts: str) -> None:
        """The fault is about to strike ``hosts`` ("": everybody)."""
        if self._found is not None:
            self._found.update(dict.fromkeys(moments.at_workers(self._world, hosts)))

    def request(self, number: int) -> None:
        """The fault is about to strike the client of one request."""
        if self._found is not None:
            self._found.update(dict.fromkeys(moments.of_request(self._world, number)))

    def end(self, fault: str, done: bool) -> None:
        found, self._found = self._found, None
        if done and found:
            self.cells.update([(fault, moment) for moment in found])

    def at_once(self, fault: str, *hosts: str) -> None:
        """A fault that was prepared strikes now."""
        self.cells.update([(fault, moment) for moment in moments.at_workers(self._world, hosts)])


def possible_cells() -> list[Cell]:
    return [(fault, moment) for fault in FAULTS for moment in MOMENTS if (fault, moment) not in IMPOSSIBLE]


def zero_cells(hit: Mapping[str, int]) -> list[Cell]:
    """Possible cells that ``hit`` ("fault/moment" → count) does not have."""
    return [(fault, moment) for fault, moment in possible_cells() if not hit.get(f"{fault}/{moment}")]


def missing(counted: Iterable[str]) -> list[str]:
    """Names in ``SOMETIMES`` that were not counted."""
    known = set(counted)
    return [name for name in SOMETIMES if name not in known]
