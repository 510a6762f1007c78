"""The backend that defines the ops in readable numpy, fp32 throughout.

With ``ChainProducts`` it computes the canon itself, bit for bit, at a pace for tests. With ``MatmulProducts`` (the default) it
runs a small model at a usable pace; then its definitions are canonical but its bits are not, since the library's products
depend on the batch.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from relay.errors import CorruptModelError
from relay.kernels import canon, packing
from relay.kernels.backend import Batch, SampledToken
from relay.kernels.kv_frames import Heads
from relay.kernels.probe import probe_digest
from relay.kernels.program import (
    Attend,
    Buffer,
    Embed,
    HeadNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeWriteKv,
    SelectRows,
    SiluMul,
)
from relay.kernels.reference.arithmetic import F32, rms_norm, rotate, silu_mul
from relay.kernels.reference.attention import attend
from relay.kernels.reference.kv_cache import PagedKv
from relay.kernels.reference.products import MatmulProducts, Products
from relay.kernels.sampler import SlotState, draw_rows
from relay.kernels.weights import WeightSource
from relay.protocol.sampling import SamplingParams

Loaded = TypeVar("Loaded")

_SAMPLED = (Buffer.S, Buffer.L)  # buffers with a row a sampled row instead of a row a token


class ReferenceBackend:
    """Implements ``relay.kernels.backend.Backend``."""

    name = "reference"

    def __init__(self, products: Products | None = None) -> None:
        self._products: Products = products or MatmulProducts()
        self._slots: dict[int, SlotState] = {}
        self._buffers: dict[Buffer, F32] = {}
        self._captured: F32 | None = None
        self._kv_dtype = "float32"

    # --- set-up -----------------------------------------------------------------------------------------------------

    def load(self, program: Program, weights: WeightSource) -> None:
        """Widens every weight to fp32 at once. Raises CorruptModelError for a missing weight or a wrong shape."""
        self._program = program
        self._weights: dict[str, F32] = {}
        geometry = program.geometry
        for op in program.ops:
            match op:
                case Embed(weight, dst):
                    self._matrix(weights, weight, geometry.vocab, geometry.width(dst))
                case RmsNorm(src, _, weight):
                    self._vector(weights, weight, (geometry.width(src),))
                case Linear(src, dst, weight, bias):
                    self._matrix(weights, weight, geometry.width(dst), geometry.width(src))
                    if bias is not None:
                        self._vector(weights, bias, (geometry.width(dst),))
                case HeadNorm(q_weight, k_weight):
                    self._vector(weights, q_weight, (geometry.head_dim,))
                    self._vector(weights, k_weight, (geometry.head_dim,))
                case RopeWriteKv():
                    for table in ("rope.cos", "rope.sin"):
                        self._vector(weights, table, (geometry.max_positions, geometry.head_dim // 2))

    def _matrix(self, weights: WeightSource, name: str, n: int, k: int) -> None:
        if name in self._weights:
            return
        packed = _get(weights.matrix, name)
        if (packed.n, packed.k) != (n, k):
            raise CorruptModelError(f"weight {name} is [{packed.n}, {packed.k}], the program needs [{n}, {k}]")
        self._weights[name] = packing.unpack_matrix(packed)

    def _vector(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> None:
        vector = _get(weights.vector, name)
        if vector.shape != shape or vector.dtype != np.float32:
            raise CorruptModelError(f"{name} is {vector.dtype} {vector.shape}, the program needs float32 {shape}")
        self._weights[name] = vector

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str) -> None:
        g = self._program.geometry
        self._kv = PagedKv(g.num_layers, num_blocks, block_size, g.num_kv_heads, g.head_dim, dtype)
        self._kv_dtype = dtype

    # --- a step -----------------------------------------------------------------------------------------------------

    def run(self, start: int, stop: int, batch: Batch) -> None:
        if start == 0:
            self._begin(batch)
        for op in self._program.ops[start:stop]:
            self._execute(op, batch)

    def _begin(self, batch: Batch) -> None:
        """Fresh buffers, full of NaN: reading what this step has not written shows."""
        geometry = self._program.geometry
        for buffer in Buffer:
            rows = len(batch.sampled_rows) if buffer in _SAMPLED else len(batch.token_ids)
            self._buffers[buffer] = np.full((rows, geometry.width(buffer)), np.nan, np.float32)

    def _execute(self, op: Op, batch: Batch) -> None:
        buffers, weights = self._buffers, self._weights
        match op:
            case Embed(weight, dst):
                buffers[dst] = weights[weight][self._token_ids(batch)]
            case RmsNorm(src, dst, weight, eps):
                buffers[dst] = rms_norm(buffers[src], weights[weight], eps)
            case Linear(src, dst, weight, bias, accumulate):
                y = self._products.linear(buffers[src], weights[weight])
                if bias is not None:
                    y = y + weights[bias]
                buffers[dst] = buffers[dst] + y if accumulate else y
            case HeadNorm(q_weight, k_weight, eps):
                q, k, v = self._heads()
                self._set_heads(rms_norm(q, weights[q_weight], eps), rms_norm(k, weights[k_weight], eps), v)
            case RopeWriteKv(layer):
                self._rope_write(layer, batch)
            case Attend(layer, scale):
                self._attend(layer, scale, batch)
            case SiluMul():
                gate, up = np.split(buffers[Buffer.G], 2, axis=1)
                buffers[Buffer.U] = silu_mul(gate, up)
            case SelectRows(src, dst):
                buffers[dst] = buffers[src][batch.row_starts[batch.sampled_rows + 1] - 1]

    def _token_ids(self, batch: Batch) -> np.ndarray:
        """The step's token ids, -1 replaced by the last token of the row's slot."""
        ids = batch.token_ids.copy()
        slots = np.repeat(batch.slots, np.diff(batch.row_starts))
        for index in np.flatnonzero(ids == -1):
            ids[index] = self._slots[int(slots[index])].last_token
        return ids

    def _heads(self) -> tuple[F32, F32, F32]:
        """q [rows, heads, dim], k and v [rows, kv_heads, dim] of the QKV buffer."""
        g = self._program.geometry
        heads = self._buffers[Buffer.QKV].reshape(-1, g.num_heads + 2 * g.num_kv_heads, g.head_dim)
        q, k, v = np.split(heads, [g.num_heads, g.num_heads + g.num_kv_heads], axis=1)
        return q, k, v

    def _set_heads(self, q: F32, k: F32, v: F32) -> None:
        self._buffers[Buffer.QKV] = np.concatenate([q, k, v], axis=1).reshape(len(q), -1)

    def _rope_write(self, layer: int, batch: Batch) -> None:
        q, k, v = self._heads()
        cos, sin = (self._weights[table][batch.positions] for table in ("rope.cos", "rope.sin"))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self._set_heads(q, k, v)
        for row, tokens in _rows(batch):
            self._kv.write(layer, batch.block_tables[row], batch.positions[tokens], k[tokens], v[tokens])

    def _attend(self, layer: int, scale: float, batch: Batch) -> None:
        q, _, _ = self._heads()
        out = np.empty_like(q)
        for row, tokens in _rows(batch):
            positions = batch.positions[tokens]
            k, v = self._kv.read(layer, batch.block_tables[row], int(positions.max()) + 1)
            out[tokens] = attend(q[tokens], k, v, positions, scale, self._products)
        self._buffers[Buffer.A] = out.reshape(len(q), -1)

    # --- sampling ---------------------------------------------------------------------------------------------------

    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        self._slots[slot] = SlotState(params, choice, prompt_ids, output_ids)

    def release_slot(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def sample(self, batch: Batch) -> list[SampledToken]:
        """Raises InvalidLogits (its ``row`` indexes ``sampled_rows``); then no slot has moved on."""
        logits = self._buffers[Buffer.L]
        self._captured = logits if batch.capture_logits else None
        states = [self._slots[int(slot)] for slot in batch.slots[batch.sampled_rows]]
        tokens = draw_rows(logits, states)
        for state, token in zip(states, tokens, strict=True):
            state.push(token.token_id)
        return tokens

    def logits(self) -> np.ndarray:
        if self._captured is None:
            raise RuntimeError("the last sample did not capture logits")
        return self._captured

    # --- KV ---------------------------------------------------------------------------------------------------------

    def kv_bytes_per_token_layer(self) -> int:
        return self._kv.bytes_per_token_layer

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        self._kv.export(layer, block_table, first, count, out, heads)

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        self._kv.restore(layer, block_table, first, count, data, heads)

    def copy_block(self, source: int, target: int) -> None:
        self._kv.copy_block(source, target)

    # --- identity ---------------------------------------------------------------------------------------------------

    def numerics(self) -> dict[str, str]:
        probe = ReferenceBackend(self._products)
        return {
            **canon.parts(),
            "instructions": f"reference {self._products.name}",
            "activation": "float32",
            "kv": self._kv_dtype,
            "probe": probe_digest(probe, self._kv_dtype),
        }

    def close(self) -> None:
        self._buffers.clear()
        self._slots.clear()


def _rows(batch: Batch) -> list[tuple[int, slice]]:
    """(sequence row, its tokens) of every row that has tokens in this step."""
    starts = batch.row_starts
    return [
        (row, slice(int(starts[row]), int(starts[row + 1])))
        for row in range(len(starts) - 1)
        if starts[row] < starts[row + 1]
    ]


def _get(load: Callable[[str], Loaded], name: str) -> Loaded:
    try:
        return load(name)
    except KeyError:
        raise CorruptModelError(f"the model has no weight {name}") from None
