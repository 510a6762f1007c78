"""Rank 0's calls as messages to the others: the same ``Backend`` calls, in the same order, and nothing else.

A stream socket, MessagePack, 8 bytes of length before each message. ``failed`` in every call is how many calls rank 0 has failed
so far; a rank that counts otherwise ends, because from there on their states differ.
"""

import socket
import struct

import msgspec
import numpy as np

from relay.kernels.backend import Batch
from relay.protocol.sampling import SamplingParams

_LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 28


class LinkEnded(Exception):
    """The other end has closed, or died."""


class Call(msgspec.Struct, tag_field="call", omit_defaults=True, kw_only=True):
    """Base of all calls."""

    failed: int = 0


class Allocate(Call, tag="allocate"):
    num_blocks: int
    block_size: int
    dtype: str
    pool_bytes: list[int]  # of every rank; pools lie one after the other


class Bind(Call, tag="bind"):
    slot: int
    params: SamplingParams
    choice: int
    prompt_ids: list[int]
    output_ids: list[int]


class Release(Call, tag="release"):
    slot: int


class CopyBlock(Call, tag="copy"):
    source: int
    target: int


class Run(Call, tag="run"):
    """``batch`` None: that of the call before. ``number`` names the batch."""

    start: int
    stop: int
    number: int
    batch: list[bytes] | None = None
    max_blocks: int = 0


class Sample(Call, tag="sample"):
    """From the batch of this number: with work queued on devices it need not be the newest."""

    number: int


class Connect(Call, tag="connect"):
    """What names the area of every rank, once all have loaded; empty where they share memory."""

    handles: list[bytes]


class Fit(Call, tag="fit"):
    """Asks how many KV blocks fit; the answer is ``Fits``."""

    block_size: int
    fraction: float


class WarmUp(Call, tag="warm_up"):
    longest: int


class Close(Call, tag="close"):
    pass


AnyCall = Allocate | Bind | Release | CopyBlock | Run | Sample | Connect | Fit | WarmUp | Close


class Loaded(msgspec.Struct, tag="loaded"):
    """A rank's answer once its weights are bound."""

    numerics: dict[str, str]
    handle: bytes = b""


class Fits(msgspec.Struct, tag="fits"):
    num_blocks: int


class Allocated(msgspec.Struct, tag="allocated"):
    """A rank's answer to ``Allocate``: what names its pool where rank 0 must map it."""

    handle: bytes = b""


class CannotStart(msgspec.Struct, tag="cannot"):
    """A rank's answer instead of ``Loaded``, ``Fits`` or ``Allocated``: the line for the user and its exit code."""

    reason: str
    exit_code: int


Answer = Loaded | Allocated | CannotStart | Fits

_ARRAYS = ("token_ids", "positions", "row_starts", "slots", "block_tables", "sampled_rows")
_encoder = msgspec.msgpack.Encoder()
_calls: "msgspec.msgpack.Decoder[AnyCall]" = msgspec.msgpack.Decoder(AnyCall)
_answers: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Answer)


def pack_batch(batch: Batch) -> list[bytes]:
    return [np.ascontiguousarray(getattr(batch, name), np.int32).tobytes() for name in _ARRAYS]


def unpack_batch(arrays: list[bytes], max_blocks: int) -> Batch:
    """The inverse of ``pack_batch``; never captures, since rank 0 alone is asked for logits."""
    ids, positions, row_starts, slots, tables, sampled = (np.frombuffer(raw, np.int32) for raw in arrays)
    return Batch(ids, positions, row_starts, slots, tables.reshape(-1, max_blocks), sampled)


def encode(message: Call | Answer) -> bytes:
    raw = _encoder.encode(message)
    return _LENGTH.pack(len(raw)) + raw


def send(link: socket.socket, message: bytes) -> None:
    """Raises LinkEnded."""
    try:
        link.sendall(message)
    except OSError as error:
        raise LinkEnded(str(error)) from error


def receive_call(link: socket.socket) -> AnyCall:
    """Raises LinkEnded."""
    return _calls.decode(_receive(link))


def receive_answer(link: socket.socket) -> Answer:
    """Raises LinkEnded."""
    return _answers.decode(_receive(link))


def _receive(link: socket.socket) -> bytearray:
    (size,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if size > MAX_BYTES:
        raise LinkEnded(f"a message of {size} bytes")
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = link.recv_into(view)
        except OSError as error:
            raise LinkEnded(str(error)) from error
        if not count:
            raise LinkEnded("it has closed the connection")
        view = view[count:]
    return data
