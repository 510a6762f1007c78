"""The line an agent leaves with its launcher."""

from relay.protocol.messages import ComputedRow, EngineExited
from relay.worker.last_word import MAX_ROWS, ended_by_itself, find_last_word, last_word

WORD = EngineExited(None, 11, [ComputedRow(7, 0, 2, 40), ComputedRow(8, 1, 1, 9)], False)


def test_it_is_found_among_other_output() -> None:
    lines = [
        "Fatal Python error",
        last_word(EngineExited(1)),
        last_word(WORD),
        "",
    ]
    assert find_last_word(lines) == WORD


def test_a_line_that_was_cut_says_nothing() -> None:
    assert find_last_word([last_word(WORD)[:-3]]) is None
    assert find_last_word([]) is None


def test_the_line_is_bounded() -> None:
    many = EngineExited(None, 11, [ComputedRow(1 << 62, 9999, 99, 100_000)] * 5000)
    line = last_word(many)
    assert len(line) < 8192
    assert len(find_last_word([line]).manifest) == MAX_ROWS


def test_only_a_crash_leaves_one() -> None:
    """An engine that was drained may still name the rows of its last step."""
    rows = [ComputedRow(7, 0, 2, 40)]
    assert ended_by_itself(EngineExited(None, 11, rows, False))
    assert ended_by_itself(EngineExited(3, None, rows, False))
    assert not ended_by_itself(EngineExited(0, None, rows, False))
    assert not ended_by_itself(EngineExited(None, 9, rows, False))
    assert not ended_by_itself(EngineExited(None, 15, rows, False))
    assert not ended_by_itself(EngineExited(None, 11, [], False))
