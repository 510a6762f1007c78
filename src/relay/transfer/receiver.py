"""D's side of one transfer as a pure state machine: what may be written, and when everything is there.

Coverage is by (layer, token, head); a frame may hold several layers and any of their heads. Complete means: all of it
has come and the handoff too, in any order. A frame of another epoch or attempt, or for a transfer that is over, changes nothing.
"""

from enum import StrEnum

from relay.transfer.contract import Layout, ReceiveOrder, TransferLimits
from relay.transfer.coverage import Runs, mask_of, nothing, with_range
from relay.transfer.frame import (
    FLAG_EMPTY,
    Abort,
    Credit,
    Handoff,
    Header,
    Kind,
    Probe,
    decode_payload,
    encode_payload,
)
from relay.transfer.sender import Outgoing
from relay.transfer.watchdog import Watchdog


class ReceiverState(StrEnum):
    RESERVED = "reserved"  # nothing heard of P yet
    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"


class ReceiverEvent(StrEnum):
    FRAME_RECEIVED = "frame_received"
    COVERED = "covered"  # full coverage and the handoff
    ABORT_RECEIVED = "abort_received"
    ABORTED = "aborted"
    LINK_LOST = "link_lost"
    LEASE_EXPIRED = "lease_expired"


_S, _E = ReceiverState, ReceiverEvent

TRANSITIONS: dict[tuple[ReceiverState, ReceiverEvent], ReceiverState] = {
    (_S.RESERVED, _E.FRAME_RECEIVED): _S.RECEIVING,
    (_S.RESERVED, _E.ABORT_RECEIVED): _S.FAILED,
    (_S.RESERVED, _E.ABORTED): _S.FAILED,
    (_S.RESERVED, _E.LEASE_EXPIRED): _S.FAILED,
    (_S.RECEIVING, _E.COVERED): _S.COMPLETE,
    (_S.RECEIVING, _E.ABORT_RECEIVED): _S.FAILED,
    (_S.RECEIVING, _E.ABORTED): _S.FAILED,
    (_S.RECEIVING, _E.LINK_LOST): _S.FAILED,
    (_S.RECEIVING, _E.LEASE_EXPIRED): _S.FAILED,
}
"""Pairs that are missing leave the state as it is. LINK_LOST in RESERVED: it was some other link, P may still dial."""


