"""A device that is lost while P copies KV from it."""

import queue
import threading
from types import SimpleNamespace

from relay.errors import DeviceLostError
from relay.transfer.contract import SendFailed
from tests.transfer.nodes import WAIT_S, announce
from tests.transfer.test_staged import DevicePair


def test_a_device_that_is_lost_under_several_copies_ends_the_thread_that_waits_for_them(monkeypatch):
    """Every copy raises then, not the first alone; an engine ends with the thread, and must not wait for copies instead."""
    ended = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", ended.put)
    pair = DevicePair("shm", 4)
    staged = pair.stores[0].stage

    def lost(frames):
        copy = staged(frames)

        def wait():
            assert copy.done.wait(WAIT_S)
            raise DeviceLostError("the GPU failed")

        return SimpleNamespace(wait=wait, ended=lambda: False)

    pair.stores[0].delay_s = 0.05
    pair.stores[0].stage = lost
    try:
        pair.start()
        announce(pair.source)
        assert isinstance(ended.get(timeout=WAIT_S).exc_value, DeviceLostError)
        assert isinstance(pair.source.event(), SendFailed)
    finally:
        pair.close()
