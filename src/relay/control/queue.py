"""Choices that wait for a place: resumed ones first, then in order of arrival."""

from collections.abc import Iterator
from itertools import chain

from relay.control.requests import Choice


class WaitQueue:
    """Two ordered sets and the number of tokens in each. Bounds are enforced at admission; resumed choices always fit."""

    def __init__(self) -> None:
        self._resumed: dict[Choice, int] = {}
        self._new: dict[Choice, int] = {}
        self.num_new_tokens = 0

    def add_new(self, choice: Choice) -> None:
        self._new[choice] = choice.num_tokens
        self.num_new_tokens += choice.num_tokens

    def add_resumed(self, choice: Choice) -> None:
        """A choice that had a place before."""
        self._resumed[choice] = choice.num_tokens

    def remove(self, choice: Choice) -> None:
        if self._resumed.pop(choice, None) is None:
            self.num_new_tokens -= self._new.pop(choice, 0)

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)

    def __iter__(self) -> Iterator[Choice]:
        """In order of service. Do not change the queue while iterating."""
        return chain(self._resumed, self._new)

    def __contains__(self, choice: object) -> bool:
        return choice in self._resumed or choice in self._new

    @property
    def num_new(self) -> int:
        return len(self._new)
