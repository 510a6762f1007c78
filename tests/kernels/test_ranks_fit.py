"""A rank that has no room for KV says why itself, with its own exit code."""

import socket
import threading
from types import SimpleNamespace

import pytest

from relay.errors import DoesNotFitError
from relay.kernels.ranks import calls
from relay.kernels.ranks.backend import RankedBackend
from relay.kernels.ranks.follower import obey


def test_the_error_of_another_rank_is_the_worker_s():
    ours, theirs = socket.socketpair()

    def full(block_size, fraction):
        raise DoesNotFitError("no room on cuda:1")

    ended = []

    def follow():
        try:
            obey(SimpleNamespace(backend=SimpleNamespace(kv_blocks_that_fit=full)), theirs, -1, 1)
        except (DoesNotFitError, calls.LinkEnded) as error:
            ended.append(error)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    backend = object.__new__(RankedBackend)
    backend._share = SimpleNamespace(backend=SimpleNamespace(kv_blocks_that_fit=lambda block_size, fraction: 9))
    backend._ranks, backend._links, backend._lock, backend._failed = 2, [ours], threading.Lock(), 0
    backend._open, backend._watch = False, None
    with pytest.raises(DoesNotFitError, match="no room on cuda:1"):
        backend.kv_blocks_that_fit(16, 0.9)
    ours.close()
    follower.join(10)
    theirs.close()
    assert len(ended) == 1
