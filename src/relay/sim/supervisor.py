"""Gateways and their clients' ways between them: what a supervisor, a launcher and retrying clients do in production."""

from typing import TYPE_CHECKING

from relay.control import events as e
from relay.ids import WorkerKey
from relay.protocol.messages import EngineExited
from relay.sim.clients import Client
from relay.sim.gateway import GatewayNode
from relay.sim.swarm import MS

if TYPE_CHECKING:
    from relay.sim.world import World

RETURN_MS = 20  # after which a client comes back, on the average
MAX_UNREAD = 4  # tokens said to a client and never read


class Supervisor:
    """Keeps the present life of every gateway, and starts workers for all of them."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._epoch = 0
        self._last_request = 0
        self.nodes: dict[str, GatewayNode] = {}
        for host in world.swarm.gateways:
            self.nodes[host] = self._new(host)

    def _new(self, host: str) -> GatewayNode:
        world = self._world
        self._epoch += 1
        checkers = world.checkers
        return GatewayNode(
            world.kernel,
            world.network,
            world.swarm,
            host,
            self._epoch,
            world.execute,
            checkers.before_gateway,
            checkers.after_gateway,
        )

    def kill(self, node: GatewayNode) -> None:
        """It forgets everything. Its clients come back later, some without the last tokens they were sent."""
        node.kill()
        for request, client in list(self._world.clients.items()):
            if client.open and client.gateway == node.host and client.request == request:
                client.lose(self._world.kernel.tape.below(MAX_UNREAD, "unread"), self._world.numerics)
                self.send_back(client)

    def start(self, host: str) -> None:
        """A new life, which is told what is known of the workers."""
        node = self.nodes[host] = self._new(host)
        self._world.kernel.tell("{} starts again", host)
        for worker in self._world.workers.values():
            node.handle(e.WorkerStarted(worker.key))
            if worker.exit is not None:
                node.launcher_exited(worker.key, *worker.exit)
        node.handle(e.Started())

    def start_worker(self, node: GatewayNode, key: WorkerKey, role: str, cause: str) -> None:
        """Start an incarnation that is new, and tell the others; else say which one is the present one."""
        present = self._world.workers.get(key.worker)
        if present is not None and present.key.incarnation >= key.incarnation:
            node.run(node.handle, e.WorkerStarted(present.key))
            if present.exit is not None:
                node.launcher_exited(present.key, *present.exit)
            return
        if present is not None and len(self.nodes) > 1:
            present.sigkill()
        self._world.launch(key, role, cause)
        self._world.kernel.after(
            0, self._started, node, key
        )  # after what is being told now: the end of the life before

    def _started(self, node: GatewayNode, key: WorkerKey) -> None:
        for other in self.nodes.values():
            if other is not node:
                other.run(other.handle, e.WorkerStarted(key))

    def exited(self, key: WorkerKey, status: int | None, signal: int | None, last_word: EngineExited | None) -> None:
        for node in self.nodes.values():
            node.launcher_exited(key, status, signal, last_word)

    # --- clients --------------------------------------------------------------------------------------------------

    def new_request(self) -> int:
        """A name no gateway has used."""
        self._last_request += 1
        return self._last_request

    def send_back(self, client: Client) -> None:
        """The client asks again in a while."""
        client.returns, client.gateway = True, ""
        self._world.kernel.after(
            self._world.kernel.tape.between(1, 2 * RETURN_MS, "return ms") * MS, self._come_back, client
        )

    def _come_back(self, client: Client) -> None:
        world = self._world
        if not client.open:
            return
        awake = [node for node in self.nodes.values() if node.alive and not node.stopped]
        if not awake:
            self.send_back(client)
            return
        world.kernel.sometimes("a client came back")
        node = world.kernel.tape.of(awake, "gateway") if len(awake) > 1 else awake[0]
        request = self.new_request()
        world.kernel.tell("request {} comes back to {} as {}", client.request, node.host, request)
        submission = client.again(request, node.host)
        world.clients[request] = client
        node.handle(e.RequestSubmitted(request, submission))
        for choice in list(client.stopped):  # the same stop string matches again
            node.handle(e.ChoiceFinished(request, choice))
