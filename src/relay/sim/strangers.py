"""Strangers connect to every listener and say what they should not. I18: nothing changes.

There are those who know nothing (garbage, frames out of turn), those who know the protocol (unknown worker, other model, other
numerics), and those who once belonged here or pretend to (an incarnation that is over, a second one of the present, KV for a
transfer that is open, of an attempt that is over).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from relay.control import commands as c
from relay.control import events as e
from relay.protocol.framing import MAX_FRAME_BYTES, encode
from relay.protocol.messages import PROTOCOL_MAX, SequenceFailed, TokenEntry, Tokens
from relay.protocol.messages import Hello as ControlHello
from relay.sim.backend import LAYOUT
from relay.sim.engine import MODEL_DIGEST, EngineProcess
from relay.sim.gateway import GatewayNode
from relay.sim.kernel import Violation
from relay.sim.kv_link import frame, hello_frame
from relay.sim.network import Side
from relay.transfer.contract import Identity, Layout
from relay.transfer.frame import Abort, Handoff, Header, Kind, encode_payload
from relay.transfer.receiver import Receiver

if TYPE_CHECKING:
    from relay.sim.world import World

HOST = "stranger"
PATIENCE_NS = 300_000_000  # then the stranger goes away
GARBAGE = bytes(range(64))


def visit(world: "World") -> bool:
    """One stranger calls somebody. False: there is nobody to call."""
    tape = world.kernel.tape
    engines = [node.running for node in world.prefer_workers(list(world.workers.values())) if node.running is not None]
    if not engines:
        return False
    engine = tape.of(engines, "visited")
    world.struck.hosts(engine.key.worker)
    call(world, engine, tape.of(tuple(TO_GATEWAY) if tape.below(2, "listener") else tuple(TO_ENGINE), "way"))
    return True


def call(world: "World", engine: EngineProcess, way: str) -> None:
    """Somebody calls the gateway, or the KV listener of ``engine``, in this ``way``."""
    if way in TO_GATEWAY:
        speech, kind, address = TO_GATEWAY[way](world, engine), "engine", world.gateway.host
    else:
        speech, kind, address = TO_ENGINE[way](engine), "kv", engine.transport.addresses[0]
    world.kernel.sometimes(f"stranger: {way}")
    world.kernel.tell("a stranger calls {}: {}", address, way)

    def dialled(side: Side | str) -> None:
        if isinstance(side, Side):
            side.on_data = side.on_close = _not_interested
            for piece in speech:
                side.send(piece)
            world.kernel.after(PATIENCE_NS, side.close)

    world.network.dial(HOST, kind, address, dialled)


def _not_interested(argument: object) -> None:
    """What a stranger does with answers."""


# --- at the gateway ---------------------------------------------------------------------------------------------------


def _hello(engine: EngineProcess, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "process": "engine",
        "worker": engine.key.worker,
        "incarnation": engine.key.incarnation,
        "pid": 66,
        "role": engine.role,
        "kv_addresses": ["sim://nowhere"],
        "model_digest": MODEL_DIGEST,
        "numerics_id": engine.numerics,
        "kv_blocks": 1000,
    }
    return encode(ControlHello(**fields | changes))  # type: ignore[arg-type]  # fields by name


def _words_about_everybody(world: "World") -> list[bytes]:
    """Tokens and failures for every live attempt, from somebody who has not been let in."""
    words = []
    for request in world.gateway.core.state.requests.values():
        for choice in request.choices:
            name = (request.id, choice.index, choice.num_attempts)
            words.append(encode(Tokens([TokenEntry(*name, len(choice.committed), [1])])))
            words.append(encode(SequenceFailed(*name, reason="says a stranger", retry=True)))
    return words


TO_GATEWAY: dict[str, Callable[["World", EngineProcess], list[bytes]]] = {
    "garbage": lambda world, engine: [GARBAGE],
    "silence": lambda world, engine: [],
    "an oversized frame": lambda world, engine: [(MAX_FRAME_BYTES + 1).to_bytes(4, "little"), GARBAGE],
    "no hello": lambda world, engine: _words_about_everybody(world),
    "an unknown worker": lambda world, engine: [_hello(engine, worker="stranger-0"), *_words_about_everybody(world)],
    "a protocol to come": lambda world, engine: [
        _hello(engine, protocol_min=PROTOCOL_MAX + 1, protocol_max=PROTOCOL_MAX + 9)
    ],
    "an incarnation that is over": lambda world, engine: [
        _hello(engine, incarnation=engine.key.incarnation - 1),
        *_words_about_everybody(world),
    ],
    "another model": lambda world, engine: [_hello(engine, model_digest="other"), *_words_about_everybody(world)],
    "no KV blocks": lambda world, engine: [_hello(engine, kv_blocks=0)],
}


class StrangerWatch:
    """What a stranger says to the gateway is refused, and leaves every worker as it was."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._before: list[tuple[object, ...]] | None = None

    def before(self, node: GatewayNode, event: e.Event) -> None:
        self._before = _workers(node) if type(event) is e.WorkerConnected and self._strange(event) else None

    def after(self, node: GatewayNode, event: e.Event, commands: list[c.Command]) -> None:
        if self._before is None:
            return
        let_in = [command for command in commands if not isinstance(command, c.RejectConnection)]
        if let_in:
            raise Violation("I18", f"a stranger's hello leads to {let_in[0]}")
        if self._before != _workers(node):
            raise Violation("I18", "a stranger's hello changes what the gateway knows of its workers")

    def _strange(self, event: e.WorkerConnected) -> bool:
        side = self._world.network.sides.get(event.connection)
        return side is not None and side.peer.host == HOST


