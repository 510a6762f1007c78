"""The choice tape: every random decision of a run, in order. The same tape gives the same run.

A tape is recorded from a seed or replayed from a file. A label goes with every choice, so that a tape that does not belong to this
program is noticed at the first choice where the two part.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from relay import __version__
from relay.errors import UsageError

FORMAT = "relay-sim-tape"
FORMAT_VERSION = 1

T = TypeVar("T")


class ForeignTape(UsageError):
    """The tape was not recorded by this program, or not by this version of it."""


class Tape:
    """Draws from ``seed`` and records, or replays ``replay`` (pairs of label and value) first."""

    def __init__(self, seed: int, replay: Sequence[tuple[str, int]] = ()) -> None:
        self.seed = seed
        self.values: list[int] = []
        self.labels: list[str] = []
        self._random = random.Random(seed).random
        self._replay = replay

    def below(self, bound: int, label: str) -> int:
        """0..bound-1."""
        position = len(self.values)
        if position < len(self._replay):
            known, value = self._replay[position]
            if known != label or not 0 <= value < bound:
                raise ForeignTape(
                    f"choice {position} of the tape is {known!r} = {value}, this run asks for {label!r} below {bound}: "
                    "the tape was recorded by another version of the program"
                )
        else:
            value = int(self._random() * bound)
        self.values.append(value)
        self.labels.append(label)
        return value

    def between(self, low: int, high: int, label: str) -> int:
        """low..high, both included."""
        return low + self.below(high - low + 1, label)

    def chance(self, per_mille: int, label: str) -> bool:
        return self.below(1000, label) < per_mille

    def of(self, items: Sequence[T], label: str) -> T:
        return items[self.below(len(items), label)]

    def save(self, path: Path, commit: str) -> None:
        """Write everything drawn so far. ``commit`` names the source it was recorded with."""
        names = list(dict.fromkeys(self.labels))
        index = {name: number for number, name in enumerate(names)}
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "relay": __version__,
            "commit": commit,
            "seed": self.seed,
            "labels": names,
            "choices": [[index[label], value] for label, value in zip(self.labels, self.values, strict=True)],
        }
        path.write_text(json.dumps(document) + "\n")


def load(path: Path) -> tuple[Tape, str]:
    """(tape, commit it was recorded with). Raises UsageError for a file that is no tape."""
    try:
        document = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"--tape {path}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"--tape {path} is no tape of `relay sim`")
    if document.get("format_version") != FORMAT_VERSION:
        raise UsageError(f"--tape {path} has format version {document.get('format_version')}, this is {FORMAT_VERSION}")
    try:
        names = document["labels"]
        replay = [(str(names[label]), int(value)) for label, value in document["choices"]]
        return Tape(int(document["seed"]), replay), str(document["commit"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"--tape {path} is damaged: {error!r}") from error
