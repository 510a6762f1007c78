"""The leak check: when all requests have ended, nothing of them is left anywhere (I8, I12)."""

from typing import TYPE_CHECKING

from relay.control.transitions import WorkerState
from relay.sim.engine import EngineProcess
from relay.sim.gateway import GatewayNode
from relay.sim.kernel import Violation

if TYPE_CHECKING:
    from relay.sim.world import World


def no_leaks(world: "World") -> None:
    """No request, sequence, block, transfer, promise, timer or older life is left."""
    for gateway in world.gateways.values():
        _gateway(world, gateway)
    for node in world.workers.values():
        if node.running is not None:
            _engine(node.running)
    for zombie in world.zombies:
        if zombie.alive or zombie.running is not None:
            raise Violation("I12", f"{zombie.key} still lives beside its successor")


def _gateway(world: "World", gateway: GatewayNode) -> None:
    state = gateway.core.state
    if not world.num_faults and not world.num_poison:
        for counter in ("resumed", "hedges"):
            if state.counters[counter]:
                raise Violation("core", f"without any fault the gateway counts {state.counters[counter]} {counter}")
    if state.requests or len(state.queue):
        raise Violation("I8", f"the gateway still has requests {list(state.requests)}")
    if state.queue.num_new_tokens or any(w.backlog_tokens or w.reserving for w in state.workers.values()):
        raise Violation("I8", "the gateway counts work that is gone")
    for worker in state.workers.values():
        if worker.state is not WorkerState.READY:
            raise Violation("I12", f"{worker.id} is {worker.state.value} after the healing")
        if worker.live or worker.promises or worker.expected:
            raise Violation("I8", f"the gateway still expects something of {worker.id}")
    extra = [key for key in gateway.timers if key[0] != "tick"]
    if extra:
        raise Violation("I8", f"the gateway still has timers {extra}")


def _engine(engine: EngineProcess) -> None:
    load = engine.scheduler.load()
    name, held = engine.key.worker, engine.core.held
    if len(held) or len(engine.core.orphans) or load.kv_used or load.running or load.waiting:
        raise Violation("I8", f"{name} still holds {list(held.by_key)}: {load}")
    if held.by_slot or held.by_transfer:
        raise Violation(
            "I8", f"{name} still has an index of slots {list(held.by_slot)}, transfers {list(held.by_transfer)}"
        )
    if engine.transport.open_transfers():
        raise Violation("I8", f"{name} still has transfers {engine.transport.open_transfers()}")
