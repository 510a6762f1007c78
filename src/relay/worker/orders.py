"""From the gateway's orders to those of the transport."""

from relay.engine.scheduler import Reservation
from relay.ids import SequenceKey
from relay.protocol.messages import Prefill, Reserve
from relay.transfer.contract import ReceiveOrder, SendOrder


def receive_order(order: Reserve, key: SequenceKey, reservation: Reservation) -> ReceiveOrder:
    """D's side: everything behind what it has cached goes into the reserved blocks."""
    return ReceiveOrder(
        transfer=order.transfer,
        attempt=key.attempt,
        source=order.source,
        source_incarnation=order.source_incarnation,
        first_token=reservation.cached_tokens,
        num_tokens=len(order.work.token_ids),
        block_table=tuple(reservation.block_table),
    )


def send_order(order: Prefill, key: SequenceKey, first_token: int) -> SendOrder:
    """P's side."""
    return SendOrder(
        transfer=order.transfer,
        attempt=key.attempt,
        target=order.target,
        target_incarnation=order.target_incarnation,
        addresses=tuple(order.addresses),
        first_token=first_token,
        num_tokens=len(order.work.token_ids),
    )
