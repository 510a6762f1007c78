"""Poison requests: how many engines they take (I11). Three for each, whatever else happens."""

from typing import TYPE_CHECKING

from relay.ids import WorkerKey
from relay.sim.gateway import GatewayNode
from relay.sim.kernel import Violation

if TYPE_CHECKING:
    from relay.sim.world import World

MAX_ENGINES = 3


def taken(world: "World") -> None:
    """An engine is lost to a poison request. A gateway that dies takes what it knew of it along, so the count begins anew."""
    world.poison_crashes += 1
    world.last_fault_ns = world.kernel.now_ns
    world.kernel.tell("the poison takes an engine, for the {}. time", world.poison_crashes)
    if world.poison_crashes > MAX_ENGINES * (world.num_poison + world.faults["kill_gateway"]):
        raise Violation("I11", f"{world.num_poison} poison requests have taken {world.poison_crashes} engines")


def killed(world: "World", gateway: GatewayNode, key: WorkerKey) -> None:
    """``gateway`` has ``key`` killed: for a hang of the poison's, or the worker fell to something else before."""
    worker = world.workers.get(key.worker)
    engine = worker.running if worker is not None and worker.key == key else None
    cause = gateway.core.state.workers[key.worker].last_cause
    if engine is not None and engine.hung and cause.startswith("no progress"):
        engine.hung = False
        world.kernel.sometimes("a hung engine is noticed")
        taken(world)
