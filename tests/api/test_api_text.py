"""Stop strings and the text path: independent of token borders and of how tokens are grouped."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relay.api.text import TextPath


class _Letters:
    """A decoder whose token i is the i-th piece of a text."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def step(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._tail


def _cut(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted({border for border in borders if 0 < border < len(text)}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete wins, the longest of those complete together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


_small = st.text("ab\n", max_size=30)


@settings(max_examples=600, deadline=None)
@given(
    text=_small,
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3),
    borders=st.lists(st.integers(0, 30)),
    groups=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
@example(text="abab", stops=["bab", "ab"], borders=[2], groups=[], include=False)
@example(text="aab", stops=["ab"], borders=[1, 2], groups=[1, 2], include=False)
def test_any_borders_and_groups_give_the_reference(
    text: str, stops: list[str], borders: list[int], groups: list[int], include: bool
) -> None:
    pieces = _cut(text, borders)
    path = TextPath(_Letters(pieces), stops, include_stop=include)
    edges = [0, *sorted({group for group in groups if 0 < group < len(pieces)}), len(pieces)]
    want, matched = _reference(text, stops, include)
    shown = ""
    for a, b in pairwise(edges):
        shown += path.push(range(a, b), last=b == len(pieces))
        assert want.startswith(shown)  # nothing shown is ever taken back
        if path.stop_matched is not None:
            break
    assert shown == want
    assert path.stop_matched == matched
    if matched is not None:  # tokens up to the one that completed the match are counted, no overshoot
        complete = len(want) if include else len(want) + len(matched)
        assert len("".join(pieces[: path.num_tokens - 1])) < complete <= len("".join(pieces[: path.num_tokens]))


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abcd", min_size=4, max_size=30),
    start=st.integers(0, 20),
    size=st.integers(1, 6),
    borders=st.lists(st.integers(1, 30)),
)
def test_one_stop_cuts_at_find(text: str, start: int, size: int, borders: list[int]) -> None:
    stop = text[start : start + size]
    if not stop:
        return
    pieces = _cut(text, borders)
    path = TextPath(_Letters(pieces), [stop])
    assert path.push(range(len(pieces)), last=True) == text[: text.find(stop)]


def test_only_what_could_begin_a_stop_is_held_back() -> None:
    path = TextPath(_Letters(["hello w", "or", "k", "!"]), ["world"])
    assert path.push([0]) == "hello "
    assert path.push([1]) == ""
    assert path.push([2]) == "work"
    assert path.push([3], last=True) == "!"


def test_held_text_is_shown_at_the_end() -> None:
    path = TextPath(_Letters(["ab", "c"]), ["abcd"])
    assert path.push([0]) == ""
    assert path.push([1], last=True) == "abc"
    assert path.num_tokens == 2


def test_flushed_character_may_complete_a_stop() -> None:
    path = TextPath(_Letters(["ab", ""], tail="\ufffd"), ["b\ufffd"])
    assert path.push([0, 1], last=True) == "a"
    assert path.stop_matched == "b\ufffd"


def test_min_tokens_lets_earlier_matches_pass() -> None:
    pieces = ["ab", "ab", "x", "ab"]
    assert TextPath(_Letters(pieces), ["ab"], min_tokens=2).push(range(4), last=True) == "ababx"
    assert TextPath(_Letters(["aab", "b"]), ["bb"], min_tokens=1).push(range(2), last=True) == "aa"


def test_hidden_tokens_are_counted_and_not_shown() -> None:
    path = TextPath(_Letters(["a", "b"]), hidden=frozenset({1}))
    assert path.push([0, 1], last=True) == "a"
    assert path.num_tokens == 2


def test_offsets_count_decoded_characters() -> None:
    path = TextPath(_Letters(["ab", "", "é", "c"]), offsets=True)
    path.push(range(4), last=True)
    assert path.offsets == [0, 2, 2, 3]


@pytest.mark.parametrize("include", [False, True])
def test_tokens_after_a_match_change_nothing(include: bool) -> None:
    path = TextPath(_Letters(["a!", "b", "c"]), ["!"], include_stop=include)
    assert path.push([0, 1]) == ("a!" if include else "a")
    assert path.push([2], last=True) == ""
    assert path.num_tokens == 1
