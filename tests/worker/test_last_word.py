"""The line an agent leaves with its launcher."""

from relay.protocol.messages import ComputedRow, EngineExited
from relay.worker.last_word import MAX_ROWS, find_last_word, last_word

WORD = EngineExited(None, 11, [ComputedRow(7, 0, 2, 40), ComputedRow(8, 1, 1, 9)], False)


def test_it_is_found_among_other_output() -> None:
    lines = [
        "Fatal Python error",
        last_word(0, EngineExited(1)),
        last_word(0, WORD),
        last_word(1, EngineExited(None, 6)),
        "",
    ]
    assert find_last_word(lines, 0) == WORD
    assert find_last_word(lines, 1) == EngineExited(None, 6)
    assert find_last_word(lines, 2) is None


def test_a_line_that_was_cut_says_nothing() -> None:
    assert find_last_word([last_word(0, WORD)[:-3]], 0) is None
    assert find_last_word([], 0) is None


def test_the_line_is_bounded() -> None:
    many = EngineExited(None, 11, [ComputedRow(1 << 62, 9999, 99, 100_000)] * 5000)
    line = last_word(0, many)
    assert len(line) < 8192
    assert len(find_last_word([line], 0).manifest) == MAX_ROWS
