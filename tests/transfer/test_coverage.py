"""Runs of tokens against a plain array of (token, head)."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.transfer.coverage import mask_of, nothing, with_range

TOKENS, HEADS = 12, 3

ranges = st.tuples(
    st.integers(0, TOKENS - 1), st.integers(1, TOKENS), st.integers(0, HEADS - 1), st.integers(1, HEADS)
).map(lambda one: (one[0], min(TOKENS, one[0] + one[1]), one[2], min(HEADS - one[2], one[3])))


@given(st.lists(ranges, max_size=12))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_runs_say_what_an_array_says(added):
    runs, want = nothing(TOKENS), np.zeros((TOKENS, HEADS), bool)
    for first, stop, head, heads in added:
        runs = with_range(runs, first, stop, mask_of((head, heads)))
        want[first:stop, head : head + heads] = True
        found = np.zeros_like(want)
        start = 0
        for end, has in runs:
            assert end > start
            found[start:end] = [has >> number & 1 for number in range(HEADS)]
            start = end
        assert start == TOKENS
        assert np.array_equal(found, want)
        assert all(one[1] != other[1] for one, other in itertools.pairwise(runs)), "a layer that is full is one run"


def test_all_that_came_in_any_order_is_one_run():
    whole = ((TOKENS, mask_of((0, HEADS))),)
    runs = nothing(TOKENS)
    for first in (8, 0, 4):
        assert runs != whole
        runs = with_range(runs, first, first + 4, mask_of((0, HEADS)))
    assert runs == whole
