"""I4: whatever an attempt says of a position, winner or not, is what every other attempt says of it: token and logprobs.

The oracle stands for all of them. So an attempt that is over, or a hedge that loses, is checked too, though nobody listens to it.
"""

from typing import TYPE_CHECKING

from relay.ids import WorkerKey
from relay.protocol.messages import TokenEntry, Tokens
from relay.sim.kernel import Violation

if TYPE_CHECKING:
    from relay.sim.world import World


class Agreement:
    """Compares every reported token. ``world.wrong_machines``: a broken machine is part of the plan, so the core has to notice."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def heard(self, worker: WorkerKey, message: Tokens) -> None:
        numerics = self._numerics(worker)
        if numerics is None or self._world.wrong_machines:
            return
        for entry in message.entries:
            self._compare(worker, numerics, entry)

    def _numerics(self, worker: WorkerKey) -> str | None:
        world = self._world
        node = world.workers.get(worker.worker)
        if node is None or node.key != worker:
            node = next((zombie for zombie in world.zombies if zombie.key == worker), None)
        return node.engine.numerics if node is not None and node.engine is not None else None

    def _compare(self, worker: WorkerKey, numerics: str, entry: TokenEntry) -> None:
        client = self._world.clients.get(entry.request)
        if client is None or not 0 <= entry.choice < client.submission.n:
            return
        oracle = self._world.oracles.get(entry.request, client.submission, entry.choice, numerics)
        first, last = entry.position, entry.position + len(entry.token_ids)
        name = f"request {entry.request}.{entry.choice}, attempt {entry.attempt} on {worker.worker}"
        if oracle.outputs[first:last] != entry.token_ids:
            wanted = oracle.outputs[first:last]
            raise Violation("I4", f"{name} says {entry.token_ids} from position {first} on, others say {wanted}")
        if entry.logprobs is not None:
            given = [(logprob, list(top)) for logprob, top in entry.logprobs]
            if given != oracle.logprobs[first:last]:
                raise Violation("I4", f"{name} gives position {first} other logprobs than others do: {given}")
