"""What a core asks of its transport, carried out; the same for every shell."""

from relay.transfer.contract import Transport
from relay.worker.commands import AbortTransfer, ForgetUnsent, OpenReceive, OpenSend, SendHandoff, TransferCommand


def carry_out(transport: Transport, command: TransferCommand) -> None:
    """Do it now: nothing else may be handled between a core's decision about a transfer and this."""
    match command:
        case OpenSend(order):
            transport.open_send(order)
        case ForgetUnsent(transfer):
            transport.forget_unsent(transfer)
        case SendHandoff(transfer, handoff):
            transport.send_handoff(transfer, handoff)
        case OpenReceive(order):
            transport.open_receive(order)
        case AbortTransfer(transfer, reason):
            transport.abort(transfer, reason)
