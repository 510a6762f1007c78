"""The Backend on one CUDA device: bf16 (or fp16) weights, activations and KV; steps that are not large replayed from CUDA graphs.

Bits: docs/decisions/0004-gpu-canon.md. A step is one host-to-device copy of integers, the launches of its ops (or one graph), the
sampler's kernels and one copy of the drawn tokens back. Every op's result of a row depends on that row alone, so padding a
decode batch up to a captured size cannot change a bit.

``run`` up to the last op queues the draw too, into a pinned buffer of the step's own; ``sample`` waits for it. A caller may
therefore ``run`` step n + 1 (its token ids -1) before it calls ``sample`` for step n, and no host time is exposed.
"""

from collections.abc import Mapping, Sequence, Set

import numpy as np
import torch
import triton

from relay.errors import UsageError
from relay.kernels.backend import Batch, SampledToken
from relay.kernels.cuda import linear_choice
from relay.kernels.cuda.attention_prefill import tile_rows_for
from relay.kernels.cuda.canon import gpu_parts
from relay.kernels.cuda.drawing import PLAIN, Mode, Sampler, new_tables
from relay.kernels.cuda.draws import Draws
from relay.kernels.cuda.graphs import StepGraphs
from relay.kernels.cuda.kv_copy import KvTransfers, Moving, Pool
from relay.kernels.cuda.launch import OwnDevice, device_errors
from relay.kernels.cuda.loading import coded_names, load_weights, weight_bytes
from relay.kernels.cuda.memory import Allocate, Fitting, check_device, does_not_fit, kv_blocks_that_fit, kv_pool
from relay.kernels.cuda.ops import SAMPLED, Device, Launch, compile_ops
from relay.kernels.cuda.rank_meetings import AreaPlan, Links
from relay.kernels.cuda.sampler_check import check_draws
from relay.kernels.cuda.staging import Staging
from relay.kernels.cuda.step import Step, exact_layout, fill, shape_of
from relay.kernels.cuda.weights import TYPES, HeldWeights, Progress, WeightUpload, no_progress
from relay.kernels.cuda.written import LayerEvents
from relay.kernels.kv_frames import Heads, KvRange, Place
from relay.kernels.probe import probe_digest
from relay.kernels.program import Buffer, Linear, Program
from relay.kernels.ranks.split import Meeting, met_points
from relay.kernels.weights import WeightSource
from relay.protocol.sampling import SamplingParams


