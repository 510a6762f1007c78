"""P sends what it should not: KV frames of the right epoch and attempt, checksums and all, that fit nothing D has made room for.

Checksums find damage on the way. This is a P with a bug, or one that lies: D may store none of it, and gives the transfer up.
"""

from collections.abc import Callable

from msgspec.structs import replace

from relay.sim.backend import LAYOUT
from relay.sim.kernel import Violation
from relay.sim.network import Network, Side
from relay.transfer.contract import ReceiveOrder, SendOrder
from relay.transfer.frame import Header, Kind

_Frame = tuple[Header, bytes]

BEFORE = "a token before the first"  # there must be one: D has the prompt's beginning already


def _range(first: Callable[[Header, SendOrder], int]) -> Callable[[Header, bytes, SendOrder], _Frame]:
    return lambda header, payload, order: (replace(header, first_token=first(header, order)), payload)


FORGERIES: dict[str, Callable[[Header, bytes, SendOrder], _Frame]] = {
    "a layer above the last": lambda header, payload, order: (replace(header, layer=LAYOUT.num_layers), payload),
    "a head too many": lambda header, payload, order: (replace(header, head_count=header.head_count + 1), payload),
    "a token above the end": _range(lambda header, order: order.num_tokens - header.token_count + 1),
    BEFORE: _range(lambda header, order: order.first_token - 1),
    "no tokens": lambda header, payload, order: (replace(header, token_count=0, payload_bytes=0), b""),
    "bytes for another token": lambda header, payload, order: (
        replace(header, payload_bytes=len(payload) + LAYOUT.token_bytes),
        payload + bytes(LAYOUT.token_bytes),
    ),
}


def forged(network: Network, side: Side, header: Header, payload: bytes, order: SendOrder) -> _Frame:
    """The frame that P sends instead of this one: another one, if a forgery waits and can be made of it."""
    waiting = network.forge_next_kv
    if not waiting or header.kind is not Kind.KV:
        return header, payload
    ways = waiting[0]
    way = BEFORE if order.first_token and BEFORE in ways else next((way for way in ways if way != BEFORE), "")
    if not way:
        return header, payload
    del waiting[0]
    network.damaged("kv_forge", side)
    network.sometimes(f"malformed KV: {way}")
    return FORGERIES[way](header, payload, order)


def admitted(header: Header, order: ReceiveOrder) -> None:
    """I7: D is about to store the KV of this frame, so it has the room for just that."""
    count = header.token_count
    tokens = order.first_token <= header.first_token < header.first_token + count <= order.num_tokens
    heads = 0 < header.head_count <= LAYOUT.num_kv_heads - header.first_head
    if (
        not tokens
        or not heads
        or header.layer + header.layers > LAYOUT.num_layers
        or header.payload_bytes != count * header.head_count * LAYOUT.head_bytes
    ):
        raise Violation("I7", f"D stores {header}, its order is {order}")
