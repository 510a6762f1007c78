"""Writes the recording of one core while it runs."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from relay.errors import UsageError
from relay.record import codec, frames

MAX_BYTES = 256 << 20
SPARE_BYTES = 4096  # room for End
PRIVATE = 0o600
logger = logging.getLogger("relay.record")


class Writer:
    """One file, written as a core runs: ``happened`` before it handles an event, ``decided`` after.

    An event is on disk before it is handled, so a core that dies of it leaves it there. The file holds prompts and tokens and
    is readable by its owner only. At ``max_bytes`` the recording ends, and says so; it also ends, with a line in the log, when
    the disk does not take it: recording never stops service.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Raises UsageError if there can be no such file."""
        self.path = path
        self._left = max_bytes - SPARE_BYTES
        self._pending = b""
        self._content = frames.Content()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE)
        except OSError as error:
            raise UsageError(f"cannot record to {path}: {error.strerror or error}") from error

    @property
    def recording(self) -> bool:
        return self._file is not None

    def begin(self, head: frames.Head) -> None:
        self._pending = frames.opening(head)

    def happened(self, frame: frames.Happened) -> None:
        if self._file is not None:
            self._write(frames.encode(frame))

    def decided(self, commands: list[Any]) -> None:
        if self._file is not None:
            self._pending += frames.encode(frames.Decided(len(commands), codec.digest(commands)))

    def answering(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """``ask``, whose answers are recorded."""

        def asked(*arguments: Any) -> Any:
            answer = ask(*arguments)
            if self._file is not None:
                self._pending += frames.encode(frames.Answered(msgspec.Raw(codec.encode(answer))))
            return answer

        return asked

    def choices(self, drawn: Iterable[frames.Choices]) -> None:
        for frame in drawn:
            if self._file is not None:
                self._write(frames.encode(frame))

    def close(self, reason: str = "closed") -> None:
        """Idempotent."""
        if self._file is not None:
            self._end(reason)

    def _write(self, data: bytes) -> None:
        data = self._pending + data
        self._pending = b""
        self._left -= len(data)
        if self._left < 0:
            self._end("size limit")
            logger.warning("%s is full: recording ends", self.path)
            return
        self._put(data)

    def _end(self, reason: str) -> None:
        pending, self._pending = self._pending, b""
        self._put(pending)
        self._put(frames.encode(self._content.end(reason)))
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _put(self, data: bytes) -> None:
        file = self._file
        self._content.add(data)
        view = memoryview(data)
        try:
            while file is not None and view:
                view = view[os.write(file, view) :]
        except OSError as error:
            logger.error("recording to %s ends: %s", self.path, error)
            self._file = None
            assert file is not None
            os.close(file)