class Receiver:
    """One transfer on D. The shell writes KV between ``admit`` and ``written``, holding the lock under which it aborts."""

    def __init__(self, order: ReceiveOrder, layout: Layout, limits: TransferLimits, now_ns: int) -> None:
        self.order = order
        self.layout = layout
        self.limits = limits
        self.state = ReceiverState.RESERVED
        self.reason = ""
        self.handoff: Handoff | None = None
        self.bytes_copied = 0
        self.frames_copied = 0
        self._first = min(order.first_token, order.num_tokens)
        self._count = order.num_tokens - self._first
        self._full: Runs = ((self._count, mask_of((0, layout.num_kv_heads))),)
        self._covered = [nothing(self._count)] * layout.num_layers  # of each, counted from the first token
        self._layers_missing = layout.num_layers if self._count else 0
        self._bytes_credited = 0
        self._replies: list[Outgoing] = []
        self._bytes_sent = 0  # as far as P has said
        self.watchdog = Watchdog(limits.probe_ns, limits.stall_ns, now_ns)

    @property
    def over(self) -> bool:
        return self.state in (ReceiverState.COMPLETE, ReceiverState.FAILED)

    @property
    def first_token(self) -> int:
        """What comes before needs not be sent."""
        return self._first

    @property
    def covered(self) -> bool:
        return self._layers_missing == 0

    def admit(self, header: Header, now_ns: int) -> bool:
        """Whether the KV of this frame is to be written to the blocks. A frame that fits nothing here aborts."""
        if not self._hear(header, now_ns):
            return False
        last = header.first_token + header.token_count
        problem = ""
        if header.layer + header.layers > self.layout.num_layers:
            problem = f"layer {header.layer + header.layers - 1} of {self.layout.num_layers}"
        elif header.head_count == 0 or header.first_head + header.head_count > self.layout.num_kv_heads:
            problem = f"heads {header.first_head}+{header.head_count} of {self.layout.num_kv_heads}"
        elif header.token_count == 0 or header.first_token < self._first or last > self.order.num_tokens:
            problem = f"tokens {header.first_token}..{last - 1} outside {self._first}..{self.order.num_tokens - 1}"
        elif header.payload_bytes != header.layers * header.token_count * header.head_count * self.layout.head_bytes:
            what = f"{header.token_count} tokens of {header.layers} layers and {header.head_count} heads"
            problem = f"{header.payload_bytes} bytes for {what}"
        if problem:
            self.abort(f"malformed KV frame: {problem}")
        return not problem

    def written(self, header: Header, now_ns: int) -> None:
        """The KV of an admitted frame is in the blocks. Nothing, if the transfer ended meanwhile."""
        if self.over:
            return
        first = header.first_token - self._first
        heads = mask_of((header.first_head, header.head_count))
        before: Runs = ()
        after: Runs = ()
        for layer in range(header.layer, header.layer + header.layers):
            has = self._covered[layer]
            if has != self._full:
                if has != before:  # layers that came together have come alike so far
                    before, after = has, with_range(has, first, first + header.token_count, heads)
                self._covered[layer] = after
                self._layers_missing -= after == self._full
        self.bytes_copied += header.payload_bytes
        self.frames_copied += 1
        self.watchdog.arrived(self.bytes_copied, now_ns)
        if self.bytes_copied - self._bytes_credited >= (self.limits.credit_bytes or self.limits.window_bytes // 2):
            self._credit()
        self._check_complete()

    def receive(self, header: Header, payload: bytes | bytearray | memoryview, now_ns: int) -> None:
        """Any frame of P but KV. Raises FrameError for a payload that is none."""
        if not self._hear(header, now_ns):
            return
        if header.kind is Kind.PROBE:
            self._bytes_sent = max(self._bytes_sent, decode_payload(payload, Probe).bytes_sent)
            self._credit()
        elif header.kind is Kind.ABORT:
            self._move(ReceiverEvent.ABORT_RECEIVED, decode_payload(payload, Abort).reason)
        elif header.kind is Kind.HANDOFF:
            handoff = decode_payload(payload, Handoff)
            same_range = header.first_token == self._first and header.token_count == self._count
            if not same_range or bool(header.flags & FLAG_EMPTY) != (self._count == 0):
                self.abort(
                    f"handoff of tokens {header.first_token}+{header.token_count}, expected {self._first}+{self._count}"
                )
                return
            self.handoff = handoff
            self._bytes_sent = self._count * self.layout.token_bytes * self.layout.num_layers
            self._check_complete()
        else:
            self.abort(f"unexpected {header.kind.name}")

    def abort(self, reason: str) -> None:
        """End it from this side; the peer is told once."""
        if self._move(ReceiverEvent.ABORTED, reason):
            self._reply(Kind.ABORT, encode_payload(Abort(reason)))

    def link_lost(self, reason: str) -> None:
        self._move(ReceiverEvent.LINK_LOST, reason)

    def tick(self, now_ns: int) -> None:
        """Give up when P is silent, or when what it says it sent does not come."""
        if self.over:
            return
        silence_ns = self.limits.open_lease_ns if self.state is ReceiverState.RESERVED else self.limits.lease_ns
        verdict = self.watchdog.check(now_ns, self._bytes_sent, silence_ns, "source")
        if verdict.reason and self._move(ReceiverEvent.LEASE_EXPIRED, verdict.reason):
            self._reply(Kind.ABORT, encode_payload(Abort(self.reason)))

    def take_replies(self) -> list[Outgoing]:
        """Frames for P since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def _hear(self, header: Header, now_ns: int) -> bool:
        if header.epoch != self.order.source_incarnation or header.attempt != self.order.attempt or self.over:
            return False
        self.watchdog.heard(now_ns)
        if self.state is ReceiverState.RESERVED:
            self._move(ReceiverEvent.FRAME_RECEIVED, "")
        return True

    def _check_complete(self) -> None:
        if self.covered and self.handoff is not None and self._move(ReceiverEvent.COVERED, ""):
            self._reply(Kind.COMPLETE, b"")

    def _credit(self) -> None:
        self._bytes_credited = self.bytes_copied
        self._reply(Kind.CREDIT, encode_payload(Credit(self.bytes_copied)))

    def _reply(self, kind: Kind, payload: bytes) -> None:
        order = self.order
        header = Header(kind, order.transfer, order.source_incarnation, order.attempt, payload_bytes=len(payload))
        self._replies.append(Outgoing(header, payload))

    def _move(self, event: ReceiverEvent, reason: str) -> bool:
        target = TRANSITIONS.get((self.state, event), self.state)
        moved = target is not self.state
        if moved:
            self.state = target
            if target is ReceiverState.FAILED:
                self.reason = reason
        return moved
