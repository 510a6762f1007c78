"""How a long pull or packing tells that it goes on."""

import sys
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """One bar at a time: ``start``, ``advance`` any number of times, ``finish``."""

    def start(self, label: str, total: int) -> None:
        """``total`` in the unit of ``advance``; 0 if it is not known."""
        ...

    def advance(self, amount: int) -> None: ...

    def finish(self) -> None: ...


class NoProgress:
    """Says nothing."""

    def start(self, label: str, total: int) -> None:
        return

    def advance(self, amount: int) -> None:
        return

    def finish(self) -> None:
        return


class LineProgress:
    """One line at the start and one for every full tenth: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._total = 0
        self._done = 0
        self._tenths = 0

    def start(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._tenths = label, total, 0, 0
        self._say(f"{label} …")

    def advance(self, amount: int) -> None:
        self._done += amount
        tenths = min(10, self._done * 10 // self._total) if self._total else 0
        if tenths > self._tenths:
            self._tenths = tenths
            self._say(f"{self._label} {tenths * 10} %")

    def finish(self) -> None:
        if self._tenths < 10:
            self._say(f"{self._label} done")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class BarProgress:
    """A rich bar on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None
        self._task: Any = None

    def start(self, label: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=Console(file=self._stream))
        self._bar.start()
        self._task = self._bar.add_task(label, total=total or None)

    def advance(self, amount: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, amount)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def console_progress(stream: TextIO | None = None) -> Progress:
    """Bars on a terminal, lines elsewhere; on standard error unless ``stream`` is given."""
    stream = sys.stderr if stream is None else stream
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)
