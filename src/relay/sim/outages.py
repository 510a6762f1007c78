"""Faults of links, machines and people: what breaks half, breaks again and again, or breaks everywhere at once."""

from dataclasses import replace
from typing import TYPE_CHECKING

from relay.control import events as e
from relay.sim.clients import Client, Expectation
from relay.sim.swarm import MS
from relay.sim.worker import WorkerNode

if TYPE_CHECKING:
    from relay.sim.world import World

FLAPS = 12
FLAP_MS = 120
CRASHES = 6  # on start, one after another
REPEATS = 16  # messages that come twice
STORM_MS = 40  # within which all are killed
UNREACHABLE_MS = 3000  # before a launcher hears that a machine is gone
UNREAD_TOKENS = 8  # that the API keeps for a client that does not read; production counts bytes
READ_MS = 60  # between two looks of a slow reader
JUMP_S = 10**8
SECOND = 1_000_000_000


def _pick(world: "World") -> WorkerNode | None:
    nodes = [node for node in world.workers.values() if node.alive and node.running is not None]
    return world.kernel.tape.of(world.prefer_workers(nodes), "victim") if nodes else None


def control_repeat(world: "World") -> bool:
    """Some control messages of one sender come a second time, after later ones: it was not sure that they had arrived."""
    node = _pick(world)
    if node is None:
        return False
    world.struck.hosts(node.key.worker)
    host = world.kernel.tape.of((node.key.worker, *world.swarm.gateways), "sender")
    times = world.kernel.tape.between(1, REPEATS, "repeats")
    world.network.repeat_next_control[host] = world.network.repeat_next_control.get(host, 0) + times
    return True


def half_open(world: "World") -> bool:
    """A connection dies on its way and neither end is told, until each finds out by itself."""
    node = _pick(world)
    if node is None:
        return False
    sides = [side for kind in ("agent", "engine", "kv") for side in world.network.connections_of(node.key.worker, kind)]
    if not sides:
        return False
    side = world.kernel.tape.of(sides, "connection")
    for host in (side.host, side.peer.host):
        world.harm(host, f"{side.kind} connection is half open")
    told_ns = world.network.sever(side)
    world.until_healed(told_ns, side.host, lambda: world.network.tell(side), side.peer.host)
    return True


def vanish(world: "World") -> bool:
    """A worker's machine loses power: no end of any connection is told, and its launcher hears nothing for a while."""
    node = _pick(world)
    if node is None:
        return False
    name = node.key.worker
    world.harm(name, "its machine is gone")
    sides = world.network.sides_of(name)
    told_ns = max([world.network.sever(side) for side in sides], default=0)
    for peer in list(world.workers):
        if peer != name:
            world.harm(peer, f"{name} is gone without a word")
    node.vanish(world.kernel.tape.below(UNREACHABLE_MS, "unreachable ms") * MS)

    def tell() -> None:
        for side in sides:
            world.network.tell(side)

    world.until_healed(told_ns, name, tell)
    return True


def flap(world: "World") -> bool:
    """The link between a worker and the gateway, or another worker, goes down and comes back many times."""
    node = _pick(world)
    if node is None:
        return False
    name = node.key.worker
    others = [*world.swarm.gateways, *[other for other in world.workers if other != name]]
    other = world.kernel.tape.of(others, "other end")
    pairs = [(name, other), (other, name)]
    for host in (name, other):
        world.harm(host, f"{name} to {other} flaps")
    state = {"down": False, "left": FLAPS, "over": False}

    def turn() -> None:
        if state["over"]:
            return
        for source, target in pairs:
            (world.network.unblock if state["down"] else world.network.block)(source, target)
        state["down"] = not state["down"]
        state["left"] -= 1
        if state["left"] > 0 or state["down"]:
            world.kernel.after(world.kernel.tape.between(1, FLAP_MS, "flap ms") * MS, turn)

    def end() -> None:
        state["over"] = True
        if state["down"]:
            for source, target in pairs:
                world.network.unblock(source, target)

    turn()
    world.until_healed(FLAPS * FLAP_MS * MS, name, end, other)
    return True


