"""Gateways that die, come back or lose a connection, while other gateways serve from the same workers."""

from relay.sim.clients import Client
from relay.sim.scenarios.stage import Scenario, Stage, cluster
from relay.sim.swarm import MS
from relay.worker.core import WorkerConfig

HOLD_MS = 1500
TWO = ("gateway-0", "gateway-1")


def _busy(stage: Stage, requests: int, max_tokens: int = 40) -> list[Client]:
    clients = [stage.submit(prompt=24, max_tokens=max_tokens, salt=salt) for salt in range(requests)]
    stage.until(lambda: all(client.tokens[0] for client in clients), "all have tokens")
    return clients


def _adopted(stage: Stage) -> int:
    engines = [node.running for node in stage.world.workers.values()]
    return sum(engine.core.orphans.num_adopted for engine in engines if engine is not None)


def _two_gateways(stage: Stage) -> None:
    before = stage.incarnations()
    clients = _busy(stage, 5)
    stage.kill_gateway("gateway-0", 300)
    stage.finish(*clients)
    stage.require(all(client.gateway == "gateway-1" for client in clients), "somebody did not move")
    stage.require(_adopted(stage) > 0, "nothing was taken over: everything was computed again")
    stage.require(not stage.counter("resumed"), "what was taken over did not fit")
    stage.wait(400)
    clients = _busy(stage, 5)
    for gateway in TWO:  # nobody is left: workers wait, and so do clients
        stage.kill_gateway(gateway, 200)
    stage.finish(*clients)
    stage.require(stage.incarnations() == before, f"workers were replaced: {stage.incarnations()}")


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
    for gateway in TWO:
        stage.kill_gateway(gateway, HOLD_MS + 1000)
    stage.wait(HOLD_MS + 500)
    alive = [name for name, node in stage.world.workers.items() if node.alive or node.running is not None]
    stage.require(not alive, f"{alive} outlive their gateways")
    stage.finish(*clients)  # computed anew, by new workers
    stage.require(
        all(stage.incarnations()[worker] > life for worker, life in before.items()), "workers were not started"
    )


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
    1, 2, gateways=TWO, worker=WorkerConfig(report_interval_ns=10 * MS, orphan_hold_ns=HOLD_MS * MS), load_ms=20
)

SCENARIOS = (
    Scenario(
        "two-gateways",
        "A front end process dies and every open stream ends with it, although the workers behind it are well.",
        "Two gateways share workers. One is killed, then both: clients come back to whoever lives and get the rest.",
        _SWARM,
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
