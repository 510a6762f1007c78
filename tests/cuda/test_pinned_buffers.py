"""Pinned buffers of steps and draws that are used in turn, with events that only count who waits for them."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from relay.kernels.backend import Batch, SampledToken

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
draws = pytest.importorskip("relay.kernels.cuda.draws")
staging = pytest.importorskip("relay.kernels.cuda.staging")


class Event:
    made: list["Event"]

    def __init__(self, blocking: bool = False) -> None:
        self.waits = 0
        Event.made.append(self)

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture(autouse=True)
def no_device() -> Iterator[None]:
    Event.made = []
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
    ):
        yield


def waits() -> list[int]:
    return [event.waits for event in Event.made]


def test_a_pair_of_buffers_is_filled_again_when_its_last_copy_has_ended() -> None:
    pairs = staging.Staging("cpu")
    for _ in range(staging.SLOTS):
        pairs.upload(pairs.host(8)[1], 8)
    assert waits() == [0] * staging.SLOTS
    words, pair = pairs.host(5000)  # a larger buffer takes the place of the one that was copied from
    assert waits() == [1] + [0] * (staging.SLOTS - 1)
    words[:] = 7
    assert pairs.upload(pair, 5000)[:5000].eq(7).all()
    pairs.host(8)
    assert waits() == [1, 1] + [0] * (staging.SLOTS - 1)


def test_draws_that_nobody_takes_make_room() -> None:
    """A draw's buffer serves another one ``DEPTH`` draws later."""
    none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
    batches = [Batch(none, none, start, none, none[None], none) for _ in range(draws.DEPTH + 1)]
    ring = draws.Draws(2)
    for number, batch in enumerate(batches):
        ring.queue(batch, [-1], torch.tensor([[number, 0]], dtype=torch.int32), None, None)
    with pytest.raises(RuntimeError, match="not run to the end"):
        ring.take(batches[0])
    assert [ring.take(batch).tokens() for batch in batches[1:]] == [
        [SampledToken(number)] for number in range(1, draws.DEPTH + 1)
    ]