def crash_loop(world: "World") -> bool:
    """A worker's engine crashes on its start, several times."""
    node = _pick(world)
    if node is None:
        return False
    name = node.key.worker
    world.crashing_starts[name] = world.kernel.tape.between(1, CRASHES, "crashing starts")
    world.harm(name, "killed, and its next starts crash")
    node.sigkill()

    def mend() -> None:
        world.crashing_starts[name] = 0

    world.lasting(mend, (name,))
    return True


def restart_storm(world: "World") -> bool:
    """All workers are killed within a moment."""
    world.harm("", "all workers are killed")
    for node in list(world.workers.values()):
        world.kernel.after(world.kernel.tape.below(STORM_MS, "storm ms") * MS, node.sigkill)
    return True


def registry_blip(world: "World") -> bool:
    """The gateway loses every agent at once."""
    sides = [side for name in world.workers for side in world.network.connections_of(name, "agent")]
    if not sides:
        return False
    world.harm("", "all agents' connections are cut")
    for side in sides:
        side.reset("connection reset")
    return True


def drain_order(world: "World") -> bool:
    """An operator has a worker drained and restarted."""
    node = _pick(world)
    if node is None:
        return False
    world.struck.hosts(node.key.worker)
    world.kernel.tell("{}: restart is ordered", node.key.worker)
    _order(world, e.LeaveOrdered((node.key.worker,)))
    return True


def rolling_restart(world: "World") -> bool:
    """An operator has all workers restarted, one after another."""
    world.struck.hosts("")
    _order(world, e.LeaveOrdered((), rolling=True))
    return True


def _order(world: "World", order: e.LeaveOrdered) -> None:
    """To one gateway, as the command line does."""
    world.gateway.run(world.gateway.handle, order)


def rolling_upgrade(world: "World") -> bool:
    """The same, and what starts from now on computes with other numerics."""
    world.upgrade()
    return rolling_restart(world)


def clock_jump(world: "World") -> bool:
    """The wall clock jumps, by up to years. Whoever looks at it is found at the end of the run (I14)."""
    world.struck.hosts("")
    world.kernel.wall_ns += (world.kernel.tape.below(2 * JUMP_S, "jump s") - JUMP_S) * SECOND
    return True


def slow_reader(world: "World") -> bool:
    """A client takes its tokens slowly; the API keeps a bounded number for it and then lets it go."""
    clients = [client for client in world.clients.values() if client.open and client.unread is None]
    if not clients:
        return False
    client = world.kernel.tape.of(world.prefer_clients(clients), "client")
    world.struck.request(client.request)
    client.unread = 0

    def read() -> None:
        if client.open and client.unread is not None:
            client.unread = max(0, client.unread - world.kernel.tape.below(4, "read tokens"))
            world.kernel.after(world.kernel.tape.between(1, READ_MS, "read ms") * MS, read)

    read()
    return True


def unread(world: "World", client: Client, count: int) -> None:
    """``count`` tokens were written for a slow reader."""
    assert client.unread is not None
    client.unread += count
    if client.unread > UNREAD_TOKENS:
        world.kernel.sometimes("slow reader let go")
        world.disconnect(client)


def client_retry(world: "World") -> bool:
    """A client loses patience and asks the same again."""
    clients = [client for client in world.clients.values() if client.open and not client.expectation.poison]
    if not clients:
        return False
    client = world.kernel.tape.of(world.prefer_clients(clients), "client")
    world.disconnect(client)
    again = replace(client.submission, resume_key=b"", returns=False, numerics_id="")  # to all the world a new request
    world.gateway.run(world.submit, again, Expectation(faults_before=world.num_faults), world.gateway)
    return True


OUTAGES = {
    "control_repeat": control_repeat,
    "half_open": half_open,
    "vanish": vanish,
    "flap": flap,
    "crash_loop": crash_loop,
    "restart_storm": restart_storm,
    "registry_blip": registry_blip,
    "drain_order": drain_order,
    "rolling_restart": rolling_restart,
    "rolling_upgrade": rolling_upgrade,
    "clock_jump": clock_jump,
    "slow_reader": slow_reader,
    "client_retry": client_retry,
}