def _workers(node: GatewayNode) -> list[tuple[object, ...]]:
    """All that a hello may change."""
    return [
        (w.state, w.incarnation, w.agent, w.engine, w.agent_open, w.engine_open, w.heard_ns, w.kv_tokens)
        for w in node.core.state.workers.values()
    ]


# --- at an engine's KV listener ---------------------------------------------------------------------------------------


def _greeting(engine: EngineProcess, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "worker": "stranger-0",
        "incarnation": 1,
        "model_digest": MODEL_DIGEST,
        "numerics_id": engine.numerics,
        "layout": LAYOUT,
    }
    return hello_frame(Identity(**fields | changes))  # type: ignore[arg-type]  # fields by name


def _forgeries(receiver: Receiver, epoch: int, attempt: int) -> list[bytes]:
    """KV for all of a transfer's tokens, its handoff and an abort: all valid but for who says it."""
    order = receiver.order
    first, count = receiver.first_token, order.num_tokens - receiver.first_token
    found = []
    for layer in range(LAYOUT.num_layers):
        payload = bytes(count * LAYOUT.token_bytes)
        header = Header(
            Kind.KV, order.transfer, epoch, attempt, layer, 0, LAYOUT.num_kv_heads, first, count, 0, len(payload)
        )
        found.append(frame(header, payload))
    words: list[tuple[Kind, Handoff | Abort]] = [
        (Kind.HANDOFF, Handoff(token_id=1)),
        (Kind.ABORT, Abort("says a stranger")),
    ]
    for kind, word in words:
        payload = encode_payload(word)
        header = Header(
            kind, order.transfer, epoch, attempt, first_token=first, token_count=count, payload_bytes=len(payload)
        )
        found.append(frame(header, payload))
    return found


def _pretend(engine: EngineProcess, older_life: int, older_attempt: int, **changes: object) -> list[bytes]:
    """Somebody speaks for the source of an open reception; ``changes`` make its hello a wrong one."""
    for receiver in engine.transport.receivers():
        order = receiver.order
        epoch = order.source_incarnation - older_life
        return [
            _greeting(engine, worker=order.source, incarnation=epoch, **changes),
            *_forgeries(receiver, epoch, order.attempt - older_attempt),
        ]
    return [_greeting(engine, **changes)]


TO_ENGINE: dict[str, Callable[[EngineProcess], list[bytes]]] = {
    "KV garbage": lambda engine: [GARBAGE],
    "KV silence": lambda engine: [],
    "KV before a hello": lambda engine: [f for r in engine.transport.receivers() for f in _forgeries(r, 1, 1)],
    "KV of another model": lambda engine: _pretend(engine, 0, 0, model_digest="other"),
    "KV of other numerics": lambda engine: _pretend(engine, 0, 0, numerics_id="other"),
    "KV of another layout": lambda engine: _pretend(engine, 0, 0, layout=Layout(9, 1, 2, "float32")),
    "KV of nobody's transfer": lambda engine: [
        _greeting(engine),
        *[f for r in engine.transport.receivers() for f in _forgeries(r, 1, r.order.attempt)],
    ],
    "KV of a life that is over": lambda engine: _pretend(engine, 1, 0),
    "KV of an attempt that is over": lambda engine: _pretend(engine, 0, 1),
}
