"""I4: whatever an attempt says of a position, winner or not, is what every other attempt says of it: token and logprobs.

The oracle stands for all of them. So an attempt that is over, or a hedge that loses, is checked too, though nobody listens to it.
How much of a prompt came from a cache no oracle knows: P and D of an attempt say the same of it, and the client is told that.
"""

from typing import TYPE_CHECKING

from relay.control.contract import Delivery
from relay.ids import SequenceKey, WorkerKey
from relay.protocol.messages import TokenEntry, Tokens
from relay.sim.kernel import Violation

if TYPE_CHECKING:
    from relay.sim.world import World


class Agreement:
    """Compares every reported token. ``world.wrong_machines``: a broken machine is part of the plan, so the core has to notice."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._cached: dict[SequenceKey, int] = {}  # what was said with the first token of an attempt

    def heard(self, worker: WorkerKey, message: Tokens) -> None:
        for entry in message.entries:
            if entry.position == 0:
                self._hear_cached(worker, entry)
        numerics = self._numerics(worker)
        if numerics is None or self._world.wrong_machines:
            return
        for entry in message.entries:
            self._compare(worker, numerics, entry)

    def delivered(self, request: int, delivery: Delivery, message: Tokens) -> None:
        """``delivery`` is what the gateway made of ``message``."""
        num_prompt = len(self._world.clients[request].submission.token_ids)
        said = [
            min(entry.cached_tokens, num_prompt)  # an orphan that was a resumed attempt had more than the prompt
            for entry in message.entries
            if (entry.request, entry.choice, entry.position) == (request, delivery.choice, 0)
        ]
        if delivery.position:
            said = [0]
        if delivery.cached_tokens not in said:
            text = f"{delivery.cached_tokens} cached tokens at position {delivery.position}, its worker said {said}"
            raise Violation("I4", f"request {request}.{delivery.choice} is told of {text}")
        if delivery.cached_tokens:
            self._world.kernel.sometimes("cached tokens told")

    def _hear_cached(self, worker: WorkerKey, entry: TokenEntry) -> None:
        key = SequenceKey(entry.request, entry.choice, entry.attempt)
        said = self._cached.setdefault(key, entry.cached_tokens)
        if said != entry.cached_tokens:
            raise Violation(
                "I4", f"{key}: {worker.worker} says {entry.cached_tokens} tokens were cached, it was {said} before"
            )

    def _numerics(self, worker: WorkerKey) -> str | None:
        engine = self._world.engine(worker)
        return engine.numerics if engine is not None else None

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
