"""Progress on a terminal and elsewhere."""

import io

from relay.models.progress import BarProgress, LineProgress, console_progress


def test_one_line_for_every_tenth() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.start("packing x", 1000)
    for _ in range(1000):
        progress.advance(1)
    progress.finish()
    lines = stream.getvalue().splitlines()
    assert lines == ["packing x …", *(f"packing x {10 * i} %" for i in range(1, 11))]


def test_unknown_total_says_start_and_end() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.start("fetching", 0)
    progress.advance(5)
    progress.finish()
    assert stream.getvalue().splitlines() == ["fetching …", "fetching done"]


def test_bars_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(console_progress(io.StringIO()), LineProgress)
    terminal = Terminal()
    progress = console_progress(terminal)
    assert isinstance(progress, BarProgress)
    progress.start("packing", 10)
    progress.advance(10)
    progress.finish()
    assert "packing" in terminal.getvalue()
