"""The frame of a KV connection, sans-IO: a fixed little-endian header and a payload.

Header (56 bytes): magic ``RLKV``, version u8, kind u8, flags u16, transfer u64, epoch u64 (incarnation of the source worker),
attempt u32, layer u16, layers after it u16, first head u16, head count u16, first token u32, token count u32, payload length
u32, CRC32C of the payload u32, CRC32C of the 52 bytes before u32. The header has a checksum of its own so that a receiver knows
for certain where a payload belongs before it has the payload, and may copy it straight there. A KV payload is, layer by layer,
K then V of the tokens, each canonical [token][kv_head][dim]; every other payload is MessagePack. See docs/wire-protocol.md.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec

MAGIC = b"RLKV"
VERSION = 3
HEADER_BYTES = 56
MAX_KV_BYTES = 1 << 24  # of a payload that lies in host memory
MAX_DEVICE_KV_BYTES = 1 << 28  # of one that lies in an area of a device
MAX_CONTROL_BYTES = 1 << 16

FLAG_EMPTY = 1  # on HANDOFF: the target already holds every token, no KV frame was sent
FLAG_DIGEST = (
    2  # on KV: the payload's checksum is ``kernels.kv_frames.payload_digest``, which devices take while they copy
)
KNOWN_FLAGS = FLAG_EMPTY | FLAG_DIGEST

_LAYOUT = struct.Struct("<4sBBHQQIHHHHIIII")  # all but the header's checksum
_CHECKSUM = struct.Struct("<I")

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # as engines keep it
Count = Annotated[int, msgspec.Meta(ge=0)]

Checksum = Callable[[bytes | bytearray | memoryview, int], int]
"""(data, value of what came before, 0 at the start) → CRC32C."""


class FrameError(ValueError):
    """The peer sent something that is no frame of this protocol, or a damaged one; close the connection."""


class VersionMismatch(FrameError):
    """The peer speaks another version of this protocol; the text names both."""


class Kind(IntEnum):
    """What a frame is. The source P dials and sends HELLO first; the target D answers HELLO or ABORT."""

    HELLO = 1  # both ways
    KV = 2  # P → D
    HANDOFF = 3  # P → D: the first token, after the last KV frame
    COMPLETE = 4  # D → P: coverage is full and the handoff is there; P may free its blocks
    ABORT = 5  # both ways, any time
    CREDIT = 6  # D → P: KV payload bytes copied so far, cumulative; also the answer to PROBE
    PROBE = 7  # P → D: the transfer lives; KV payload bytes sent so far


_KINDS = {int(kind): kind for kind in Kind}


class Header(msgspec.Struct, frozen=True, gc=False):
    """One frame's header without magic, version and checksum. A HANDOFF names the whole range of tokens sent."""

    kind: Kind
    transfer: int = 0
    epoch: int = 0
    attempt: int = 0
    layer: int = 0
    first_head: int = 0
    head_count: int = 0
    first_token: int = 0
    token_count: int = 0
    flags: int = 0
    payload_bytes: int = 0
    layers: int = 1  # of a KV frame: ``layer`` and those after it


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of HELLO: who speaks, and everything both ends must agree on before KV may cross."""

    worker: str
    incarnation: int
    model_digest: str
    numerics_id: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    protocol_min: int = VERSION
    protocol_max: int = VERSION
    authentication: bytes = b""


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of HANDOFF: the token P drew, with everything D needs to report it as P did."""

    token_id: TokenId
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    cached_tokens: Count = 0  # prompt tokens P did not compute
    logit_digest: bytes | None = None


class Abort(msgspec.Struct, frozen=True):
    """Payload of ABORT."""

    reason: str


class Credit(msgspec.Struct, frozen=True):
    """Payload of CREDIT."""

    bytes_copied: Count


class Probe(msgspec.Struct, frozen=True):
    """Payload of PROBE: KV payload bytes sent so far, so that D knows what should have come."""

    bytes_sent: Count


T = TypeVar("T", bound=msgspec.Struct)


def encode_payload(payload: msgspec.Struct) -> bytes:
    """MessagePack of a control payload. Raises FrameError over ``MAX_CONTROL_BYTES``."""
    raw = msgspec.msgpack.encode(payload)
    if len(raw) > MAX_CONTROL_BYTES:
        raise FrameError(f"control payload of {len(raw)} bytes is over the limit of {MAX_CONTROL_BYTES}")
    return raw


_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Hello, Handoff, Abort, Credit, Probe)
}


def decode_payload(raw: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """The inverse of ``encode_payload``. Raises FrameError."""
    try:
        decoded: T = _decoders[kind].decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested too deeply
        raise FrameError(f"bad {kind.__name__} payload: {error}") from error
    return decoded


def seal(header: Header, payload: bytes | bytearray | memoryview, checksum: Checksum) -> bytes:
    """The header bytes of a frame whose payload is ``payload``. Raises FrameError where a field is out of range."""
    if len(payload) != header.payload_bytes:
        raise FrameError(f"payload of {len(payload)} bytes, header says {header.payload_bytes}")
    return seal_over(header, checksum(payload, 0), checksum)


def seal_over(header: Header, payload_checksum: int, checksum: Checksum) -> bytes:
    """``seal`` for a payload whose checksum is known, as after a copy that computed it."""
    try:
        raw = _LAYOUT.pack(
            MAGIC,
            VERSION,
            header.kind,
            header.flags,
            header.transfer,
            header.epoch,
            header.attempt,
            header.layer,
            header.layers - 1,
            header.first_head,
            header.head_count,
            header.first_token,
            header.token_count,
            header.payload_bytes,
            payload_checksum,
        )
    except struct.error as error:
        raise FrameError(f"field out of range in {header}: {error}") from error
    return raw + _CHECKSUM.pack(checksum(raw, 0))


def parse(
    raw: bytes | bytearray | memoryview, checksum: Checksum, most_kv_bytes: int = MAX_KV_BYTES
) -> tuple[Header, int]:
    """(header, checksum its payload must have). Everything is checked before it is used. Raises FrameError."""
    if len(raw) != HEADER_BYTES:
        raise FrameError(f"header of {len(raw)} bytes instead of {HEADER_BYTES}")
    (
        magic,
        version,
        kind,
        flags,
        transfer,
        epoch,
        attempt,
        layer,
        more,
        first_head,
        heads,
        first,
        count,
        size,
        payload,
    ) = _LAYOUT.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError(f"bad magic {bytes(magic)!r}")
    if version != VERSION:
        raise VersionMismatch(f"frame version {version}, this side speaks {VERSION}")
    _compare("header", checksum(bytes(raw[: _LAYOUT.size]), 0), _CHECKSUM.unpack_from(raw, _LAYOUT.size)[0])
    known = _KINDS.get(kind)
    if known is None:
        raise FrameError(f"unknown frame kind {kind}")
    limit = most_kv_bytes if known is Kind.KV else MAX_CONTROL_BYTES
    if size > limit:
        raise FrameError(f"{known.name} payload of {size} bytes is over the limit of {limit}")
    if flags & ~KNOWN_FLAGS:
        raise FrameError(f"unknown flags {flags:#x}")
    return Header(
        known, transfer, epoch, attempt, layer, first_head, heads, first, count, flags, size, 1 + more
    ), payload


def verify(payload: bytes | bytearray | memoryview, expected: int, checksum: Checksum) -> None:
    """Compare the checksum of a payload with what its header said. Raises FrameError."""
    _compare("payload", checksum(payload, 0), expected)


def _compare(part: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise FrameError(f"{part} checksum {actual:08x}, frame says {expected:08x}")
