"""The faults: each takes the world and does its harm to whatever the tape picks. False: there was nothing to harm just now."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from relay.sim.forgery import FORGERIES
from relay.sim.outages import OUTAGES
from relay.sim.strangers import visit
from relay.sim.swarm import MS
from relay.sim.worker import WorkerNode

if TYPE_CHECKING:
    from relay.sim.world import World

SLOW_FACTORS = (10, 80)
CRASH_SIGNAL = 11
STALL_MS = 2000


def inject(world: "World", kind: str) -> bool:
    """Do one fault of ``kind`` now, if it can be done."""
    return _FAULTS[kind](world)


def _pick(world: "World") -> WorkerNode | None:
    """A worker whose engine runs."""
    nodes = [node for node in world.workers.values() if node.alive and node.running is not None]
    return world.kernel.tape.of(world.prefer_workers(nodes), "victim") if nodes else None


def _outage_ns(world: "World") -> int:
    return world.kernel.tape.between(1, 2 * world.swarm.mean_outage_ms, "outage ms") * MS


def _kill_worker(world: "World") -> bool:
    node = _pick(world)
    if node is None:
        return False
    world.harm(node.key.worker, "killed")
    node.sigkill()
    return True


def _kill_engine(world: "World") -> bool:
    return _end_engine(world, 9)


def _crash_engine(world: "World") -> bool:
    return _end_engine(world, CRASH_SIGNAL)


def _end_engine(world: "World", signal: int) -> bool:
    node = _pick(world)
    if node is None or node.running is None:
        return False
    world.harm(node.key.worker, f"engine gets signal {signal}")
    node.running.end(None, signal)
    return True


def _freeze_engine(world: "World") -> bool:
    node = _pick(world)
    engine = node.running if node else None
    if node is None or engine is None:
        return False
    world.harm(node.key.worker, "engine frozen")
    engine.stop()
    world.until_healed(_outage_ns(world), node.key.worker, engine.thaw)
    return True


def _freeze_all(world: "World") -> bool:
    node = _pick(world)
    engine = node.running if node else None
    if node is None or engine is None:
        return False
    world.harm(node.key.worker, "agent and engine frozen")
    engine.stop()
    node.agent.stop()

    def thaw() -> None:
        # Which of the two runs first is the machine's choice.
        for process in (engine, node.agent) if world.kernel.tape.below(2, "thaw order") else (node.agent, engine):
            process.thaw()

    world.until_healed(_outage_ns(world), node.key.worker, thaw)
    return True


def _slow(world: "World") -> bool:
    node = _pick(world)
    engine = node.running if node else None
    if node is None or engine is None or engine.slow > 1:
        return False
    factor = world.kernel.tape.of(SLOW_FACTORS, "slow factor")
    world.harm(node.key.worker, f"{factor} times slower")
    engine.slow = factor

    def recover() -> None:
        engine.slow = 1

    world.until_healed(_outage_ns(world), node.key.worker, recover)
    return True


def _cut(kind: str) -> Callable[["World"], bool]:
    def cut(world: "World") -> bool:
        node = _pick(world)
        sides = world.network.connections_of(node.key.worker, kind) if node else []
        if node is None or not sides:
            return False
        side = world.kernel.tape.of(sides, "connection")
        for host in (side.host, side.peer.host):
            world.harm(host, f"{kind} connection cut")
        side.reset("connection reset")
        return True

    return cut


def _partition(world: "World", pairs: list[tuple[str, str]]) -> bool:
    for source, target in pairs:
        for host in (source, target):
            world.harm(host, f"{source} cannot reach {target}")
        world.network.block(source, target)

    def heal() -> None:
        for source, target in pairs:
            world.network.unblock(source, target)

    world.until_healed(_outage_ns(world), pairs[0][0], heal, pairs[0][1])
    return True


def _partition_from_gateway(world: "World") -> bool:
    node, host = _pick(world), _gateway_host(world)
    return node is not None and _partition(world, [(host, node.key.worker)])


def _partition_to_gateway(world: "World") -> bool:
    node, host = _pick(world), _gateway_host(world)
    return node is not None and _partition(world, [(node.key.worker, host)])


def _partition_full(world: "World") -> bool:
    node, host = _pick(world), _gateway_host(world)
    return node is not None and _partition(world, [(node.key.worker, host), (host, node.key.worker)])


def _gateway_host(world: "World") -> str:
    hosts = world.swarm.gateways
    return hosts[world.kernel.tape.below(len(hosts), "gateway") if len(hosts) > 1 else 0]


def _partition_kv(world: "World") -> bool:
    """Between two workers of which one sends KV to the other, where there are such; in either direction."""
    pairs = [
        (node.key.worker, target)
        for node in world.workers.values()
        if node.running is not None
        for target in node.running.transport.targets()
    ]
    if not pairs:
        first, second = _pick(world), _pick(world)
        if first is None or second is None or first is second:
            return False
        pairs = [(first.key.worker, second.key.worker)]
    source, target = world.kernel.tape.of(pairs, "pair")
    if world.kernel.tape.below(2, "direction"):
        source, target = target, source
    return _partition(world, [(source, target)])


def _jitter(world: "World") -> bool:
    if world.network.jitter_ns:
        return False
    world.network.jitter_ns = world.kernel.tape.of((1, 10, 60), "jitter ms") * MS
    world.harm("", "jitter")

    def end() -> None:
        world.network.jitter_ns = 0

    world.until_healed(_outage_ns(world), "", end)
    return True


def _damage_kv(fault: str) -> Callable[["World"], bool]:
    def damage(world: "World") -> bool:
        world.network.damage_next_kv[fault] += 1
        return True

    return damage


def _kv_forge(world: "World") -> bool:
    ways = list(FORGERIES)
    first = world.kernel.tape.below(len(ways), "forgery")
    world.network.forge_next_kv.append(ways[first:] + ways[:first])
    return True


def _gateway_stall(world: "World") -> bool:
    awake = [gateway for gateway in world.gateways.values() if gateway.alive and not gateway.stopped]
    if not awake:
        return False
    gateway = world.kernel.tape.of(awake, "gateway") if len(awake) > 1 else awake[0]
    world.harm("", f"{gateway.host} stalls")
    gateway.stop()
    world.until_healed(world.kernel.tape.between(1, STALL_MS, "stall ms") * MS, "", gateway.thaw)
    return True


def _kill_gateway(world: "World") -> bool:
    """A gateway dies with all it knows; another life of it comes later. With one gateway everything would end."""
    alive = [gateway for gateway in world.gateways.values() if gateway.alive]
    if len(world.swarm.gateways) == 1 or not alive:
        return False
    gateway = world.kernel.tape.of(alive, "gateway")
    world.harm("", f"{gateway.host} is killed")
    world.supervisor.kill(gateway)
    world.until_healed(_outage_ns(world), "", lambda: world.supervisor.start(gateway.host))
    return True


def _client_disconnect(world: "World") -> bool:
    clients = [client for client in world.clients.values() if client.open]
    if not clients:
        return False
    world.disconnect(world.kernel.tape.of(world.prefer_clients(clients), "client"))
    return True


def _drain(world: "World") -> bool:
    node = _pick(world)
    if node is None:
        return False
    world.harm(node.key.worker, "SIGTERM")
    node.sigterm()
    return True


def _step_error(world: "World") -> bool:
    """One step raises; the scheduler runs its rows again one by one."""
    node = _pick(world)
    if node is None or node.running is None or node.running.fail_rows:
        return False
    world.struck.hosts(node.key.worker)
    world.step_errors += 1
    node.running.fail_rows = world.kernel.tape.between(1, 2, "fail rows")
    return True


def _new_numerics(world: "World") -> bool:
    """A rolling upgrade begins: what starts from now on computes with other numerics."""
    if world.kernel.tape.below(4, "upgrade now"):
        return False
    world.struck.hosts("")
    world.upgrade()
    return True


_FAULTS: dict[str, Callable[["World"], bool]] = {
    "kill_worker": _kill_worker,
    "kill_engine": _kill_engine,
    "crash_engine": _crash_engine,
    "freeze_engine": _freeze_engine,
    "freeze_all": _freeze_all,
    "slow": _slow,
    "cut_agent": _cut("agent"),
    "cut_engine": _cut("engine"),
    "cut_kv": _cut("kv"),
    "partition_from_gateway": _partition_from_gateway,
    "partition_to_gateway": _partition_to_gateway,
    "partition_full": _partition_full,
    "partition_kv": _partition_kv,
    "jitter": _jitter,
    **{fault: _damage_kv(fault) for fault in ("kv_corrupt", "kv_truncate", "kv_lose", "kv_repeat")},
    "kv_forge": _kv_forge,
    "gateway_stall": _gateway_stall,
    "client_disconnect": _client_disconnect,
    "drain": _drain,
    "step_error": _step_error,
    "new_numerics": _new_numerics,
    "kill_gateway": _kill_gateway,
    "stranger": visit,
    **OUTAGES,
}
