"""Which event a read of the cache waits for, with events that only know when they were recorded."""

from unittest import mock

import numpy as np
import pytest

from relay.kernels.backend import Batch
from relay.kernels.kv_frames import KvRange

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
written = pytest.importorskip("relay.kernels.cuda.written")


class Event:
    clock = 0

    def record(self) -> None:
        Event.clock += 1
        self.at = Event.clock


def batch(first: int, count: int, blocks: list[int]) -> Batch:
    return Batch(
        token_ids=np.zeros(count, np.int32),
        positions=np.arange(first, first + count, dtype=np.int32),
        row_starts=np.array([0, count], np.int32),
        slots=np.zeros(1, np.int32),
        block_tables=np.array([blocks], np.int32),
        sampled_rows=np.zeros(0, np.int32),
    )


def of(events, layer: int, table: np.ndarray, first: int, count: int, layers: int = 1) -> list[Event]:
    return events.of([KvRange(layer, layers, first, count, table)])


def times(events: list[Event]) -> list[int]:
    return [event.at for event in events]


def test_a_read_waits_for_the_step_that_wrote_its_blocks() -> None:
    with mock.patch.object(torch.cuda, "Event", Event):
        Event.clock = 0
        events = written.LayerEvents((3, 7), num_blocks=8, block_size=16)
        mine, other = np.array([1, 2]), np.array([5])
        assert of(events, 0, mine, 0, 20) == []
        events.begin(batch(0, 20, [1, 2]))
        events.ran(0, 3)  # layer 0 at time 1
        events.ran(3, 9)  # layer 1 at time 2
        events.begin(batch(0, 16, [5]))
        events.ran(0, 9)  # both at time 3
        assert times(of(events, 0, mine, 0, 20)) == [1]
        assert times(of(events, 1, mine, 0, 20)) == [2]
        assert times(of(events, 1, other, 0, 16)) == [3]
        assert times(of(events, 0, mine, 0, 20, layers=2)) == [2], "of several layers the last"
        both = [KvRange(0, 1, 0, 16, other), KvRange(0, 2, 0, 20, mine)]
        assert times(events.of(both)) == times(events.of(both[::-1])) == [3], "and of several frames"
        assert times(events.of([KvRange(0, 1, 0, 16, mine), KvRange(1, 1, 0, 20, mine)])) == [2]
        assert times(events.of([KvRange(0, 1, 0, 16, mine), KvRange(0, 1, 0, 16, other)])) == [3], "of several tables"
        events.begin(batch(20, 2, [1, 2]))  # goes on in block 2
        events.ran(0, 9)  # both at time 4
        assert times(events.of([KvRange(0, 1, 0, 16, mine)])) == [1]
        assert times(events.of([KvRange(0, 1, 0, 16, mine), KvRange(0, 1, 0, 20, mine)])) == [4], (
            "and of several lengths"
        )


def test_a_step_that_has_not_come_to_the_layer_does_not_hide_what_was_written_before() -> None:
    with mock.patch.object(torch.cuda, "Event", Event):
        Event.clock = 0
        events = written.LayerEvents((3, 7), num_blocks=8, block_size=16)
        table = np.array([1, 2])
        events.begin(batch(0, 20, [1, 2]))
        events.ran(0, 9)  # time 1
        events.begin(batch(20, 5, [1, 2]))  # goes on in block 2
        events.ran(0, 3)  # layer 0 at time 2
        assert times(of(events, 0, table, 0, 20)) == [2]
        assert times(of(events, 1, table, 0, 20)) == [1], "positions 16 to 19 of layer 1 were written by the first step"
        events.copied()  # time 3
        assert times(of(events, 1, table, 0, 20)) == [1, 3]


def test_events_of_steps_long_ago_are_not_waited_for() -> None:
    with mock.patch.object(torch.cuda, "Event", Event):
        events = written.LayerEvents((3,), num_blocks=8, block_size=16)
        events.begin(batch(0, 4, [1]))
        events.ran(0, 3)
        for _ in range(written.KEPT):
            events.begin(batch(0, 4, [2]))
            events.ran(0, 3)
        assert of(events, 0, np.array([1]), 0, 4) == []
        assert len(of(events, 0, np.array([2]), 0, 4)) == 1


def test_a_block_copied_by_several_ranks_is_copied_behind_their_next_meeting() -> None:
    """Our own copy says nothing of theirs."""
    with mock.patch.object(torch.cuda, "Event", Event):
        Event.clock = 0
        events = written.LayerEvents((3, 7), num_blocks=8, block_size=16, ranks=True)
        events.begin(batch(0, 4, [1]))
        events.ran(0, 9)  # time 1
        events.copied()  # time 2
        events.begin(batch(4, 4, [2]))
        events.ran(0, 2)  # up to no meeting
        assert times(of(events, 0, np.array([1]), 0, 4)) == [1, 2]
        events.ran(2, 3)  # time 3
        assert times(of(events, 0, np.array([1]), 0, 4)) == [1, 3]
        events.ran(3, 9)  # time 4
        assert times(of(events, 0, np.array([1]), 0, 4)) == [1, 3]
