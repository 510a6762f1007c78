"""What a long load says, and where."""

import io

from relay.worker.load_report import LoadReport


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_a_line_every_few_seconds():
    now, stream = [0.0], io.StringIO()
    report = LoadReport("p0: weights to cuda:0", 16_000_000_000, stream, lambda: now[0])
    for _ in range(4):
        now[0] += 2.0
        report.moved(2_000_000_000)
    assert stream.getvalue() == "p0: weights to cuda:0: 6.0 of 16.0 GB, 1.0 GB/s\n"


def test_a_short_load_says_nothing():
    stream = io.StringIO()
    LoadReport("p0", 100, stream, lambda: 0.0).moved(100)
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_that_ends_with_the_last_byte():
    stream = Terminal()
    report = LoadReport("p0: weights", 100, stream, lambda: 0.0)
    report.moved(60)
    assert report._bar._bar is not None
    report.moved(40)
    assert report._bar._bar is None
    assert "p0: weights" in stream.getvalue()
    assert "100%" in stream.getvalue()
