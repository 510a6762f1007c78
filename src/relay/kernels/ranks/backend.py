"""A ``Backend`` whose work is shared by ranks: this process is rank 0, the others hear its calls."""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from relay.errors import DeviceLostError, RelayError, StartupError
from relay.kernels.backend import Batch, SampledToken
from relay.kernels.program import Program
from relay.kernels.ranks import calls
from relay.kernels.ranks.pools import AllPools, RankPool
from relay.kernels.ranks.share import RankShare, pool_bytes
from relay.kernels.ranks.split import check_ranks, even, kv_head_ranges
from relay.kernels.weights import WeightSource
from relay.protocol.sampling import SamplingParams


class Watch(Protocol):
    """Who started the other ranks."""

    def start(self) -> None:
        """They have loaded: from now on the end of one is the end of this process."""
        ...

    def stop(self) -> None:
        """They were told to end: wait for them and clean up."""
        ...


class RankedBackend:
    """Implements ``Backend``. ``links`` lead to ranks 1, 2, …; ``pool_memory`` is a memfd that every rank has.

    Raises DeviceLostError once a rank has gone: what it had cannot be computed any more.
    """

    def __init__(self, share: RankShare, links: list[socket.socket], pool_memory: int, watch: Watch) -> None:
        self.name = share.backend.name
        self._share, self._links, self._memory, self._watch = share, links, pool_memory, watch
        self._ranks = len(links) + 1
        self._failed = 0
        self._batch: Batch | None = None
        self._open = True

    def load(self, program: Program, weights: WeightSource) -> None:
        """The others load by themselves, at the same time. Raises what a rank said where one cannot."""
        check_ranks(program.geometry, self._ranks)
        self._geometry = program.geometry
        self._share.load(program, weights)
        for rank, link in enumerate(self._links, 1):
            try:
                answer = calls.receive_answer(link)
            except calls.LinkEnded as error:
                raise StartupError(f"rank {rank} ended while it loaded: {error}") from error
            if isinstance(answer, calls.CannotStart):
                kinds = {kind.exit_code: kind for kind in RelayError.__subclasses__()}
                raise kinds.get(answer.exit_code, StartupError)(answer.reason)
            own = self._share.backend.numerics()
            if answer.numerics != own:
                different = sorted(name for name in own if own[name] != answer.numerics.get(name))
                raise StartupError(
                    f"rank {rank} computes other bits than rank 0 ({', '.join(different)}): use equal devices"
                )
        self._watch.start()

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str) -> None:
        g = self._geometry
        heads = [last - first for first, last in kv_head_ranges(g, self._ranks)]
        sizes = [pool_bytes(num_blocks, block_size, g.num_layers, one * g.head_dim, dtype) for one in heads]
        os.ftruncate(self._memory, sum(sizes))
        self._tell(calls.Allocate(num_blocks=num_blocks, block_size=block_size, dtype=dtype, pool_bytes=sizes))
        self._share.allocate_kv(num_blocks, block_size, dtype, self._memory, 0)
        pools = [
            RankPool(
                self._share.backend.isa,
                self._memory,
                sum(sizes[:rank]),
                layers=g.num_layers,
                heads=one,
                head_dim=g.head_dim,
                num_blocks=num_blocks,
                block_size=block_size,
                dtype=dtype,
            )
            for rank, one in enumerate(heads)
        ]
        self._pools = AllPools(pools, g.num_layers)

    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        self._tell(calls.Bind(slot=slot, params=params, choice=choice, prompt_ids=prompt_ids, output_ids=output_ids))
        with self._counted():
            self._share.bind_slot(slot, params, choice, prompt_ids, output_ids)

    def release_slot(self, slot: int) -> None:
        self._tell(calls.Release(slot=slot))
        with self._counted():
            self._share.release_slot(slot)

    def run(self, start: int, stop: int, batch: Batch) -> None:
        """Returns when every rank is through, so that K and V of all heads are in their pools."""
        known = batch is self._batch
        self._batch = batch
        packed = None if known else calls.pack_batch(batch)
        self._tell(calls.Run(start=start, stop=stop, batch=packed, max_blocks=batch.block_tables.shape[1]))
        with self._counted():
            self._share.run(start, stop, batch)

    def sample(self, batch: Batch) -> list[SampledToken]:
        self._tell(calls.Sample())
        with self._counted():
            return self._share.sample(batch)

    def copy_block(self, source: int, target: int) -> None:
        self._tell(calls.CopyBlock(source=source, target=target))
        with self._counted():
            self._share.copy_block(source, target)

    def logits(self) -> np.ndarray:
        return self._share.backend.logits()

    def kv_bytes_per_token_layer(self) -> int:
        return self._pools.token_bytes

    def read_kv(self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview) -> None:
        self._pools.read(layer, block_table, first, count, out)

    def write_kv(self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview) -> None:
        self._pools.write(layer, block_table, first, count, data)

    def numerics(self) -> dict[str, str]:
        """As one rank's, and how many there are: the order of sums is a function of that number and the model's sizes."""
        g = self._geometry
        shares = [even(g.num_kv_heads, self._ranks, rank) for rank in range(self._ranks)]
        return {**self._share.backend.numerics(), "ranks": f"{self._ranks}: kv heads {shares}, tree of neighbours"}

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(DeviceLostError):
                self._tell(calls.Close())
            self._share.backend.close()
            self._watch.stop()

    def _tell(self, call: calls.Call) -> None:
        call.failed = self._failed
        message = calls.encode(call)
        for rank, link in enumerate(self._links, 1):
            try:
                calls.send(link, message)
            except calls.LinkEnded as error:
                raise DeviceLostError(f"rank {rank} of this worker has ended: {error}") from error

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._failed += 1
            raise


def obey(share: RankShare, link: socket.socket, pool_memory: int, rank: int) -> None:
    """A follower's life after it has loaded: make rank 0's calls until it closes. Raises LinkEnded, DeviceLostError."""
    failed = 0
    batch: Batch | None = None
    while True:
        call = calls.receive_call(link)
        if call.failed != failed:
            raise DeviceLostError(f"rank {rank} failed {failed} calls, rank 0 {call.failed}: their states differ")
        try:
            match call:
                case calls.Allocate():
                    offset = sum(call.pool_bytes[:rank])
                    share.allocate_kv(call.num_blocks, call.block_size, call.dtype, pool_memory, offset)
                case calls.Bind():
                    share.bind_slot(call.slot, call.params, call.choice, call.prompt_ids, call.output_ids)
                case calls.Release():
                    share.release_slot(call.slot)
                case calls.CopyBlock():
                    share.copy_block(call.source, call.target)
                case calls.Run():
                    if call.batch is not None:
                        batch = calls.unpack_batch(call.batch, call.max_blocks)
                    assert batch is not None
                    share.run(call.start, call.stop, batch)
                case calls.Sample():
                    assert batch is not None
                    share.sample(batch)
                case calls.Close():
                    return
        except DeviceLostError:
            raise
        except (
            Exception
        ):  # rank 0 failed the same call for the same reason, or the count of the next one says otherwise
            failed += 1
