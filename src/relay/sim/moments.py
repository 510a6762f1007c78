"""The moments of a request's life, seen from one worker or from the whole cluster, read off the state of the cores.

A fault counts for every moment that some request of the workers it strikes is in when it strikes. So the table fault × moment says
what the simulation has really met.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relay.control.attempts import Attempt
from relay.control.transitions import AttemptState, ChoiceState
from relay.sim.engine import EngineProcess

if TYPE_CHECKING:
    from relay.sim.world import World

QUEUED = "queued"
RESERVING = "reserving"
PREFILLING = "prefilling"
TRANSFER = "mid-transfer"
HANDOFF = "handoff"
PLACED = "no token yet"
FIRST = "first token"
DECODING = "decoding"
LAST = "last token sent"
STOPPED = "stopped"
CANCELLED = "cancelled"
IDLE = "idle"

MEANING = {
    QUEUED: "a choice waits in the gateway's queue, new or to be resumed (it belongs to every worker)",
    RESERVING: "D was asked for room and P has not been told yet",
    PREFILLING: "P was told to compute, and nothing of the KV has reached D",
    TRANSFER: "D has a part of the KV",
    HANDOFF: "the gateway has P's first token, and D has not spoken yet",
    PLACED: "one worker holds the attempt, and no token of it has reached the gateway",
    FIRST: "one token of the choice has reached the client",
    DECODING: "more tokens have, and more are to come",
    LAST: "the engine is done with the attempt, and the gateway does not know",
    STOPPED: "a stop string ended the choice for the client, and the engine still holds it",
    CANCELLED: "the request is over for the gateway in any other way, and the engine still holds it",
    IDLE: "the worker holds nothing, nor does the gateway want anything of it",
}
MOMENTS = tuple(MEANING)


def at_workers(world: "World", hosts: Iterable[str]) -> list[str]:
    """The moments, each once, of all requests that concern ``hosts``; the host "" means everybody."""
    names = list(hosts)
    workers = list(world.workers) if "" in names else [name for name in names if name in world.workers]
    found: dict[str, None] = {}
    if len(world.gateway.core.state.queue):
        found[QUEUED] = None
    idle = True
    for name in workers:
        seen = _at(world, name)
        idle = idle and not seen
        found.update(dict.fromkeys(seen))
    if idle:
        found[IDLE] = None
    return list(found)


def of_request(world: "World", number: int) -> list[str]:
    """The moments of one request's choices, wherever they are."""
    found: dict[str, None] = {}
    request = world.gateway.core.state.requests.get(number)
    if request is None:
        return []
    for choice in request.choices:
        if choice.state is ChoiceState.WAITING:
            found[QUEUED] = None
        for attempt in choice.attempts:
            found[_of_attempt(world, attempt)] = None
    for node in world.workers.values():
        if node.running is not None:
            found.update(dict.fromkeys(_leftovers(world, node.running, number)))
    return list(found)


def _at(world: "World", name: str) -> list[str]:
    worker = world.gateway.core.state.workers.get(name)
    seen = [_of_attempt(world, attempt) for attempt in worker.live] if worker is not None else []
    engine = world.workers[name].running
    return seen if engine is None else seen + _leftovers(world, engine, None)


def _of_attempt(world: "World", attempt: Attempt) -> str:
    if attempt.state is AttemptState.RESERVING:
        return RESERVING
    engine = _engine(world, attempt.decode.id)
    if attempt.state is AttemptState.PREFILLING:
        reception = engine.transport.table.get(attempt.transfer) if engine is not None else None
        return TRANSFER if reception is not None and reception.receiver.bytes_copied else PREFILLING
    if attempt.state is AttemptState.HANDOFF:
        return HANDOFF
    key = (attempt.choice.request.id, attempt.choice.index, attempt.number)
    if engine is not None and key in engine.begun and key not in engine.core.held.by_key:
        return LAST
    committed = len(attempt.choice.committed)
    if committed <= attempt.start:
        return PLACED
    return FIRST if committed == 1 else DECODING


def _leftovers(world: "World", engine: EngineProcess, number: int | None) -> list[str]:
    """What the engine holds (of request ``number``) and the gateway is done with."""
    found = []
    requests = world.gateway.core.state.requests
    for key in engine.core.held.by_key:
        if number is not None and key.request != number:
            continue
        client = world.clients[key.request]
        request = requests.get(key.request)
        if key.choice in client.stopped:
            found.append(STOPPED)
        elif request is None or request.choices[key.choice].find(key.attempt) is None:
            found.append(CANCELLED)
    return found


def _engine(world: "World", name: str) -> EngineProcess | None:
    node = world.workers.get(name)
    return node.running if node is not None else None
