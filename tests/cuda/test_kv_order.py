"""Copies of KV wait for what they need and for nobody else: streams that only note what they were told, no bytes."""

import importlib.util
from unittest import mock

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from relay.kernels.cuda import kv_copy
from relay.kernels.kv_frames import KvRange
from tests.cuda.interpreted import without_a_device

TABLE = np.array([1, 2], np.int32)


class Stream:
    def __init__(self, *_: object, **__: object) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Event:
    def __init__(self, *_: object, **__: object) -> None:
        self.waits = 0
        self.ended = False

    def record(self, *_: object) -> None: ...

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.waits += 1


class Written:
    """Stands for LayerEvents."""

    def __init__(self, *events: Event) -> None:
        self.events = list(events)

    def of(self, *_: object) -> list[Event]:
        return self.events


@pytest.fixture
def transfers():
    with (
        without_a_device(),
        mock.patch.multiple(torch.cuda, Stream=Stream, Event=Event),
        mock.patch.object(kv_copy, "move"),
    ):
        made = kv_copy.KvTransfers("cpu")
        made.use([(0, torch.zeros(2, 2, 8, 2, 16, 32, dtype=torch.bfloat16))])
        yield made


def frame(transfers: kv_copy.KvTransfers, count: int = 16) -> tuple[KvRange, memoryview]:
    one = KvRange(0, 1, 0, count, TABLE)
    return one, memoryview(bytearray(transfers.frame_bytes(one)))


def lane_of(transfers: kv_copy.KvTransfers, number: int) -> kv_copy._Lane:
    """From now on this thread is another one."""
    transfers._local.lane = lane = kv_copy._Lane("cpu", number)
    return lane


def test_a_copy_out_waits_for_the_write_of_its_layers(transfers) -> None:
    lane, written = lane_of(transfers, 0), Event()
    one, out = frame(transfers)
    transfers.stage([(one, out)], Written(written))
    assert lane.stream.waited == [written]


def test_copies_wait_for_copies_into_the_cache_by_other_threads_until_these_have_ended(transfers) -> None:
    lane_of(transfers, 0)
    first = transfers.collect([frame(transfers)])
    other = lane_of(transfers, 1)
    second = transfers.collect([frame(transfers)])
    assert other.stream.waited == [first._event]  # the blocks may have changed hands in between
    out = lane_of(transfers, 2)
    transfers.stage([frame(transfers)], Written())
    assert out.stream.waited == [first._event, second._event]
    first._event.ended = True
    late = lane_of(transfers, 3)
    transfers.stage([frame(transfers)], Written())
    assert late.stream.waited == [second._event]


def test_a_step_waits_once_for_what_was_copied_in(transfers) -> None:
    lane_of(transfers, 0)
    copied = transfers.collect([frame(transfers)])
    stream = Stream()
    transfers.join(stream)
    transfers.join(stream)
    assert stream.waited == [copied._event]


def test_buffers_are_used_again_after_their_copies(transfers) -> None:
    lane_of(transfers, 0)
    copies = [transfers.collect([frame(transfers)]) for _ in range(kv_copy.FRAMES)]
    assert not any(copy._event.waits for copy in copies)
    transfers.collect([frame(transfers)])
    assert [copy._event.waits for copy in copies] == [1] + [0] * (kv_copy.FRAMES - 1)


def test_more_frames_at_once_than_there_are_buffers(transfers) -> None:
    lane = lane_of(transfers, 0)
    transfers.collect([frame(transfers) for _ in range(kv_copy.FRAMES + 1)])
    again, full = lane.frames._slots[0][1], lane.frames._slots[1][1]
    assert all(event is full for _, event in lane.frames._slots[1:])
    assert again is not full
    assert full.waits == 1  # before the first buffer was filled again
    assert again.waits == 0


def test_sums_are_read_before_their_memory_serves_another_launch(transfers) -> None:
    lane_of(transfers, 0)
    one, out = frame(transfers)
    early = transfers.stage([(one, out)], Written())
    sums = early._sums[0][1]
    sums._where[0] = 41  # as the device left it
    for _ in range(kv_copy.PLANS - 1):
        transfers.stage([(one, out)], Written())
    assert early._event.waits == 0
    transfers.stage([(one, out)], Written())
    assert early._event.waits == 1
    assert sums.read() == [41]
