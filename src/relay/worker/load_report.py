"""How a load of weights tells that it goes on: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from relay.models.pack import Pack
from relay.models.progress import BarProgress

REPORT_S = 5.0  # between lines about a long load


class LoadReport:
    """``moved`` is told of bytes as they leave for the device; the bar ends with the last of ``total``."""

    def __init__(
        self,
        label: str,
        total: int,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total = label, total
        self._stream = sys.stderr if stream is None else stream
        self._now_s = now_s
        self._bytes = 0
        self._start_s = self._said_s = now_s()
        self._bar = BarProgress(self._stream) if self._stream.isatty() else None

    def moved(self, count: int) -> None:
        if self._bar is not None and self._bytes == 0:
            self._bar.start(self._label, self._total)
        self._bytes += count
        if self._bar is not None:
            self._bar.advance(count)
            if self._bytes >= self._total:
                self._bar.finish()
            return
        now_s = self._now_s()
        if now_s - self._said_s >= REPORT_S:
            self._said_s = now_s
            rate = self._bytes / (now_s - self._start_s) / 1e9
            done = f"{self._bytes / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate:.1f} GB/s"
            print(f"{self._label}: {done}", file=self._stream, flush=True)


def report_for(worker: str, pack_path: str, device: str) -> LoadReport:
    """Of the matrices of the pack at ``pack_path``."""
    total = sum(rows.num_bytes for rows in Pack(Path(pack_path)).matrices())
    return LoadReport(f"{worker}: weights to {device}", total)
