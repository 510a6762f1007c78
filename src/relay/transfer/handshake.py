"""The hello check of a KV connection: both ends refuse a peer whose KV would not mean the same bits."""

from typing import NoReturn

from relay.transfer.channel import Channel, read_frame, send_frame
from relay.transfer.contract import Identity
from relay.transfer.frame import (
    Abort,
    Checksum,
    FrameError,
    Header,
    Hello,
    Kind,
    VersionMismatch,
    decode_payload,
    encode_payload,
)

HANDSHAKE_TIMEOUT_S = 3.0
MAX_SHOWN = 100


class HelloRefused(Exception):
    """One side does not accept the other; the text names both fingerprints."""


def mismatch(ours: Hello, theirs: Hello) -> str:
    """Why KV must not cross between these two, or an empty string."""
    if theirs.protocol_min > ours.protocol_max or theirs.protocol_max < ours.protocol_min:
        return (
            f"protocol {ours.protocol_min}..{ours.protocol_max} here, "
            f"{theirs.protocol_min}..{theirs.protocol_max} at {_shown(theirs.worker)}"
        )
    for name in ("model_digest", "numerics_id", "num_layers", "num_kv_heads", "head_dim", "dtype"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} {_shown(mine)} here, {_shown(other)} at {_shown(theirs.worker)}"
    return ""


def _shown(said: object) -> str:
    """Fit for a line of a log, whatever a peer said."""
    text = ascii(str(said))[1:-1]
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def greet(channel: Channel, identity: Identity, checksum: Checksum, target: str, incarnation: int) -> None:
    """P's side: say hello, check the answer and that it is this life of ``target``.

    Raises HelloRefused, ChannelClosed, FrameError.
    """
    _send_hello(channel, identity, checksum)
    header, payload, _ = read_frame(channel, checksum)
    if header.kind is Kind.ABORT:
        raise HelloRefused(decode_payload(payload, Abort).reason)
    theirs = _hello(header, payload)
    problem = mismatch(identity.hello(), theirs)
    if problem:
        raise HelloRefused(problem)
    if (theirs.worker, theirs.incarnation) != (target, incarnation):
        raise HelloRefused(f"{theirs.worker} incarnation {theirs.incarnation} answered for {target} {incarnation}")


def welcome(channel: Channel, identity: Identity, checksum: Checksum) -> Hello:
    """D's side: check the hello and answer it. Raises HelloRefused (the peer was told), ChannelClosed, FrameError."""
    try:
        header, payload, _ = read_frame(channel, checksum)
    except VersionMismatch as error:  # the version is where it ever was: the peer reads ours in this answer
        _refuse(channel, str(error), checksum)
    theirs = _hello(header, payload)
    problem = mismatch(identity.hello(), theirs)
    if problem:
        _refuse(channel, problem, checksum)
    _send_hello(channel, identity, checksum)
    return theirs


def _refuse(channel: Channel, reason: str, checksum: Checksum) -> NoReturn:
    payload = encode_payload(Abort(reason))
    send_frame(channel, Header(Kind.ABORT, payload_bytes=len(payload)), payload, checksum)
    raise HelloRefused(reason)


def _send_hello(channel: Channel, identity: Identity, checksum: Checksum) -> None:
    payload = encode_payload(identity.hello())
    header = Header(Kind.HELLO, epoch=identity.incarnation, payload_bytes=len(payload))
    send_frame(channel, header, payload, checksum)


def _hello(header: Header, payload: memoryview) -> Hello:
    if header.kind is not Kind.HELLO:
        raise FrameError(f"{header.kind.name} before HELLO")
    return decode_payload(payload, Hello)
