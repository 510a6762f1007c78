"""A rank other than the first, after it has loaded: it makes rank 0's calls, in order, until the link is closed."""

import contextlib
import socket
from collections.abc import Iterator
from typing import cast

from relay.errors import DeviceLostError, RelayError
from relay.kernels.backend import Batch, QueueingBackend
from relay.kernels.ranks import calls
from relay.kernels.ranks.backend import BATCHES
from relay.kernels.ranks.share import Share


def obey(share: Share, link: socket.socket, pool_memory: int, rank: int) -> None:
    """Returns after ``Close``. Raises LinkEnded, and DeviceLostError where rank 0 counts other failures than we do."""
    _Follower(share, link, pool_memory, rank).live()


class _Follower:
    def __init__(self, share: Share, link: socket.socket, pool_memory: int, rank: int) -> None:
        self._share, self._link, self._memory, self._rank = share, link, pool_memory, rank
        self._batches: dict[int, Batch] = {}

    def live(self) -> None:
        failed = 0
        while True:
            call = calls.receive_call(self._link)
            if isinstance(call, calls.Close):
                return
            if isinstance(call, calls.Fit):
                self._fit(call)
                continue
            if call.failed != failed:
                raise DeviceLostError(
                    f"rank {self._rank} failed {failed} calls, rank 0 {call.failed}: their states differ"
                )
            try:
                self._make(call)
            except DeviceLostError:
                raise
            except Exception:
                if isinstance(call, calls.Connect | calls.Allocate | calls.WarmUp):
                    raise
                failed += 1  # rank 0 failed it too, for the same reason, or its next count says otherwise

    def _make(self, call: calls.AnyCall) -> None:
        share = self._share
        match call:
            case calls.Connect():
                share.connect(call.handles)
            case calls.Allocate():
                self._allocate(call)
            case calls.WarmUp():
                cast(QueueingBackend, share.backend).warm_up(call.longest)
            case calls.Bind():
                share.backend.bind_slot(call.slot, call.params, call.choice, call.prompt_ids, call.output_ids)
            case calls.Release():
                share.backend.release_slot(call.slot)
            case calls.CopyBlock():
                share.backend.copy_block(call.source, call.target)
            case calls.Run():
                if call.batch is not None:
                    self._batches[call.number] = calls.unpack_batch(call.batch, call.max_blocks)
                    self._batches.pop(call.number - BATCHES, None)
                share.run(call.start, call.stop, self._batches[call.number])
            case calls.Sample():
                share.backend.sample(self._batches[call.number])

    def _fit(self, call: calls.Fit) -> None:
        backend = cast(QueueingBackend, self._share.backend)
        with self._told():
            calls.send(self._link, calls.encode(calls.Fits(backend.kv_blocks_that_fit(call.block_size, call.fraction))))

    def _allocate(self, call: calls.Allocate) -> None:
        offset = sum(call.pool_bytes[: self._rank])
        with self._told():
            handle = self._share.allocate_kv(call.num_blocks, call.block_size, call.dtype, self._memory, offset)
            calls.send(self._link, calls.encode(calls.Allocated(handle)))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A failure of the body is our answer, and then our end."""
        try:
            yield
        except RelayError as error:
            calls.send(self._link, calls.encode(calls.CannotStart(str(error), error.exit_code)))
            calls.receive_call(self._link)  # rank 0 ends with this error, before its watcher has seen us end
            raise
