"""The choice tape: every random decision of a run. The same tape gives the same run.

A tape has one *stream* of choices for each source of them (the swarm, the plan, every request, every fault, every engine, the
rest), drawn independently from the seed. So a fault that is left out takes no choice away from another fault, which is what makes a
tape editable: ``Edits`` say which faults and requests do not happen, and which choices are fixed by their label. Shrinking and
directed runs are edits.

On disk a tape is a recording of kind "sim" (``record/frames.py``): seed and edits in the head, one frame a stream. A label goes
with every choice, so that a tape that does not belong to this program is noticed at the first choice where the two part.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from relay.record import codec, frames
from relay.record.frames import BadRecording, Recording

T = TypeVar("T")

REST = "rest"  # the stream of whatever has none of its own
Choice = tuple[str, int]  # label, value


class ForeignTape(BadRecording):
    """The tape was not recorded by this version of the program."""


class Edits(msgspec.Struct, frozen=True):
    """How a run differs from what its seed alone gives."""

    without: tuple[str, ...] = ()  # "fault 3", "request 7"
    fixed: dict[str, int] = {}  # label → value of every choice of that label (or the largest possible)
    directed: tuple[str, str] | None = (
        None  # (fault, moment): no other fault; this one as soon as a request is in the moment
    )

    def __bool__(self) -> bool:
        return bool(self.without or self.fixed or self.directed)


class TapeSettings(msgspec.Struct, frozen=True):
    """The head of a tape."""

    seed: int
    edits: Edits
    mutant: str = ""  # the planted bug it was recorded with


class _Stream:
    __slots__ = ("drawn", "name", "position", "random", "replay")

    def __init__(self, name: str, seed: int, replay: Sequence[Choice]) -> None:
        self.name = name
        self.random = random.Random(f"{seed}/{name}").random
        self.replay = replay
        self.position = 0
        self.drawn: list[Choice] = []


class Tape:
    """Draws from ``seed``, or what ``replay`` holds for each stream first. ``keep``: remember everything drawn, for ``save``."""

    def __init__(
        self,
        seed: int,
        edits: Edits | None = None,
        replay: Mapping[str, Sequence[Choice]] | None = None,
        *,
        keep: bool = False,
        mutant: str = "",
    ) -> None:
        self.seed = seed
        self.edits = edits or Edits()
        self.mutant = mutant
        self._replay = replay or {}
        self._keep = keep
        self._plain = not (self._replay or self.edits.fixed or keep)
        self._streams: dict[str, _Stream] = {}
        self._current = self._stream(REST)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Choices inside come from the stream ``name``."""
        outer, self._current = self._current, self._stream(name)
        try:
            yield
        finally:
            self._current = outer

    def below(self, bound: int, label: str) -> int:
        """0..bound-1."""
        if self._plain:
            return int(self._current.random() * bound)
        stream = self._current
        value = int(stream.random() * bound)
        if stream.position < len(stream.replay):
            known, value = stream.replay[stream.position]
            if known != label or not 0 <= value < bound:
                raise ForeignTape(
                    f"choice {stream.position} of {stream.name!r} on the tape is {known!r} = {value}, this run asks for "
                    f"{label!r} below {bound}: the tape was recorded by another version of the program"
                )
        elif label in self.edits.fixed:
            value = min(self.edits.fixed[label], bound - 1)
        stream.position += 1
        if self._keep:
            stream.drawn.append((label, value))
        return value

    def between(self, low: int, high: int, label: str) -> int:
        """low..high, both included."""
        return low + self.below(high - low + 1, label)

    def chance(self, per_mille: int, label: str) -> bool:
        return self.below(1000, label) < per_mille

    def of(self, items: Sequence[T], label: str) -> T:
        return items[self.below(len(items), label)]

    @property
    def unused(self) -> int:
        """How many choices on the tape nobody has asked for."""
        asked = {name: stream.position for name, stream in self._streams.items()}
        return sum(max(0, len(choices) - asked.get(name, 0)) for name, choices in self._replay.items())

    @property
    def drawn(self) -> dict[str, list[Choice]]:
        """Everything drawn so far by stream; empty without ``keep``."""
        return {name: stream.drawn for name, stream in self._streams.items() if stream.drawn}

    def save(self, path: Path, commit: str) -> None:
        """Write everything drawn so far. ``commit`` names the source it was recorded with. Raises BadRecording."""
        try:
            path.write_bytes(self._encoded(commit))
        except OSError as error:
            raise BadRecording(f"cannot write {path}: {error.strerror or error}") from error

    def save_new(self, path: Path, commit: str) -> Path:
        """The same, but never over another file: returns where it was written, "x.tape", "x-2.tape", … Raises BadRecording."""
        number, free = 1, path
        while free.exists() or free.is_symlink():
            number += 1
            free = path.with_stem(f"{path.stem}-{number}")
        self.save(free, commit)
        return free

    def _encoded(self, commit: str) -> bytes:
        settings = codec.encode(TapeSettings(self.seed, self.edits, self.mutant))
        parts: list[frames.Frame] = []
        for name, choices in self.drawn.items():
            labels = list(dict.fromkeys(label for label, _ in choices))
            index = {label: number for number, label in enumerate(labels)}
            parts.append(frames.Choices(name, labels, [(index[label], value) for label, value in choices]))
        return frames.whole(frames.head("sim", f"seed {self.seed}", commit, settings), parts)

    def _stream(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(name, self.seed, self._replay.get(name, ()))
        return stream


def tape_of(recording: Recording) -> Tape:
    """The tape in a recording of kind "sim". Raises BadRecording."""
    path = recording.path
    if recording.head.kind != "sim":
        raise BadRecording(
            f"{path} is the recording of a {recording.head.kind}, not a tape of `relay sim`; use `relay replay`"
        )
    if recording.ended is None:
        raise BadRecording(f"{path} was cut off: a tape is played whole or not at all")
    replay: dict[str, list[Choice]] = {}
    try:
        settings = msgspec.msgpack.decode(recording.head.settings, type=TapeSettings)
        for frame in recording.frames:
            if not isinstance(frame, frames.Choices):
                raise BadRecording(f"{path} is damaged: a tape holds no {type(frame).__name__}")
            replay[frame.stream] = [(frame.labels[label], value) for label, value in frame.drawn]
    except (msgspec.MsgspecError, RecursionError, IndexError) as error:
        raise BadRecording(f"{path} is damaged: {error}") from error
    return Tape(settings.seed, settings.edits, replay, keep=True, mutant=settings.mutant)
