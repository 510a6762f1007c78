"""Directed runs: one fault, injected as soon as some request is in one moment."""

from typing import TYPE_CHECKING

from relay.sim import moments
from relay.sim.swarm import MS
from relay.sim.tape import Edits

if TYPE_CHECKING:
    from relay.sim.world import World

MAX_STRIKES = 10  # of one run: a strike may hit a neighbour
PAUSE_NS = MS  # between two strikes

# Choices by label that make a moment frequent; the rest of the swarm stays with the seed.
_BUSY = {"requests": 20, "arrival_ms": 0, "queued_reqs": 1, "queued_tokens": 1}
_SPLIT = {"prefill": 2, "short_prompt": 0, "max_frame": 0}
_OFTEN = {
    moments.QUEUED: {"max_num_seqs": 0},
    moments.RESERVING: _SPLIT,
    moments.PREFILLING: _SPLIT,
    moments.TRANSFER: _SPLIT,
    moments.HANDOFF: _SPLIT,
    moments.STOPPED: {"stop string": 0, "latency": 2},
    moments.CANCELLED: {"deadline": 0, "deadline ms": 60, "latency": 2},
    moments.LAST: {"latency": 2},
    moments.IDLE: {"requests": 3, "arrival_ms": 2},
}


def directed(fault: str, moment: str) -> Edits:
    """The edits of a run in which ``fault`` shall strike in ``moment``."""
    kv = _SPLIT if "kv" in fault else {}
    return Edits(directed=(fault, moment), fixed={**_BUSY, **kv, **_OFTEN.get(moment, {})})


class Director:
    """Looks at the world after every call of the kernel, until the fault has struck in the moment."""

    def __init__(self, world: "World", fault: str, moment: str) -> None:
        self._world = world
        self._fault = fault
        self._moment = moment
        self._strikes = 0
        self._not_before_ns = 0

    @property
    def done(self) -> bool:
        return self._strikes >= MAX_STRIKES or (self._fault, self._moment) in self._world.struck.cells

    def look(self) -> None:
        world = self._world
        if self.done or world.kernel.now_ns < self._not_before_ns:
            return
        workers = [name for name in world.workers if self._moment in moments.at_workers(world, [name])]
        requests = [
            client.request
            for client in world.clients.values()
            if client.open and self._moment in moments.of_request(world, client.request)
        ]
        if not workers and not requests:
            return
        world.preferred = (workers, requests)
        try:
            if world.strike(self._fault, "directed"):
                self._strikes += 1
                self._not_before_ns = world.kernel.now_ns + PAUSE_NS
        finally:
            world.preferred = ([], [])
