"""The CPU backend: the C kernels behind the ``Backend`` contract."""

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np

from relay.errors import CorruptModelError, StartupError, UsageError
from relay.kernels import canon
from relay.kernels.backend import Batch, SampledToken
from relay.kernels.cpu import library, records
from relay.kernels.cpu.memory import address, reserve
from relay.kernels.cpu.programs import BoundProgram, bind_program
from relay.kernels.cpu.sampler import CSampler
from relay.kernels.kv_frames import Heads
from relay.kernels.probe import probe_digest
from relay.kernels.program import Buffer, Geometry, Program
from relay.kernels.sampler import SlotState
from relay.kernels.weights import WeightSource
from relay.protocol.sampling import SamplingParams

_KV_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(slots=True)
class _Bound:
    """A batch as C sees it; keeps the arrays alive, and is reused by the ranges of one step."""

    batch: Batch
    record: records.Batch
    arrays: tuple[np.ndarray, ...]


class CpuBackend:
    """Runs programs on ``threads`` threads (the caller's is one of them), with the kernels of ``isa`` or the best there are.

    ``max_tokens`` bounds the tokens of a step, ``max_sampled`` its sampled rows; buffers of that size are reserved once and
    touched as far as they are used. Raises UsageError for an ``isa`` this processor lacks, StartupError without kernels.
    """

    name = "cpu"

    def __init__(self, threads: int, isa: str | None = None, *, max_tokens: int = 2048, max_sampled: int = 256) -> None:
        if threads < 1 or max_tokens < 1 or max_sampled < 1:
            raise UsageError("threads, max_tokens and max_sampled must be at least 1")
        self.isa = library.choose(isa)
        self.threads = threads
        self._max_tokens = max_tokens
        self._max_sampled = max_sampled
        self._library = library.load(self.isa)
        self._pool = self._library.pool_create(threads)
        if not self._pool:
            raise StartupError(f"cannot start {threads} threads")
        self._model = records.Model(pool=self._pool)
        self._program: BoundProgram | None = None
        self._buffers: dict[Buffer, np.ndarray] = {}
        self._scratch = np.empty(0, np.uint8)
        self._kv = np.empty(0, np.uint8)
        self._kv_dtype = "float32"
        self._last_tokens = np.full(max_sampled, -1, np.int32)
        self._bind_last_tokens()
        self._slots: dict[int, SlotState] = {}
        self._sampler = CSampler(self._library, self._pool, threads)
        self._bound: _Bound | None = None
        self._num_captured = 0

    def load(self, program: Program, weights: WeightSource) -> None:
        """See ``Backend.load``. Weights are used where they lie."""
        geometry = program.geometry
        if geometry.head_dim % 16:
            raise CorruptModelError(f"head_dim {geometry.head_dim} is no multiple of 16")
        if geometry.num_heads % geometry.num_kv_heads:
            raise CorruptModelError(f"{geometry.num_heads} heads do not divide among {geometry.num_kv_heads} kv heads")
        bound = bind_program(program, weights)
        model = self._model
        model.hidden, model.intermediate = geometry.hidden, geometry.intermediate
        model.heads, model.kv_heads, model.head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        model.vocab, model.max_positions, model.num_layers = geometry.vocab, geometry.max_positions, geometry.num_layers
        model.rope_cos, model.rope_sin = bound.rope_cos.ctypes.data, bound.rope_sin.ctypes.data
        self._make_buffers(geometry)
        floats = self._library.relay_scratch_floats(bound.widest_k, geometry.head_dim)
        self._scratch = reserve(floats * 4 * self.threads, "scratch memory")
        model.scratch, model.scratch_floats = self._scratch.ctypes.data, floats
        self._program = bound

    def _make_buffers(self, geometry: Geometry) -> None:
        for buffer in Buffer:
            rows = self._max_sampled if buffer in (Buffer.S, Buffer.L) else self._max_tokens
            stride = -(-geometry.width(buffer) // 16) * 16
            data = reserve(rows * stride * 4, f"buffer {buffer}").view(np.float32).reshape(rows, stride)
            self._buffers[buffer] = data
            self._model.buffers[records.BUFFER_INDEX[buffer]] = records.BufferRecord(data.ctypes.data, stride)

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str, memory: np.ndarray | None = None) -> None:
        """See ``Backend.allocate_kv``. Layout: program.h. ``memory``: where the pool lies; uint8, zero, page aligned."""
        geometry = self._loaded().program.geometry
        if dtype not in _KV_BYTES:
            raise UsageError(f"KV cache dtype {dtype!r}: use {' or '.join(_KV_BYTES)}")
        if block_size < 16 or block_size % 16 or num_blocks < 1:
            raise UsageError(
                f"{num_blocks} blocks of {block_size} tokens: a block holds a positive multiple of 16 tokens"
            )
        layer_bytes = 2 * block_size * geometry.kv_width * _KV_BYTES[dtype]
        model = self._model
        model.layer_bytes, model.block_bytes = layer_bytes, layer_bytes * geometry.num_layers
        size = num_blocks * model.block_bytes
        if memory is not None and memory.size < size:
            raise ValueError(f"{memory.size} bytes for a KV cache of {size}")
        self._kv = reserve(size, f"a KV cache of {num_blocks} blocks") if memory is None else memory
        self._kv_dtype = dtype
        model.kv, model.kv_half = self._kv.ctypes.data, int(dtype == "bfloat16")
        model.block_size, model.num_blocks = block_size, num_blocks

    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """See ``Backend.bind_slot``."""
        state = SlotState(params, choice, prompt_ids, output_ids)
        if slot >= len(self._last_tokens):
            self._last_tokens = np.concatenate([self._last_tokens, np.full(slot + 1, -1, np.int32)])
            self._bind_last_tokens()
        self._slots[slot] = state
        self._last_tokens[slot] = state.last_token

    def release_slot(self, slot: int) -> None:
        """See ``Backend.release_slot``; an unknown slot is no error."""
        if self._slots.pop(slot, None) is not None:
            self._last_tokens[slot] = -1

    def _bind_last_tokens(self) -> None:
        self._model.last_tokens, self._model.num_slots = self._last_tokens.ctypes.data, len(self._last_tokens)

    def run(self, start: int, stop: int, batch: Batch) -> None:
        """See ``Backend.run``. Raises ValueError for a batch that does not fit tables, vocabulary or cache; nothing is
        written then."""
        program = self._loaded()
        if not 0 <= start <= stop <= len(program.program.ops):
            raise ValueError(f"ops [{start}, {stop}) of {len(program.program.ops)}")
        bound = self._bind_batch(batch)
        status = self._library.relay_run(
            ctypes.addressof(self._model), ctypes.addressof(program.ops), start, stop, ctypes.addressof(bound.record)
        )
        if status:
            raise ValueError(records.ERRORS[status])

    def _bind_batch(self, batch: Batch) -> _Bound:
        bound = self._bound
        if bound is not None and bound.batch is batch:
            return bound
        tokens, rows, sampled = len(batch.token_ids), len(batch.slots), len(batch.sampled_rows)
        if not 0 < tokens <= self._max_tokens or sampled > self._max_sampled:
            raise ValueError(
                f"{tokens} tokens and {sampled} sampled rows; at most {self._max_tokens} and {self._max_sampled}"
            )
        if len(batch.positions) != tokens or len(batch.row_starts) != rows + 1 or len(batch.block_tables) != rows:
            raise ValueError("the arrays of the batch have different lengths")
        if not self._kv.size:
            raise ValueError("allocate_kv comes before run")
        arrays = tuple(
            np.ascontiguousarray(array, dtype=np.int32)
            for array in (
                batch.token_ids,
                batch.positions,
                batch.row_starts,
                batch.slots,
                batch.block_tables,
                batch.sampled_rows,
            )
        )
        record = records.Batch(tokens, rows, sampled, arrays[4].shape[1], *(array.ctypes.data for array in arrays))
        self._bound = _Bound(batch, record, arrays)
        return self._bound

    def sample(self, batch: Batch) -> list[SampledToken]:
        """See ``Backend.sample``. Raises InvalidLogits naming the sampled row; no slot has moved then."""
        bound = self._bind_batch(batch)
        slots = [int(bound.arrays[3][row]) for row in bound.arrays[5]]
        logits = self._buffers[Buffer.L][: len(slots), : self._loaded().program.geometry.vocab]
        tokens = self._sampler.draw_rows(logits, [self._slots[slot] for slot in slots])
        for slot, token in zip(slots, tokens, strict=True):
            self._slots[slot].push(token.token_id)
            self._last_tokens[slot] = token.token_id
        self._num_captured = len(slots) if batch.capture_logits else 0
        return tokens

    def logits(self) -> np.ndarray:
        """See ``Backend.logits``; a copy."""
        vocab = self._loaded().program.geometry.vocab
        return self._buffers[Buffer.L][: self._num_captured, :vocab].copy()

    def buffer(self, buffer: Buffer) -> np.ndarray:
        """fp32 [rows, width] of ``buffer`` as the last run left it: a view, for tests and comparisons."""
        return self._buffers[buffer][:, : self._loaded().program.geometry.width(buffer)]

    def kv_bytes_per_token_layer(self) -> int:
        """See ``Backend.kv_bytes_per_token_layer``."""
        return 2 * self._loaded().program.geometry.kv_width * _KV_BYTES[self._kv_dtype]

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        """See ``Backend.read_kv``."""
        self.read_kv_crc(layer, block_table, first, count, out, heads)

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        """See ``Backend.write_kv``."""
        self.write_kv_crc(layer, block_table, first, count, data, heads)

    def read_kv_crc(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> int:
        """``read_kv`` that also returns the CRC32C of the bytes, in the same pass."""
        if out.readonly:
            raise ValueError("out is read-only")
        return self._move_kv(self._library.relay_read_kv, layer, block_table, first, count, out, heads)

    def write_kv_crc(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> int:
        """``write_kv`` that also returns the CRC32C of the bytes, in the same pass. The caller compares it before it lets
        anyone read the blocks."""
        return self._move_kv(self._library.relay_write_kv, layer, block_table, first, count, data, heads)

    def _move_kv(
        self,
        function: "ctypes._FuncPointer",
        layer: int,
        block_table: np.ndarray,
        first: int,
        count: int,
        data: memoryview,
        heads: Heads | None,
    ) -> int:
        geometry = self._loaded().program.geometry
        first_head, num_heads = heads or (0, geometry.num_kv_heads)
        table = np.ascontiguousarray(block_table, dtype=np.int32)
        size = count * num_heads * (self.kv_bytes_per_token_layer() // geometry.num_kv_heads)
        if data.nbytes != size:
            raise ValueError(f"{count} tokens take {size} bytes, not {data.nbytes}")
        if not 0 <= layer < geometry.num_layers or first < 0 or count < 0:
            raise ValueError(f"layer {layer}, positions {first} + {count}")
        if first + count > len(table) * self._model.block_size:
            raise ValueError(records.ERRORS[3])
        crc = ctypes.c_uint32()
        model, blocks = ctypes.addressof(self._model), address(table)
        status = function(
            model, layer, first_head, num_heads, blocks, first, count, address(data), ctypes.addressof(crc)
        )
        if status:
            raise ValueError(records.ERRORS[status])
        return crc.value

    def copy_block(self, source: int, target: int) -> None:
        """See ``Backend.copy_block``."""
        if not (0 <= source < self._model.num_blocks and 0 <= target < self._model.num_blocks):
            raise ValueError(records.ERRORS[3])
        self._library.relay_copy_block(ctypes.addressof(self._model), source, target)

    def numerics(self) -> dict[str, str]:
        """See ``Backend.numerics``. Thread count, instruction set and limits are not in it: they change no bit."""
        return {
            **canon.parts(),
            "instructions": f"cpu {library.instruction_class(self.isa)}",
            "activation": "float32",
            "kv": self._kv_dtype,
            "probe": _probe(self.isa, self._kv_dtype),
        }

    def run_fma(self, items: int) -> int:
        """Floating-point operations of a loop of independent fmas on all threads: the benchmark's peak."""
        self._library.relay_measure_fma(self._pool, items)
        return items * 20_000 * 12 * 16 * 2

    def run_read(self, data: np.ndarray) -> None:
        """Sum float32 ``data`` (a multiple of 16,384 long) on all threads: the benchmark's memory bandwidth."""
        self._library.relay_measure_read(self._pool, data.ctypes.data, data.size)

    def close(self) -> None:
        """End the threads and drop the memory; idempotent."""
        if self._pool:
            self._library.pool_destroy(self._pool)
            self._library.relay_release(ctypes.addressof(self._model))
            self._pool = None
            self._model = records.Model()
            self._program = None
            self._bound = None
            self._buffers.clear()
            self._kv = self._scratch = np.empty(0, np.uint8)

    def _loaded(self) -> BoundProgram:
        if self._program is None:
            raise ValueError("no program is loaded")
        return self._program


@cache
def _probe(isa: str, kv_dtype: str) -> str:
    return probe_digest(CpuBackend(1, isa, max_tokens=64, max_sampled=4), kv_dtype)
