"""Scenarios about gateways that die, and about more than one of them."""

from dataclasses import replace

from relay.sim.clients import Client
from relay.sim.scenarios.stage import Scenario, Stage, cluster
from relay.sim.seldom import ORPHANS_OF_ONE_KEY
from relay.sim.swarm import MS
from relay.worker.core import WorkerConfig
from relay.worker.held import HeldState

PAIR = ("gateway-0", "gateway-1")
HOLD_MS = 1500


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


def _busy(stage: Stage, requests: int, max_tokens: int = 40) -> list[Client]:
    clients = [stage.submit(prompt=24, max_tokens=max_tokens, salt=salt) for salt in range(requests)]
    stage.until(lambda: all(client.tokens[0] for client in clients), "all have tokens")
    return clients


def _nobody_comes_back(stage: Stage) -> None:
    clients = _busy(stage, 4, max_tokens=80)
    stage.kill_gateway("gateway-0", 100)
    for client in clients:
        stage.disconnect(client)
    stage.until(stage.all_idle, "what nobody asks for is freed", HOLD_MS + 200)
    stage.finish(stage.submit(prompt=24, max_tokens=4, salt=9))


def _gateways_stay_away(stage: Stage) -> None:
    clients = _busy(stage, 3)
    before = stage.incarnations()
    for gateway in PAIR:
        stage.kill_gateway(gateway, HOLD_MS + 1000)
    stage.wait(HOLD_MS + 500)
    alive = [name for name, node in stage.world.workers.items() if node.alive or node.running is not None]
    stage.require(not alive, f"{alive} outlive their gateways")
    stage.finish(*clients)  # computed anew, by new workers
    stage.require(
        all(stage.incarnations()[worker] > life for worker, life in before.items()), "workers were not started"
    )


def _orphaned_twice(stage: Stage) -> None:
    client = stage.submit(prompt=100, max_tokens=12)
    decode = stage.decode_of(client)
    held_back = stage.partition(("prefill-0", decode))  # so nobody can take over what is not there yet
    for gateway in PAIR:
        stage.until(lambda: client.gateway == gateway, f"the client is with {gateway}")  # noqa: B023
        stage.until(lambda: stage.holds(decode, client, HeldState.RESERVED), "D has made room")
        stage.kill_gateway(gateway, 50)
    stage.wait(2)
    held_back()
    stage.finish(client)
    stage.require(stage.kernel.counts[ORPHANS_OF_ONE_KEY] > 0, "D never had two orphans of one request")
    stage.until(stage.all_idle, "nothing is kept of either", HOLD_MS + 200)


def _cut_connection(stage: Stage) -> None:
    clients = _busy(stage, 4)
    before = stage.incarnations()
    worker = stage.decode_of(clients[0])
    stage.fault("cut_engine", worker)
    for side in stage.world.network.connections_of(worker, "engine"):
        if side.peer.host == "gateway-0":
            side.reset("connection reset")
    stage.until(lambda: not stage.ready(worker), "the loss is noticed", 100)
    stage.until(lambda: stage.ready(worker), "it is connected again", 1000)
    stage.finish(*clients)
    stage.require(stage.incarnations() == before, "a worker died of one gateway's lost connection")


_SWARM = cluster(
    1, 2, gateways=PAIR, worker=WorkerConfig(report_interval_ns=10 * MS, orphan_hold_ns=HOLD_MS * MS), load_ms=20
)
_CLUSTER = cluster(1, 2)

SCENARIOS = (
    Scenario(
        "two-gateways",
        "Dynamo: a frontend that is killed takes its streams with it (128 to 144 of 800 requests, 17 s in its own tests)",
        "one of two gateways dies under four streams: the other goes on with each exactly, no worker dies, the first comes back",
        replace(_CLUSTER, gateways=PAIR, worker=replace(_CLUSTER.worker, orphan_hold_ns=2000 * MS)),
        _two_gateways,
    ),
    Scenario(
        "orphans-nobody-wants",
        "Sequences of a dead front end keep their memory for ever, because nobody is left who could cancel them.",
        "A gateway is killed and its clients are gone too: what it had ordered is freed when the hold is over.",
        _SWARM,
        _nobody_comes_back,
    ),
    Scenario(
        "orphaned-twice",
        "The second front end dies too, before the worker that both had asked has begun: it holds the same request twice.",
        "Both gateways die while D waits for the same prompt's KV, first for one and then for the other: one of the two is kept.",
        replace(_SWARM, slots=cluster(1, 1).slots),
        _orphaned_twice,
    ),
    Scenario(
        "gateways-stay-away",
        "Workers of a dead front end go on for days, hold their GPUs, and nobody knows of them.",
        "All gateways are dead for longer than the hold: workers end by themselves; later everything is computed anew.",
        _SWARM,
        _gateways_stay_away,
    ),
    Scenario(
        "cut-connection",
        "One front end loses its connection to a worker and has it restarted, under everybody else's requests.",
        "An engine's connection to one of two gateways is reset: its attempts move, the worker stays and dials again.",
        _SWARM,
        _cut_connection,
    ),
)
