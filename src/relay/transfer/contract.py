"""What the worker asks of a transfer and what it hears back; one file for every transport."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from relay.kernels.kv_frames import Heads
from relay.transfer.frame import MAX_DEVICE_KV_BYTES, Handoff, Header, Hello

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of the KV cache on the wire; independent of block size."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32", "bfloat16" or "float16"

    @property
    def token_bytes(self) -> int:
        """K plus V of one token in one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """K plus V of one token and one head in one layer."""
        return 2 * self.head_dim * _DTYPE_BYTES[self.dtype]

    def heads_of(self, header: Header) -> Heads | None:
        """What stores are asked for: None where a frame has them all."""
        return None if header.head_count == self.num_kv_heads else (header.first_head, header.head_count)


@dataclass(frozen=True, slots=True)
class Identity:
    """This engine as its peers must know it: KV crosses only between equal digests, numerics and layouts."""

    worker: str
    incarnation: int
    model_digest: str
    numerics_id: str
    layout: Layout

    def hello(self) -> Hello:
        layout = self.layout
        return Hello(
            worker=self.worker,
            incarnation=self.incarnation,
            model_digest=self.model_digest,
            numerics_id=self.numerics_id,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
        )


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Bounds of one transfer. ``open_lease_ns`` is the time P has to be heard of at all, ``lease_ns`` the longest silence after,
    ``stall_ns`` the longest time without a byte while some are under way; after ``probe_ns`` of either P asks. A frame takes in
    layers until it holds ``join_bytes``, for ends where a frame costs more than its bytes, up to ``max_frame_bytes`` once all is
    computed; 0: one layer a frame. A connection may carry less in a frame (``Channel.most_kv_bytes``). Credit comes for every
    ``credit_bytes``; 0: for every half of the window."""

    min_frame_bytes: int = 1 << 19
    max_frame_bytes: int = 1 << 20
    window_bytes: int = 4 << 20
    probe_ns: int = 1_000_000_000
    lease_ns: int = 3_000_000_000
    open_lease_ns: int = 10_000_000_000
    stall_ns: int = 3_000_000_000
    join_bytes: int = 0
    credit_bytes: int = 0

    def __post_init__(self) -> None:
        # Credit comes back in halves of the window at most, so a frame must fit beside a half that is not yet credited.
        if not 0 < self.min_frame_bytes <= self.max_frame_bytes <= MAX_DEVICE_KV_BYTES:
            raise ValueError(
                f"frames of {self.min_frame_bytes}..{self.max_frame_bytes} bytes, limit {MAX_DEVICE_KV_BYTES}"
            )
        if not 0 <= self.join_bytes <= self.max_frame_bytes:
            raise ValueError(f"layers joined up to {self.join_bytes} bytes in frames of {self.max_frame_bytes} at most")
        if not 0 <= self.credit_bytes <= self.window_bytes // 2:
            raise ValueError(f"credit for every {self.credit_bytes} bytes of a window of {self.window_bytes}")
        if self.max_frame_bytes * 2 > self.window_bytes:
            raise ValueError(f"window of {self.window_bytes} bytes is too small for {self.max_frame_bytes}-byte frames")


@dataclass(frozen=True, slots=True)
class SendOrder:
    """P's side of one transfer: positions ``first_token``..``num_tokens - 1`` of every layer go to ``target``."""

    transfer: int
    attempt: int
    target: str
    target_incarnation: int
    addresses: tuple[str, ...]
    first_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """D's side: what will come, from whom, and the blocks (indices into D's pool) it goes to."""

    transfer: int
    attempt: int
    source: str
    source_incarnation: int
    first_token: int
    num_tokens: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one transfer moved over ``scheme``.

    ``late_bytes`` had not left when the first token was drawn: all others are hidden behind the prompt. ``exposed_ns`` is the
    time from that moment to D's COMPLETE, the way back included: more than what D waited.
    """

    scheme: str
    bytes: int
    frames: int
    late_bytes: int = 0
    exposed_ns: int = 0


@dataclass(frozen=True, slots=True)
class SendAcknowledged:
    """D holds everything; P may free its blocks. The transport has forgotten the transfer."""

    transfer: int
    stats: TransferStats | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The transfer ended otherwise. ``handed_off``: D may nevertheless have it all, so D's word counts."""

    transfer: int
    reason: str
    handed_off: bool


@dataclass(frozen=True, slots=True)
class ReceiveCompleted:
    """Every layer of every token is in the blocks, verified, and the first token has arrived."""

    transfer: int
    handoff: Handoff
    stats: TransferStats | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """Nothing more will be written to the blocks. ``reason`` "finished": P's first token ended the sequence."""

    transfer: int
    reason: str


TransferEvent = SendAcknowledged | SendFailed | ReceiveCompleted | ReceiveFailed

FINISHED = "finished"  # the abort reason that is no failure


class KvStore(Protocol):
    """The part of a backend that a transport needs; both are called by transfer threads, which may write different ``heads`` of
    the same positions at once. ``heads`` None: all of them."""

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None: ...

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None: ...


def read_frame_kv(
    store: KvStore, header: Header, block_table: np.ndarray, out: memoryview, heads: Heads | None = None
) -> None:
    """Fill ``out`` with the payload that ``header`` names, layer by layer; ``heads`` as ``Layout.heads_of`` says."""
    size = header.payload_bytes // header.layers
    for index in range(header.layers):
        part = out[index * size : (index + 1) * size]
        _move(store.read_kv, header, index, block_table, part, heads)


def write_frame_kv(
    store: KvStore, header: Header, block_table: np.ndarray, data: memoryview, heads: Heads | None = None
) -> None:
    """The inverse, for a header that was admitted."""
    size = header.payload_bytes // header.layers
    for index in range(header.layers):
        part = data[index * size : (index + 1) * size]
        _move(store.write_kv, header, index, block_table, part, heads)


def _move(
    call: Callable[..., None],
    header: Header,
    index: int,
    block_table: np.ndarray,
    part: memoryview,
    heads: Heads | None,
) -> None:
    """Stores that have no parts of heads are never asked for one."""
    more = () if heads is None else (heads,)
    call(header.layer + index, block_table, header.first_token, header.token_count, part, *more)


class Transport(Protocol):
    """Moves KV between engines. No method blocks on the network; events arrive through the callback given at construction."""

    @property
    def addresses(self) -> list[str]:
        """Where peers may dial."""
        ...

    def open_send(self, order: SendOrder) -> None:
        """Start dialling (or reuse a link); announce ranges with ``layer_written``."""
        ...

    def layer_written(self, transfer: int, layer: int, first: int, count: int, block_table: np.ndarray) -> None:
        """K and V of these positions are in the blocks and stay there until the transfer ends or ``forget_unsent``.

        Called by the compute thread; unknown transfers are ignored. Ranges below ``first_token`` are cut off.
        """
        ...

    def forget_unsent(self, transfer: int) -> None:
        """The blocks are about to be taken away (preemption): after return none is read until ranges are announced anew."""
        ...

    def send_handoff(self, transfer: int, handoff: Handoff) -> None:
        """After the last range: the token P drew."""
        ...

    def open_receive(self, order: ReceiveOrder) -> None: ...

    def abort(self, transfer: int, reason: str) -> None:
        """End either side and tell the peer; after return no block is read or written for it. Idempotent; causes no event."""
        ...

    def tick(self, now_ns: int) -> None:
        """Probe and expire leases; call every few hundred milliseconds."""
        ...

    def close(self) -> None: ...
