"""What ties a reception on D to a connection."""

from typing import Any, cast

from relay.clock import MonotonicClock
from relay.transfer.contract import ReceiveFailed, TransferEvent, TransferLimits
from relay.transfer.frame import Header, Kind, Probe, encode_payload
from relay.transfer.inbound import InboundLink, ReceptionTable
from tests.transfer.nodes import receive_order
from tests.transfer.stores import LAYOUT


class _Link:
    def post(self, replies: list[Any]) -> None:
        """Nobody is there to be answered."""


def test_the_end_of_a_connection_of_another_life_or_attempt_ends_nothing() -> None:
    events: list[TransferEvent] = []
    table = ReceptionTable(LAYOUT, TransferLimits(), events.append, MonotonicClock())
    order = receive_order()
    table.open(order)
    reception = table.get(order.transfer)
    assert reception is not None
    right, older, earlier = [cast(InboundLink, _Link()) for _ in range(3)]

    def heard(link: Any, epoch: int, attempt: int) -> None:
        with reception.lock:
            reception.heard_on(link, Header(Kind.KV, order.transfer, epoch, attempt))

    heard(older, order.source_incarnation - 1, order.attempt)
    heard(right, order.source_incarnation, order.attempt)
    heard(earlier, order.source_incarnation, order.attempt - 1)
    assert reception.link is right
    table.link_lost(older, "EOF")
    table.link_lost(earlier, "EOF")
    assert events == []
    probe = Header(Kind.PROBE, order.transfer, order.source_incarnation, order.attempt)
    reception.receiver.receive(probe, encode_payload(Probe(0)), 0)  # P is there: from now on its link counts
    table.link_lost(right, "EOF")
    assert events == [ReceiveFailed(order.transfer, "EOF")]
