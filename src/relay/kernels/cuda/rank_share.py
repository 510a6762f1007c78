"""One rank's share of a worker on several GPUs: a ``CudaBackend`` over its part of the model, with meetings between its launches.

What two GPUs have run of it: docs/decisions/0014-several-gpus.md, State.
"""

import msgspec
import torch

from relay.errors import StartupError
from relay.kernels.backend import Batch
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.ipc import DeviceArea, DeviceMemory
from relay.kernels.cuda.launch import device_errors
from relay.kernels.cuda.linear_choice import row_counts
from relay.kernels.cuda.memory import does_not_fit
from relay.kernels.cuda.rank_meetings import MAX_RANKS, STATE_WORDS, Links, plan_areas
from relay.kernels.kv_frames import SharingFailed
from relay.kernels.program import Embed, Program
from relay.kernels.ranks.split import kv_head_ranges, split_program
from relay.kernels.ranks.weights import RankWeights
from relay.kernels.weights import WeightSource

FLAG_BYTES = 256  # before the area: MAX_RANKS int32, and room so that the area is aligned


class AreaHandle(msgspec.Struct, frozen=True):
    """What another rank needs to map this one's flags and area, or its KV pool."""

    handle: bytes
    size_bytes: int


class CudaRankShare:
    """Implements ``relay.kernels.ranks.share.Share``. Every rank draws every token itself, from equal logits."""

    def __init__(
        self, backend: CudaBackend, device: str, ranks: int, rank: int, max_tokens: int, max_rows: int
    ) -> None:
        """Raises StartupError without the driver's calls for shared memory."""
        self.backend = backend
        self._device, self._ranks, self._rank = device, ranks, rank
        self._rows = row_counts(max(max_tokens, max_rows))[-1]
        self._sampled = -(-max_rows // 256) * 256
        try:
            self._memory = DeviceMemory(device)
        except SharingFailed as error:
            raise StartupError(f"ranks cannot share memory: {error}") from error

    def load(self, program: Program, weights: WeightSource) -> None:
        part = split_program(program, self._ranks, self._rank)
        plan = plan_areas(part, self._rows, self._sampled)
        # Part of a tied head is a matrix of its own here, and stays in 16 bits as the whole one does.
        embeddings = {op.weight for op in program.ops if isinstance(op, Embed)}
        kept = {name for name, cut in part.cuts.items() if cut.name in embeddings}
        most_heads = max(high - low for low, high in kv_head_ranges(program.geometry, self._ranks))
        self.backend.set_meetings(part.meetings, plan, kept, most_heads)
        self.backend.load(part.program, RankWeights(weights, part.cuts))
        for meeting in part.meetings.values():
            bias = getattr(meeting, "bias", None)
            if bias is not None:
                self.backend.add_vector(bias, weights.vector(bias))
        self._size = FLAG_BYTES + 2 * plan.elements
        try:
            self._own = self._memory.allocate(self._size)
        except SharingFailed as error:
            raise StartupError(f"no room for what ranks exchange on {self._device}: {error}") from error
        self._own.tensor.zero_()
        torch.cuda.synchronize(self._device)

    def handle(self) -> bytes:
        return msgspec.msgpack.encode(AreaHandle(self._memory.handle(self._own), self._size))

    def connect(self, handles: list[bytes]) -> None:
        """Raises StartupError where a peer's memory cannot be mapped."""
        areas = []
        for rank, raw in enumerate(handles):
            if rank == self._rank:
                areas.append(self._own)
                continue
            areas.append(self._open(rank, raw))
        self._areas = areas
        self.backend.set_links(
            Links(
                self._rank,
                self._ranks,
                [area.tensor[FLAG_BYTES:].view(getattr(torch, self.backend.dtype)) for area in areas],
                [area.tensor[: 4 * MAX_RANKS].view(torch.int32) for area in areas],
                torch.zeros(STATE_WORDS, dtype=torch.int32, device=self._device),
            )
        )

    def _open(self, rank: int, raw: bytes) -> DeviceArea:
        """Memory of another rank."""
        other = msgspec.msgpack.decode(raw, type=AreaHandle)
        try:
            return self._memory.open(other.handle, other.size_bytes)
        except SharingFailed as error:
            raise StartupError(
                f"rank {self._rank} on {self._device} cannot reach the memory of rank {rank}: {error}; "
                "choose devices that are peers (`relay devices` lists them)"
            ) from error

    @device_errors()
    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str, memory: int, offset: int) -> bytes:
        """On the rank's own device, in an allocation of its own, which rank 0 maps; ``memory`` is not used."""
        self.backend.allocate_kv(num_blocks, block_size, dtype, self._new_pool)
        return msgspec.msgpack.encode(AreaHandle(self._memory.handle(self._pool), self._pool_size))

    def _new_pool(self, size: int) -> torch.Tensor:
        try:
            self._pool, self._pool_size = self._memory.allocate(size), size
        except SharingFailed as error:
            raise does_not_fit(self._device, "the KV blocks of a rank", size) from error
        return self._pool.tensor

    def map_pools(self, handles: list[bytes], heads: list[int]) -> None:
        """Rank 0's: read and write the pools of all from now on, each with so many heads, by rank. Raises StartupError."""
        kv = self.backend.pool
        pools, first = [], 0
        for rank, (raw, count) in enumerate(zip(handles, heads, strict=True)):
            layers, parts, blocks, _, tokens, dim = kv.shape
            shape = (layers, parts, blocks, count, tokens, dim)
            pools.append((first, kv if rank == self._rank else self._open(rank, raw).tensor.view(kv.dtype).view(shape)))
            first += count
        self.backend.use_pools(pools)

    def run(self, start: int, stop: int, batch: Batch) -> None:
        self.backend.run(start, stop, batch)
