"""A worker of several ranks on GPUs, seen from rank 0, whose device reads and writes KV of all heads: it maps every pool.

What orders these copies: docs/decisions/0014-several-gpus.md, "KV of several ranks".
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.kv_copy import Moving
from relay.kernels.cuda.rank_share import CudaRankShare
from relay.kernels.kv_frames import Heads, KvRange, Place
from relay.kernels.program import Program
from relay.kernels.ranks.backend import RankedBackend
from relay.kernels.ranks.split import met_points, split_program
from relay.kernels.weights import WeightSource


class RankedCudaBackend(RankedBackend):
    """Also a ``relay.transfer.store.StagedStore``, whose frames may have heads of any ranks."""

    def load(self, program: Program, weights: WeightSource) -> None:
        super().load(program, weights)
        meetings = split_program(program, self._ranks, 0).meetings
        self.sink_points = met_points(program.sink_points, meetings)
        """Where a layer's K and V are in every rank's pool, for ``Runner``."""

    @property
    def _device(self) -> CudaBackend:
        return cast(CudaRankShare, self._share).backend

    def _reserve_pools(self, size: int) -> None:
        """Each rank allocates its own, on its device."""

    def _map_pools(self, handles: list[bytes], num_blocks: int, block_size: int, dtype: str) -> None:
        cast(CudaRankShare, self._share).map_pools(handles, [heads for _, heads in self.kv_parts])

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        self._device.read_kv(layer, block_table, first, count, out, heads)

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        self._device.write_kv(layer, block_table, first, count, data, heads)

    @property
    def stage_depth(self) -> int:
        return self._device.stage_depth

    def register(self, region: memoryview) -> None:
        self._device.register(region)

    def unregister(self, region: memoryview) -> None:
        self._device.unregister(region)

    def allocate(self, size: int) -> memoryview:
        return self._device.allocate(size)

    def stage(self, frames: Sequence[tuple[KvRange, Place]]) -> Moving:
        return self._device.stage(frames)

    def collect(self, frames: Sequence[tuple[KvRange, Place]]) -> Moving:
        return self._device.collect(frames)
