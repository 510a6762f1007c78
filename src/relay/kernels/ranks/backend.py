"""A ``Backend`` whose work is shared by ranks: this process is rank 0, the others hear its calls."""

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol, cast

import numpy as np

from relay.errors import DeviceLostError, RelayError, StartupError
from relay.kernels.backend import Batch, QueueingBackend, SampledToken
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.kv_frames import Heads
from relay.kernels.program import Program
from relay.kernels.ranks import calls
from relay.kernels.ranks.pools import AllPools, RankPool
from relay.kernels.ranks.share import Share, pool_bytes
from relay.kernels.ranks.split import check_ranks, even, kv_head_ranges
from relay.kernels.weights import WeightSource
from relay.protocol.sampling import SamplingParams

BATCHES = 4  # remembered: a step is sampled before the second after it runs


class Watch(Protocol):
    """Who started the other ranks."""

    def start(self) -> None:
        """They have loaded: from now on the end of one is the end of this process."""
        ...

    def await_end(self) -> None:
        """A link has ended: the end of its rank is about to end this process. Returns if it does not within a few seconds."""
        ...

    def stop(self) -> None:
        """They were told to end: wait for them and clean up."""
        ...


class RankedBackend:
    """Implements ``Backend``. ``links`` lead to ranks 1, 2, …; ``pool_memory`` is a memfd that every rank has.

    Raises DeviceLostError once a rank has gone: what it had cannot be computed any more.
    """

    def __init__(self, share: Share, links: list[socket.socket], pool_memory: int, watch: Watch) -> None:
        self.name = share.backend.name
        self._share, self._links, self._memory, self._watch = share, links, pool_memory, watch
        self._ranks = len(links) + 1
        self._failed = 0
        self._batches: deque[tuple[int, Batch]] = deque(maxlen=BATCHES)
        self._runs = 0
        self._lock = threading.Lock()  # of the links
        self._open = True
        self.kv_parts: tuple[Heads, ...] = ()  # see ``relay.transfer.store``

    def load(self, program: Program, weights: WeightSource) -> None:
        """The others load by themselves, at the same time. Raises what a rank said where one cannot."""
        check_ranks(program.geometry, self._ranks)
        self._geometry = program.geometry
        self.kv_parts = tuple((low, high - low) for low, high in kv_head_ranges(program.geometry, self._ranks))
        self._share.load(program, weights)
        own, handles = self._share.backend.numerics(), [self._share.handle()]
        for rank in range(1, self._ranks):
            answer = self._started(rank, "loaded")
            assert isinstance(answer, calls.Loaded)
            handles.append(answer.handle)
            if answer.numerics != own:
                different = sorted(name for name in own if own[name] != answer.numerics.get(name))
                raise StartupError(
                    f"rank {rank} computes other bits than rank 0 ({', '.join(different)}): use equal devices"
                )
        self._watch.start()
        self._tell(calls.Connect(handles=handles))
        self._share.connect(handles)

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str) -> None:
        g = self._geometry
        sizes = [pool_bytes(num_blocks, block_size, g.num_layers, n * g.head_dim, dtype) for _, n in self.kv_parts]
        self._reserve_pools(sum(sizes))
        self._tell(calls.Allocate(num_blocks=num_blocks, block_size=block_size, dtype=dtype, pool_bytes=sizes))
        handles = [self._share.allocate_kv(num_blocks, block_size, dtype, self._memory, 0)]
        for rank in range(1, self._ranks):
            answer = self._started(rank, "made room for KV")
            assert isinstance(answer, calls.Allocated)
            handles.append(answer.handle)
        self._map_pools(handles, num_blocks, block_size, dtype)

    def _reserve_pools(self, size: int) -> None:
        os.ftruncate(self._memory, size)

    def _map_pools(self, handles: list[bytes], num_blocks: int, block_size: int, dtype: str) -> None:
        """So that KV of every rank is read and written here."""
        g, backend = self._geometry, self._share.backend
        assert isinstance(backend, CpuBackend)
        pools: list[RankPool] = []
        offset = 0
        for _, heads in self.kv_parts:
            sizes = {"layers": g.num_layers, "heads": heads, "head_dim": g.head_dim}
            blocks = {"num_blocks": num_blocks, "block_size": block_size}
            pools.append(RankPool(backend.isa, self._memory, offset, **sizes, **blocks, dtype=dtype))
            offset += pool_bytes(num_blocks, block_size, g.num_layers, heads * g.head_dim, dtype)
        self._kv = AllPools(pools, g.num_layers)

    def _started(self, rank: int, what: str) -> calls.Loaded | calls.Allocated:
        """The answer of a rank to what only comes while it starts. Raises what it said where it cannot."""
        try:
            answer = calls.receive_answer(self._links[rank - 1])
        except calls.LinkEnded as error:
            raise StartupError(f"rank {rank} ended while it {what}: {error}") from error
        _check_can_start(answer)
        assert isinstance(answer, calls.Loaded | calls.Allocated)
        return answer

    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        self._tell(calls.Bind(slot=slot, params=params, choice=choice, prompt_ids=prompt_ids, output_ids=output_ids))
        with self._counted():
            self._share.backend.bind_slot(slot, params, choice, prompt_ids, output_ids)

    def release_slot(self, slot: int) -> None:
        self._tell(calls.Release(slot=slot))
        with self._counted():
            self._share.backend.release_slot(slot)

    def run(self, start: int, stop: int, batch: Batch) -> None:
        """Returns when every rank is through, so that K and V of all heads are in their pools."""
        known = bool(self._batches) and self._batches[-1][1] is batch
        if not known:
            self._runs += 1
            self._batches.append((self._runs, batch))
        packed = None if known else calls.pack_batch(batch)
        width = batch.block_tables.shape[1]
        self._tell(calls.Run(start=start, stop=stop, number=self._runs, batch=packed, max_blocks=width))
        with self._counted():
            self._share.run(start, stop, batch)

    def sample(self, batch: Batch) -> list[SampledToken]:
        self._tell(calls.Sample(number=next(number for number, one in self._batches if one is batch)))
        with self._counted():
            return self._share.backend.sample(batch)

    def copy_block(self, source: int, target: int) -> None:
        self._tell(calls.CopyBlock(source=source, target=target))
        with self._counted():
            self._share.backend.copy_block(source, target)

    def logits(self) -> np.ndarray:
        return self._share.backend.logits()

    def kv_bytes_per_token_layer(self) -> int:
        own = self._share.backend.kv_bytes_per_token_layer()
        return own * self._geometry.num_kv_heads // self.kv_parts[0][1]

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        self._kv.read(layer, block_table, first, count, out, heads)

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        self._kv.write(layer, block_table, first, count, data, heads)

    def ended(self, batch: Batch) -> bool:
        """Rank 0's work needs everybody's, so its end is enough. Only of backends on devices."""
        return cast(QueueingBackend, self._share.backend).ended(batch)

    def at_once(self, batch: Batch) -> bool:
        whole = getattr(self._share.backend, "at_once", None)
        return whole is not None and bool(whole(batch))

    def kv_blocks_that_fit(self, block_size: int, fraction: float) -> int:
        """The least of all ranks; the error of one that has room for none. Only of backends on devices."""
        backend = cast(QueueingBackend, self._share.backend)
        found = [backend.kv_blocks_that_fit(block_size, fraction)]
        call = calls.Fit(block_size=block_size, fraction=fraction)
        found += [self._ask(rank, call).num_blocks for rank in range(1, self._ranks)]
        return min(found)

    def warm_up(self, longest: int) -> None:
        """Every rank captures the same graphs in the same order. Only of backends on devices."""
        self._tell(calls.WarmUp(longest=longest))
        cast(QueueingBackend, self._share.backend).warm_up(longest)

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
        with self._lock:
            call.failed = self._failed
            message = calls.encode(call)
            for rank in range(1, self._ranks):
                self._send(rank, message)

    def _ask(self, rank: int, call: calls.Fit) -> calls.Fits:
        """One rank's answer. Other calls wait until it is there, so that answers have an order."""
        with self._lock:
            call.failed = self._failed
            self._send(rank, calls.encode(call))
            try:
                answer = calls.receive_answer(self._links[rank - 1])
            except calls.LinkEnded as error:
                raise self._lost(rank, error) from error
        _check_can_start(answer)
        assert isinstance(answer, calls.Fits)
        return answer

    def _send(self, rank: int, message: bytes) -> None:
        try:
            calls.send(self._links[rank - 1], message)
        except calls.LinkEnded as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int, error: calls.LinkEnded) -> DeviceLostError:
        """How the rank ended is for its watcher to say, who has to end this process the same way: it goes first."""
        if self._open:
            self._watch.await_end()
        return DeviceLostError(f"rank {rank} of this worker has ended: {error}")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._failed += 1
            raise


def _check_can_start(answer: calls.Answer) -> None:
    """Raises a rank's own error."""
    if isinstance(answer, calls.CannotStart):
        kinds = {kind.exit_code: kind for kind in RelayError.__subclasses__()}
        raise kinds.get(answer.exit_code, StartupError)(answer.reason)