class CudaBackend:
    """Implements ``relay.kernels.backend.Backend``; ``run`` returns once the work is queued, ``sample`` waits for it.

    ``max_rows``: sequences of a step; ``max_tokens``: tokens of a step for which the library is tested at load (larger steps work).
    """

    name = "cuda"

    def __init__(
        self,
        device: str = "cuda:0",
        max_rows: int = 256,
        max_tokens: int = 8192,
        graphs: bool = True,
        progress: Progress = no_progress,
        shared: HeldWeights | None = None,
        sharers: int = 1,
        dtype: str = "bfloat16",
        quantized: bool = False,
    ) -> None:
        """``dtype``: "bfloat16" or "float16" of weights, activations and KV alike; ``quantized``: weights of
        linears in int8 instead.

        ``shared``: weights of another process, used instead of those ``load`` is given; ``sharers`` bear their memory."""
        check_device(device)
        self._own = OwnDevice(device)
        self._own.enter()
        self._device = Device(device, max_decodes=max_rows)
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._fitting = Fitting(device, f"buffers and graphs for steps of {max_tokens} tokens in {max_rows} rows")
        self._progress = progress
        self._shared, self._sharers = shared, sharers
        self.dtype = dtype
        self._quantized = quantized
        self._type = TYPES[dtype]
        self._stream = torch.cuda.Stream(device)
        self._transfers = KvTransfers(device)
        self._staging = Staging(device)
        self._tables = new_tables(max_rows, device, self._staging)
        self._device.last_tokens = self._tables.last_tokens
        self._graphs = StepGraphs(self, max_rows, max_tokens) if graphs else None
        self._captured: np.ndarray | None = None
        self._draws = Draws(max_rows)
        self._meetings: Mapping[int, Meeting] = {}
        self._kept: Set[str] = frozenset()
        self._most_heads = 0  # of ranks
        self._capacity = 0
        self._step: Step | None = None
        self._mode: Mode = PLAIN
        self._replayed = False

    # --- set-up -----------------------------------------------------------------------------------------------------

    @device_errors()
    def load(self, program: Program, weights: WeightSource) -> None:
        """Raises CorruptModelError for a missing weight or a wrong shape, DoesNotFitError where memory runs out."""
        coded = coded_names(program, self._kept) if self._quantized else frozenset()
        try:
            upload = WeightUpload(self._device.name, self._progress, self._type)
            load_weights(program, weights, self._device, upload, self._shared, coded=coded)
            self.bind(program)
        except torch.cuda.OutOfMemoryError as error:
            raise does_not_fit(self._device.name, "the weights", weight_bytes(program, coded)) from error

    def load_tensors(
        self, program: Program, matrices: dict[str, torch.Tensor], vectors: dict[str, torch.Tensor]
    ) -> None:
        """As ``load`` from [n, k] of the backend's type and fp32 tensors that are on the device already."""
        self._device.matrices.update(matrices)
        self._device.vectors.update(vectors)
        self.bind(program)

    def set_meetings(self, meetings: Mapping[int, Meeting], areas: AreaPlan, kept: Set[str], most_heads: int) -> None:
        """Before ``load``: this is one rank of several, and meets the others after these ops. ``kept``: never quantised.
        ``most_heads``: KV heads of the rank with the most, by which all choose their graphs."""
        self._meetings, self._device.areas, self._kept, self._most_heads = meetings, areas, kept, most_heads

    def set_links(self, links: Links) -> None:
        """Before the first step: where the other ranks are."""
        self._device.links = links

    def add_vector(self, name: str, values: np.ndarray) -> None:
        """An fp32 vector that no op names but a meeting does."""
        self._device.vectors[name] = torch.from_numpy(np.array(values, np.float32)).to(self._device.name)

    def bind(self, program: Program) -> None:
        """Test the library on every weight shape and the sampler on its definition; prepare the launches of every op."""
        self._program = program
        torch.cuda.synchronize(self._device.name)  # the weights came on other streams
        linear_choice.use_exact_library()
        device = self._device
        with torch.cuda.stream(self._stream):
            for op in program.ops:
                if isinstance(op, Linear) and op.weight not in device.scales:
                    w = device.matrices[op.weight]
                    key = (w.shape[0], w.shape[1])
                    if key not in device.layers:
                        device.layers[key] = linear_choice.LinearLayer(*key, dtype=self._type)
                        largest = self._max_rows if op.dst in SAMPLED else self._max_tokens
                        device.layers[key].test(w, largest)
            check_draws(device.name, dtype=self._type)
        self._stream.synchronize()
        self._launches: list[Launch] = compile_ops(program, device, self._meetings)
        self._sampler = Sampler(self._max_rows, program.geometry.vocab, device.name, self._tables)

    @device_errors()
    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str, allocate: Allocate | None = None) -> None:
        """``allocate`` the pool there and not by torch. Raises UsageError for a dtype other than the backend's or an odd block
        size, DoesNotFitError."""
        if dtype != self.dtype:
            raise UsageError(f"the cuda backend keeps KV in the type of its activations, {self.dtype}, not in {dtype}")
        if block_size % 16 or block_size & (block_size - 1):
            raise UsageError(f"block size {block_size}: the cuda backend needs a power of two of at least 16")
        g = self._program.geometry
        shape = (g.num_layers, 2, num_blocks, g.num_kv_heads, block_size, g.head_dim)
        kv = kv_pool(shape, self._type, self._device.name, allocate)
        self._device.use_cache(kv)
        self._transfers.use([(0, kv)])
        self._block_size = block_size
        points, ranks = self._program.sink_points, bool(self._meetings)
        points = met_points(points, self._meetings) if ranks else points
        self._written = LayerEvents(points, num_blocks, block_size, ranks=ranks)
        self._group = g.num_heads // g.num_kv_heads
        self._tile_rows = tile_rows_for(block_size, g.head_dim)

    @device_errors()
    def kv_blocks_that_fit(self, block_size: int, fraction: float = 0.9) -> int:
        """Blocks for which ``fraction`` of the device has room beside its weights and buffers. Raises DoesNotFitError."""
        with self._fitting, torch.cuda.stream(self._stream):
            self.reserve(self._max_tokens, self._max_rows)
        self._stream.synchronize()
        torch.cuda.empty_cache()
        borrowed = self._shared.num_bytes // self._sharers if self._shared is not None else 0
        return kv_blocks_that_fit(self._device.name, self._program.geometry, block_size, fraction, borrowed)

    @device_errors()
    def warm_up(self, longest: int) -> None:
        """Compile and capture what sequences of up to ``longest`` tokens need; overwrites block 0. Raises DoesNotFitError."""
        with self._fitting, torch.cuda.stream(self._stream):
            self.reserve(self._max_tokens, self._max_rows)
            if self._graphs is not None:
                self._graphs.warm_up(longest)
            check_draws(self._device.name, 1, self._type, self._program.geometry.vocab)
        for count in sorted({min(count, longest, self._max_tokens) for count in (2, 12, 17, 48, 130, 700, 1 << 30)}):
            self.run(0, len(self._launches), self._prompt(count))
        # Keys beyond L2 have a kernel of their own on Hopper.
        self.run(0, len(self._launches), self._prompt(2, longest - 2))
        self._stream.synchronize()
        raw = memoryview(bytearray(self._transfers.frame_bytes(KvRange(0, 1, 0, 1, np.zeros(1, np.int32)))))
        self.read_kv(0, np.zeros(1, np.int32), 0, 1, raw)
        self.write_kv(0, np.zeros(1, np.int32), 0, 1, raw)
        self._draws.forget()

    def _prompt(self, count: int, first: int = 0) -> Batch:
        """A step of ``count`` tokens of a prompt that lies in block 0 whole; it draws nothing."""
        return Batch(
            token_ids=np.zeros(count, np.int32),
            positions=np.arange(first, first + count, dtype=np.int32),
            row_starts=np.array([0, count], np.int32),
            slots=np.zeros(1, np.int32),
            block_tables=np.zeros((1, -(-(first + count) // self._block_size)), np.int32),
            sampled_rows=np.zeros(0, np.int32),
        )

    # --- a step -----------------------------------------------------------------------------------------------------

    @device_errors()
    def run(self, start: int, stop: int, batch: Batch) -> None:
        self._own.enter()
        with torch.cuda.stream(self._stream):
            if start == 0:
                self._transfers.join(self._stream)
                self._tables.flush()
                self._mode = self._sampler.mode(batch)
                self._written.begin(batch)
                self._begin(batch, whole=stop == len(self._launches))
            assert self._step is not None
            if not self._replayed:
                for launch in self._launches[start:stop]:
                    launch(self._step)
            self._written.ran(start, stop)
            if stop == len(self._launches):
                self._queue_draw(batch, self._step)

    def at_once(self, batch: Batch) -> bool:
        return self._graphs is not None and len(batch.token_ids) <= self._graphs.most_tokens

    def _begin(self, batch: Batch, whole: bool) -> None:
        """Move the step's integers to the device; a step that is run whole, and has a graph, is replayed at once."""
        shape = shape_of(batch, self._group, self._tile_rows)
        self._replayed = False
        if whole and self._graphs is not None:
            step = self._graphs.replay(batch, shape, draw=self._mode == PLAIN)
            if step is not None:
                self._step, self._replayed = step, True
                return
        layout = exact_layout(batch, shape)
        self.reserve(layout.rows, layout.sampled)
        packed, slot = self._staging.host(layout.words)
        fill(layout, packed, batch, shape, self._max_rows)
        self._step = layout.views(self._staging.upload(slot, layout.words))

    def reserve(self, rows: int, sampled: int) -> None:
        """Grow the buffers to ``rows`` step tokens and ``sampled`` rows, padding for the library included."""
        if sampled > self._max_rows:
            raise UsageError(f"a step samples {sampled} rows, the backend was made for {self._max_rows}")
        needed = max(rows, self._max_rows)
        if needed <= self._capacity:
            return
        self._capacity = linear_choice.row_counts(needed)[-1]
        self._stream.synchronize()
        self._step = None
        if self._graphs is not None:
            self._graphs.forget()
        sampled_rows = -(-self._max_rows // 256) * 256
        self._device.make_buffers(self._program.geometry, self._capacity, sampled_rows, self._type)

    def launch_all(self, step: Step, draw: bool) -> None:
        """Every op and, if ``draw``, the plain sampler, on the current stream: what a graph captures."""
        for launch in self._launches:
            launch(step)
        if draw:
            self._sampler.draw(self._logits(step.sampled), step, PLAIN)

    def _logits(self, sampled: int) -> torch.Tensor:
        return self._device.buffers[Buffer.L][:sampled]

    # --- sampling ---------------------------------------------------------------------------------------------------

    @device_errors()
    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        self._own.enter()
        if not 0 <= slot < self._max_rows:
            raise UsageError(f"slot {slot}, but the backend was made for {self._max_rows} rows")
        with torch.cuda.stream(self._stream):
            self._sampler.bind(slot, params, choice, prompt_ids, output_ids)

    def release_slot(self, slot: int) -> None:
        self._sampler.release(slot)

    def _queue_draw(self, batch: Batch, step: Step) -> None:
        """Draw on the device and queue the copy of what was drawn (and of logits that the caller wants) to the host."""
        rows, details = len(batch.sampled_rows), None
        if rows and not (self._replayed and self._mode == PLAIN):
            details = self._sampler.draw(self._logits(step.sampled), step, self._mode)
        kept = self._logits(rows).clone() if batch.capture_logits else None
        logprobs = self._sampler.logprobs_of(batch.slots[batch.sampled_rows].tolist())
        self._draws.queue(batch, logprobs, self._sampler.drawn, details[:rows] if details is not None else None, kept)

    @device_errors()
    def ended(self, batch: Batch) -> bool:
        """Whether all that is queued for ``batch`` is done. The draw of a batch without sampled rows ends with this."""
        return self._draws.ended(batch)

    @device_errors()
    def sample(self, batch: Batch) -> list[SampledToken]:
        """Raises InvalidLogits (its ``row`` indexes ``sampled_rows``)."""
        self._own.enter()
        pending = self._draws.take(batch)
        tokens = pending.tokens()
        self._captured = None
        if pending.logits is not None:
            with torch.cuda.stream(self._stream):
                self._captured = pending.logits.float().cpu().numpy()
        return tokens

    def logits(self) -> np.ndarray:
        if self._captured is None:
            raise RuntimeError("the last sample did not capture logits")
        return self._captured

    # --- KV ---------------------------------------------------------------------------------------------------------

    def kv_bytes_per_token_layer(self) -> int:
        return 2 * self._program.geometry.kv_width * 2

    stage_depth = 12  # frames of a connection that are copied at once

    @device_errors()
    def register(self, region: memoryview) -> None:
        self._transfers.register(region)

    def unregister(self, region: memoryview) -> None:
        self._transfers.unregister(region)

    @device_errors()
    def allocate(self, size: int) -> memoryview:
        """Pinned host memory for frames, as long as it is referenced."""
        return self._transfers.allocate(size)

    @property
    def pool(self) -> torch.Tensor:
        """The cache: [layers, K or V, blocks, heads, tokens, dim]."""
        assert self._device.kv is not None
        return self._device.kv

    def use_pools(self, pools: Sequence[Pool]) -> None:
        """This is rank 0, and reads and writes KV of all heads: ``pools`` are the ranks', its own the first."""
        self._transfers.use(pools)

    @device_errors()
    def stage(self, frames: Sequence[tuple[KvRange, Place]]) -> Moving:
        """Begin to copy frames out of the cache; their bytes are in their places after ``wait``."""
        return self._transfers.stage(frames, self._written)

    @device_errors()
    def collect(self, frames: Sequence[tuple[KvRange, Place]]) -> Moving:
        """Begin to copy frames into the cache: steps and reads that are queued later see them."""
        return self._transfers.collect(frames)

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        self.stage([(KvRange(layer, 1, first, count, block_table, heads), out)]).wait()

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        self.collect([(KvRange(layer, 1, first, count, block_table, heads), data)]).wait()

    @device_errors()
    def copy_block(self, source: int, target: int) -> None:
        assert self._device.kv is not None
        self._own.enter()
        self._transfers.join(self._stream)
        with torch.cuda.stream(self._stream):
            self._device.kv[:, :, target].copy_(self._device.kv[:, :, source])
            self._written.copied()

    # --- identity ---------------------------------------------------------------------------------------------------

    def numerics(self) -> dict[str, str]:
        probe = CudaBackend(
            self._device.name, max_rows=4, max_tokens=64, graphs=False, dtype=self.dtype, quantized=self._quantized
        )
        return {
            **gpu_parts(),
            "instructions": "cuda sm_{}{}".format(*torch.cuda.get_device_capability()),
            "libraries": f"torch {torch.__version__} triton {triton.__version__} cuda {torch.version.cuda}",
            **({"weights": "int8 by output"} if self._quantized else {}),
            "activation": self.dtype,
            "kv": self.dtype,
            "probe": probe_digest(probe, self.dtype),
        }

    def close(self) -> None:
        self._stream.synchronize()
        if self._graphs is not None:
            self._graphs.forget()
        device = self._device
        for held in (device.buffers, device.scratch, device.matrices, device.scales, device.vectors):
            held.clear()  # type: ignore[attr-defined]
        device.use_cache(None)
        device.product = None
        self._transfers.use([])
