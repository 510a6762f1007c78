"""Directed runs: one fault, injected as soon as some request is in one moment."""

from typing import TYPE_CHECKING

from relay.sim import moments
from relay.sim.swarm import MS

if TYPE_CHECKING:
    from relay.sim.world import World

MAX_STRIKES = 10  # of one run: a strike may hit a neighbour
PAUSE_NS = MS  # between two strikes


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
