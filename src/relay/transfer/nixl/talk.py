"""What an engine, its agent process and its peer tell each other to join two agents: MessagePack, a message each.

Engine and agent process talk over a Unix socket that keeps messages apart; two engines over their connection, with the length
before each message, after the hellos and before anything moves through NIXL.
"""

import socket
import struct
from typing import TypeVar

import msgspec

from relay.transfer.channel import ChannelClosed
from relay.transfer.frame import MAX_CONTROL_BYTES, FrameError
from relay.transfer.stream import StreamChannel

_LENGTH = struct.Struct("<I")


class Lane(msgspec.Struct, frozen=True, tag=True):
    """P → D: what this connection is for. Without ``ring_bytes`` it carries control frames, as any stream."""

    ring_bytes: int = 0


class Offer(msgspec.Struct, frozen=True, tag=True):
    """An agent's metadata, and where its region lies in its own memory."""

    metadata: bytes
    address: int


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This side's agent knows the other."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This side cannot go on."""

    reason: str


Message = Lane | Offer | Joined | Failed
M = TypeVar("M", Lane, Offer, Joined)

_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(raw: bytes | memoryview, kind: type[M]) -> M:
    """Raises FrameError for anything but a message of that kind, ChannelClosed for Failed."""
    try:
        message = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested too deeply
        raise FrameError(f"bad message while joining NIXL agents: {error}") from error
    if isinstance(message, Failed):
        raise ChannelClosed(f"NIXL at the other end: {message.reason}")
    if not isinstance(message, kind):
        raise FrameError(f"{type(message).__name__} instead of {kind.__name__} while joining NIXL agents")
    return message


def say(stream: StreamChannel, message: Message) -> None:
    """Raises ChannelClosed."""
    raw = encode(message)
    try:
        stream.socket.sendall(_LENGTH.pack(len(raw)) + raw)
    except OSError as error:
        raise ChannelClosed(f"{stream.peer}: {error}") from error


def hear(stream: StreamChannel, kind: type[M]) -> M:
    """Raises ChannelClosed, FrameError."""
    size = _LENGTH.unpack(stream.receive_payload(_LENGTH.size))[0]
    if size > MAX_CONTROL_BYTES:
        raise FrameError(f"message of {size} bytes while joining NIXL agents")
    return decode(stream.receive_payload(size), kind)


def tell(control: socket.socket, message: Message) -> None:
    """To the other end of an agent process's socket. Raises ChannelClosed."""
    try:
        control.sendall(encode(message))
    except OSError as error:
        raise ChannelClosed(f"NIXL agent process: {error}") from error


def listen(control: socket.socket, kind: type[M]) -> M:
    """Raises ChannelClosed when the other end is gone, FrameError."""
    try:
        raw = control.recv(MAX_CONTROL_BYTES)
    except OSError as error:
        raise ChannelClosed(f"NIXL agent process: {error}") from error
    if not raw:
        raise ChannelClosed("the NIXL agent process has ended")
    return decode(raw, kind)
