"""What a running server says on stderr. A reader that is slow, stuck or gone must not stop it, nor may its signals fail to work."""

import logging
import os
import threading
from collections import deque

MAX_LINES = 4096


class Console(logging.Handler):
    """Lines are written by a thread of its own, in order; ``say`` never blocks and never raises.

    Beyond ``MAX_LINES`` unwritten ones new lines are dropped, and their number is said once there is room again. After the reader
    is gone everything is dropped: there is nobody to tell.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        with self._change:
            if len(self._lines) >= MAX_LINES:
                self._dropped += 1
                return
            if self._dropped:
                self._lines.append(f"({self._dropped} lines dropped: nobody read them)")
                self._dropped = 0
            self._lines.append(line)
            self._change.notify()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self.format(record))

    def finish(self, timeout_s: float) -> None:
        """Write what is left, for at most ``timeout_s``."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(timeout_s)

    def _write(self) -> None:
        gone = False
        while True:
            with self._change:
                while not self._lines and not self._closed:
                    self._change.wait()
                if not self._lines:
                    return
                text = "".join(f"{line}\n" for line in self._lines)
                self._lines.clear()
            gone = gone or not self._write_all(text.encode(errors="replace"))

    def _write_all(self, data: bytes) -> bool:
        """False: the reader is gone."""
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return False
        return True
