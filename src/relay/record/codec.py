"""Events of a core to frames and back, and digests of its commands."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, get_args

import msgspec
import numpy as np

from relay.record.frames import BadRecording, Happened

DIGEST_BYTES = 8


def _plain(value: Any) -> Any:
    """What MessagePack does not know."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be recorded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def digest(commands: Iterable[object]) -> bytes:
    """Equal for equal commands, in any process."""
    named = [(type(command).__name__, command) for command in commands]
    return blake2b(_encoder.encode(named), digest_size=DIGEST_BYTES).digest()


class EventCodec:
    """For the members of the union ``events``, told apart by their names, which must differ.

    ``narrowed``: types to decode some of them as, with the same fields in a more exact type; instances become the event's own.
    """

    def __init__(self, events: Any, narrowed: Mapping[type, type] | None = None) -> None:
        types: tuple[type, ...] = get_args(events)
        self._narrowed = {kind.__name__: kind for kind in narrowed or {}}
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
            kind.__name__: msgspec.msgpack.Decoder((narrowed or {}).get(kind, kind)) for kind in types
        }
        if len(self._decoders) != len(types):
            raise ValueError("two events have the same name")

    def frame(self, now_ns: int, event: object) -> Happened:
        return Happened(now_ns, type(event).__name__, msgspec.Raw(encode(event)))

    def event(self, frame: Happened) -> Any:
        """Raises BadRecording for an event that this version of the program does not have."""
        decoder = self._decoders.get(frame.name)
        if decoder is None:
            raise BadRecording(f"the recording has an event {frame.name!r}, which this version does not know")
        try:
            event = decoder.decode(frame.event)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRecording(
                f"an event {frame.name!r} of the recording does not fit this version: {error}"
            ) from error
        own = self._narrowed.get(frame.name)
        return event if own is None else own(*[getattr(event, name) for name in event.__struct_fields__])
