"""Scenarios about gateways that die, and about more than one of them."""

from dataclasses import replace

from relay.sim.scenarios.stage import Scenario, Stage, cluster
from relay.sim.swarm import MS

PAIR = ("gateway-0", "gateway-1")


def _two_gateways(stage: Stage) -> None:
    other = stage.world.gateways[PAIR[1]]
    clients = [stage.submit(prompt=40, max_tokens=40, salt=salt) for salt in range(4)]
    stage.until(lambda: all(client.tokens[0] for client in clients), "all run")
    lives = {worker: node.key.incarnation for worker, node in stage.world.workers.items()}
    stage.kill_gateway(PAIR[0])
    stage.finish(*clients, within_ms=5000)  # each checks that the second gateway says what the first one said
    stage.require(
        {w: n.key.incarnation for w, n in stage.world.workers.items()} == lives, "a worker died with its gateway"
    )
    loads = [worker.load for worker in other.core.state.workers.values()]
    adopted = sum(load.counters.get("orphans_adopted", 0) for load in loads if load is not None)
    stage.require(adopted > 0, "nothing was taken over, all was computed again")
    stage.require(not other.core.state.counters["resumed"], "what was taken over did not go on where it was")
    # Both at once: the second one goes on with its own while the first one comes back.
    more = [stage.submit(prompt=40, max_tokens=20, salt=salt) for salt in range(4, 8)]
    stage.until(lambda: all(client.tokens[0] for client in more), "all run at the second gateway")
    stage.world.supervisor.start(PAIR[0])
    stage.finish(*more, within_ms=5000)
    stage.until(
        lambda: len(stage.world.gateways[PAIR[0]].core.state.ready_workers()) == 3, "it knows all workers", 3000
    )
    stage.require(other.alive, "the second gateway died too")


_CLUSTER = cluster(1, 2)

SCENARIOS = (
    Scenario(
        "two-gateways",
        "Dynamo: a frontend that is killed takes its streams with it (128 to 144 of 800 requests, 17 s in its own tests)",
        "one of two gateways dies under four streams: the other goes on with each exactly, no worker dies, the first comes back",
        replace(_CLUSTER, gateways=PAIR, worker=replace(_CLUSTER.worker, orphan_hold_ns=2000 * MS)),
        _two_gateways,
    ),
)
