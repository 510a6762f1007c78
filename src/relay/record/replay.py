"""Runs a recorded core again: the same events at the same times must lead to the same commands."""

import traceback
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from relay.record import codec
from relay.record.frames import Answered, BadRecording, Decided, Frame, Happened, Recording


class Player(Protocol):
    """A fresh core of one kind."""

    def play(self, frame: Happened, answers: list[msgspec.Raw]) -> list[Any]:
        """Let the core handle the event; returns its commands. ``answers``: what it asked of the outside then."""
        ...

    def stories(self) -> list[str]:
        """What the core decided so far, oldest first."""
        ...


@dataclass(slots=True)
class Difference:
    """The first event after which the two cores part. ``now`` are the commands of the core that ran again, or why it raised."""

    number: int
    now_ns: int
    event: str
    recorded: int | None  # commands; None: the recorded core did not get to say
    now: list[str]

    def __str__(self) -> str:
        recorded = "no answer" if self.recorded is None else f"{self.recorded} commands"
        at = f"event {self.number} ({self.event}, at {self.now_ns / 1e9:.6f} s)"
        return f"{at}: recorded {recorded}, now {', '.join(self.now) or 'none'}"


@dataclass(slots=True)
class Replay:
    """``unanswered``: the recording ends with an event whose commands it does not hold (its process died then)."""

    events: int = 0
    commands: int = 0
    unanswered: bool = False
    difference: Difference | None = None
    stories: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    event: Happened
    answers: list[msgspec.Raw]
    decided: Decided | None


def replay(recording: Recording, player: Player) -> Replay:
    """Feed everything to ``player``; stops at the first difference. Raises BadRecording for frames out of order."""
    result = Replay()
    for turn in _turns(recording.frames):
        result.events += 1
        raised: list[str] = []
        commands: list[Any] = []
        try:
            commands = player.play(turn.event, turn.answers)
        except BadRecording:
            raise
        except Exception as error:  # a core that raises is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            raised = [f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"]
        result.commands += len(commands)
        result.unanswered = turn.decided is None
        if turn.decided is None and not raised:
            continue
        if raised or codec.digest(commands) != turn.decided.digest:  # type: ignore[union-attr] # None only with ``raised``
            recorded = None if turn.decided is None else turn.decided.count
            names = raised or [type(command).__name__ for command in commands]
            result.difference = Difference(result.events, turn.event.now_ns, turn.event.name, recorded, names)
            break
    result.stories = player.stories()
    return result


def _turns(recorded: list[Frame]) -> list[_Turn]:
    turns: list[_Turn] = []
    for frame in recorded:
        if isinstance(frame, Happened):
            turns.append(_Turn(frame, [], None))
        elif not turns:
            raise BadRecording("the recording does not begin with an event")
        elif isinstance(frame, Answered):
            turns[-1].answers.append(frame.value)
        elif isinstance(frame, Decided):
            turns[-1].decided = frame
        else:
            raise BadRecording(f"the recording of a core holds {type(frame).__name__}")
    return turns
