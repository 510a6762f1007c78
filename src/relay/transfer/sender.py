"""P's side of one transfer as a pure state machine: what may be sent next, and when it is over.

Ranges arrive per layer in ascending order and leave as frames of 512 KB to 1 MB: smaller ranges wait for more of their layer
unless they reach its end. Where ``join_bytes`` asks for it a frame takes the same range of several layers, but not of so many that
the first of them would wait for long for the last to be computed.
Where heads lie in several places (those of ranks), each of these *parts* has frames of its own.
Bytes in flight stay within the window; credit is cumulative, so a repeated CREDIT is harmless.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from relay.kernels.kv_frames import Heads
from relay.transfer.contract import Layout, SendOrder, TransferLimits, TransferStats
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
from relay.transfer.watchdog import Watchdog


class SenderState(StrEnum):
    STREAMING = "streaming"
    HANDED_OFF = "handed_off"
    ACKNOWLEDGED = "acknowledged"
    FAILED = "failed"


class SenderEvent(StrEnum):
    HANDOFF_SENT = "handoff_sent"
    COMPLETE_RECEIVED = "complete_received"
    ABORT_RECEIVED = "abort_received"
    ABORTED = "aborted"
    LINK_LOST = "link_lost"
    LEASE_EXPIRED = "lease_expired"


UNIT = 16  # tokens that the cache keeps together: whole ones are copied faster
_S, _E = SenderState, SenderEvent

TRANSITIONS: dict[tuple[SenderState, SenderEvent], SenderState] = {
    (_S.STREAMING, _E.HANDOFF_SENT): _S.HANDED_OFF,
    (_S.STREAMING, _E.COMPLETE_RECEIVED): _S.FAILED,  # nothing was handed off yet: the peer is wrong
    (_S.STREAMING, _E.ABORT_RECEIVED): _S.FAILED,
    (_S.STREAMING, _E.ABORTED): _S.FAILED,
    (_S.STREAMING, _E.LINK_LOST): _S.FAILED,
    (_S.STREAMING, _E.LEASE_EXPIRED): _S.FAILED,
    (_S.HANDED_OFF, _E.COMPLETE_RECEIVED): _S.ACKNOWLEDGED,
    (_S.HANDED_OFF, _E.ABORT_RECEIVED): _S.FAILED,
    (_S.HANDED_OFF, _E.ABORTED): _S.FAILED,
    (_S.HANDED_OFF, _E.LINK_LOST): _S.FAILED,
    (_S.HANDED_OFF, _E.LEASE_EXPIRED): _S.FAILED,
}
"""Pairs that are missing leave the state as it is: both end states absorb everything."""


class Outgoing(NamedTuple):
    """A frame to send. ``payload`` None: read the KV that ``header`` names from the blocks."""

    header: Header
    payload: bytes | None


def frame_tokens(most_bytes: int, token_bytes: int) -> int:
    """The most tokens of a layer that one frame carries."""
    most = most_bytes // token_bytes
    return max(1, most // UNIT * UNIT or most)


class _Part:
    """Some of the heads: how far each layer of them was sent."""

    def __init__(self, heads: Heads, first: int, layout: Layout) -> None:
        self.heads = heads
        self.token_bytes = heads[1] * layout.head_bytes
        self.sent = [first] * layout.num_layers
        self.is_ready = [False] * layout.num_layers


class _Due(NamedTuple):
    """A frame that may go."""

    part: _Part
    layer: int
    layers: int
    first: int
    tokens: int
    size: int


class Sender:
    """One transfer on P. Time comes in as an argument; nothing here blocks or does I/O."""

    def __init__(
        self,
        order: SendOrder,
        epoch: int,
        layout: Layout,
        limits: TransferLimits,
        now_ns: int,
        parts: Sequence[Heads] = (),
    ) -> None:
        """``parts``: ranges that together are all heads; none: one of them all."""
        self.order = order
        self.epoch = epoch
        self.layout = layout
        self.limits = limits
        self.state = SenderState.STREAMING
        self.reason = ""
        self.handed_off = False
        self.bytes_sent = 0
        self.frames_sent = 0
        self._bytes_hidden = 0  # sent when the first token was drawn
        self._drawn_ns = 0
        self._ended_ns = 0
        self._most_kv_bytes = limits.max_frame_bytes
        self._first = min(order.first_token, order.num_tokens)
        self._written = [self._first] * layout.num_layers  # positions before are in the blocks
        self._parts = [_Part(heads, self._first, layout) for heads in parts or ((0, layout.num_kv_heads),)]
        self._layers_unsent = layout.num_layers * len(self._parts) if self._first < order.num_tokens else 0
        self._ready: deque[tuple[_Part, int]] = deque()
        self._bytes_credited = 0
        self._handoff: Handoff | None = None
        self._abort_due = False
        self._probe_due = False
        self.watchdog = Watchdog(limits.probe_ns, limits.stall_ns, now_ns)

    @property
    def over(self) -> bool:
        return self.state in (SenderState.ACKNOWLEDGED, SenderState.FAILED)

    @property
    def in_flight_bytes(self) -> int:
        """Sent and not yet credited."""
        return self.bytes_sent - self._bytes_credited

    @property
    def all_sent(self) -> bool:
        return self._layers_unsent == 0

    @property
    def drawn(self) -> bool:
        """Whether P has the first token, so that all KV is computed."""
        return self._handoff is not None

    def written(self, layer: int, first: int, count: int) -> None:
        """These positions are in the blocks. Known ones are ignored; a hole before ``first`` ends the transfer."""
        end = min(first + count, self.order.num_tokens)
        if first > self._written[layer]:
            self.abort(f"layer {layer}: positions {self._written[layer]}..{first - 1} were never announced")
        elif end > self._written[layer]:
            self._written[layer] = end
            for part in self._parts:
                self._mark_ready(part, layer)

    def forget_unsent(self) -> None:
        """What was announced and not yet sent is gone; it will be announced again."""
        self._written = [min(ends) for ends in zip(*(part.sent for part in self._parts), strict=True)]
        self._ready.clear()
        for part in self._parts:
            part.is_ready = [False] * self.layout.num_layers

    def stats(self, scheme: str) -> TransferStats:
        """Of an acknowledged transfer."""
        late = self.bytes_sent - self._bytes_hidden
        return TransferStats(scheme, self.bytes_sent, self.frames_sent, late, self._ended_ns - self._drawn_ns)

    def hand_off(self, handoff: Handoff, now_ns: int) -> None:
        """P has drawn the first token, so everything was announced; if not, waiting for it would never end."""
        self._handoff = handoff
        self._drawn_ns, self._bytes_hidden = now_ns, self.bytes_sent
        missing = [layer for layer, end in enumerate(self._written) if end < self.order.num_tokens]
        if missing:
            self.abort(f"handoff, but layer {missing[0]} was announced to {self._written[missing[0]]} only")

    def next_frame(self) -> Outgoing | None:
        """The next frame allowed now, counted as sent; None: nothing until another event."""
        return self._next_urgent() or self.next_kv() or self._next_handoff()

    def next_control(self) -> Outgoing | None:
        """``next_frame`` of a connection that carries no KV."""
        return self._next_urgent() or self._next_handoff()

    def next_kv(self) -> Outgoing | None:
        """``next_frame`` of a connection that carries nothing else; frames of several may overtake each other."""
        return self._next_kv() if self._ready and not self.over else None

    @property
    def kv_due(self) -> bool:
        """Whether ``next_kv`` has a frame: else nobody need be woken to ask for it."""
        return bool(self._ready) and not self.over and self._due() is not None

    def _next_urgent(self) -> Outgoing | None:
        if self._abort_due:
            self._abort_due = False
            return self._control(Kind.ABORT, encode_payload(Abort(self.reason)))
        if self._probe_due and not self.over:
            self._probe_due = False
            return self._control(Kind.PROBE, encode_payload(Probe(self.bytes_sent)))
        return None

    def _next_handoff(self) -> Outgoing | None:
        """Once every KV frame has been given to a connection."""
        if self._handoff is None or not self.all_sent or self.state is not SenderState.STREAMING:
            return None
        payload = encode_payload(self._handoff)
        count = self.order.num_tokens - self._first
        flags = FLAG_EMPTY if count == 0 else 0
        self._move(SenderEvent.HANDOFF_SENT, "")
        self.handed_off = True
        return self._control(Kind.HANDOFF, payload, first=self._first, count=count, flags=flags)

    def receive(self, header: Header, payload: bytes | bytearray | memoryview, now_ns: int) -> None:
        """A frame from D. Of another epoch or attempt: dropped. Raises FrameError for a payload that is none."""
        if header.epoch != self.epoch or header.attempt != self.order.attempt or self.over:
            return
        self.watchdog.heard(now_ns)
        if header.kind is Kind.CREDIT:
            self._bytes_credited = max(self._bytes_credited, decode_payload(payload, Credit).bytes_copied)
            self.watchdog.arrived(self._bytes_credited, now_ns)
        elif header.kind is Kind.COMPLETE:
            self._ended_ns = now_ns
            self._move(SenderEvent.COMPLETE_RECEIVED, "complete before the handoff")
            self._abort_due = self.state is SenderState.FAILED
        elif header.kind is Kind.ABORT:
            self._move(SenderEvent.ABORT_RECEIVED, decode_payload(payload, Abort).reason)

    def abort(self, reason: str) -> None:
        """End it from this side; the peer is told once."""
        if self._move(SenderEvent.ABORTED, reason):
            self._abort_due = True

    def link_lost(self, reason: str) -> None:
        self._move(SenderEvent.LINK_LOST, reason)

    def tick(self, now_ns: int) -> None:
        """Ask for a probe, or give up, when the watchdog says so."""
        if self.over:
            return
        verdict = self.watchdog.check(now_ns, self.bytes_sent, self.limits.lease_ns, "peer")
        if verdict.reason and self._move(SenderEvent.LEASE_EXPIRED, verdict.reason):
            self._abort_due = True
        self._probe_due = self._probe_due or verdict.probe

    def link_opened(self, now_ns: int, most_kv_bytes: int | None = None) -> None:
        """The first frame may go, with so much KV at most: tell D at once that P is there, even if the prompt waits in a queue."""
        if most_kv_bytes is not None:
            self._most_kv_bytes = min(self.limits.max_frame_bytes, most_kv_bytes)
        self.watchdog.restart(now_ns)
        self._probe_due = True

    def _mark_ready(self, part: _Part, layer: int) -> None:
        pending = self._written[layer] - part.sent[layer]
        whole = pending * part.token_bytes >= self.limits.min_frame_bytes
        last = self._written[layer] == self.order.num_tokens
        if pending > 0 and (whole or last) and not part.is_ready[layer]:
            part.is_ready[layer] = True
            self._ready.append((part, layer))

    def _due(self) -> _Due | None:
        """The next frame, if the window has room for it and it need not wait for more layers."""
        part, layer = self._ready[0]
        first = part.sent[layer]
        pending = self._written[layer] - first
        most = frame_tokens(self._most_kv_bytes, part.token_bytes)
        frames = -(-pending // most)
        count = min(pending, most, -(-pending // frames // UNIT) * UNIT)
        layers = self._joined(part, layer, first, count)
        size = layers * count * part.token_bytes
        in_flight = self.bytes_sent - self._bytes_credited
        if not layers or (in_flight > 0 and in_flight + size > self.limits.window_bytes):
            return None
        return _Due(part, layer, layers, first, count, size)

    def _next_kv(self) -> Outgoing | None:
        due = self._due()
        if due is None:
            return None
        part, layer, layers, first, count, size = due
        self.bytes_sent += size
        self.frames_sent += 1
        for sent in range(layer, layer + layers):
            part.sent[sent] = first + count
            self._layers_unsent -= first + count == self.order.num_tokens
            if part.is_ready[sent]:
                self._ready.remove((part, sent))
                part.is_ready[sent] = False
            self._mark_ready(part, sent)
        header = Header(
            Kind.KV,
            self.order.transfer,
            self.epoch,
            self.order.attempt,
            layer,
            *part.heads,
            first,
            count,
            0,
            size,
            layers,
        )
        return Outgoing(header, None)

    def _joined(self, part: _Part, layer: int, first: int, count: int) -> int:
        """How many layers from ``layer`` on go into one frame; 0: the step that wrote this one is about to write more of them."""
        if not self.limits.join_bytes:
            return 1
        each = count * part.token_bytes
        joined = min(self.limits.join_bytes, self._most_kv_bytes)
        limit = joined if self._handoff is None else self._most_kv_bytes
        most = max(1, min(limit // each, self.layout.num_layers - layer))
        layers, end = 1, first + count
        while layers < most and part.sent[layer + layers] == first and self._written[layer + layers] >= end:
            layers += 1
        to_come = layers < most and self._written[layer + layers] < end
        return 0 if to_come and layers * each < joined else layers

    def _control(self, kind: Kind, payload: bytes, first: int = 0, count: int = 0, flags: int = 0) -> Outgoing:
        header = Header(
            kind,
            self.order.transfer,
            self.epoch,
            self.order.attempt,
            first_token=first,
            token_count=count,
            flags=flags,
            payload_bytes=len(payload),
        )
        return Outgoing(header, payload)

    def _move(self, event: SenderEvent, reason: str) -> bool:
        target = TRANSITIONS.get((self.state, event), self.state)
        moved = target is not self.state
        if moved:
            self.state = target
            if target is SenderState.FAILED:
                self.reason = reason
        return moved
