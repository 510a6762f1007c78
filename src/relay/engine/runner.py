"""The runner: turns a ``StepPlan`` into arrays and calls the backend. Holds block tables by slot and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import cast

import numpy as np

from relay.engine.limits import SchedulerLimits
from relay.engine.step import StepPlan, StepResult
from relay.errors import DeviceLostError
from relay.kernels.backend import Backend, Batch, LayerSink, QueueingBackend
from relay.kernels.program import Program
from relay.kernels.sampler import InvalidLogits
from relay.protocol.block_hash import UNIT_TOKENS

DIGEST_BYTES = 16


@dataclass(slots=True)
class StartedStep:
    """A step between ``start`` and ``finish``. ``captured``: for each sampled row, whether its logits are hashed."""

    step: int
    batch: Batch | None
    captured: list[bool]
    failure: StepResult | None


class Runner:
    """Drives one loaded backend whose KV cache is allocated with the block size and count of ``limits``."""

    def __init__(self, backend: Backend, program: Program, limits: SchedulerLimits) -> None:
        self._backend = backend
        self._num_ops = len(program.ops)
        self._sink_points: tuple[int, ...] = getattr(backend, "sink_points", program.sink_points)
        self._at_once: Callable[[Batch], bool] | None = getattr(backend, "at_once", None)
        self._num_layers = program.geometry.num_layers
        self._block_size = limits.block_size
        self._tables = np.zeros((limits.max_num_seqs, limits.max_blocks_per_seq), np.int32)  # [slots, blocks]
        self._bound: set[int] = set()
        self._capturing: set[int] = set()

    def execute(self, plan: StepPlan, sink: LayerSink | None = None) -> StepResult:
        """Run one step: ``finish(start(plan, sink))``."""
        return self.finish(self.start(plan, sink))

    def start(self, plan: StepPlan, sink: LayerSink | None = None) -> StartedStep:
        """Compute one step up to its draw; where the backend queues its work, return before it is done.

        ``sink`` hears of each layer of each row with prefill tokens, right after K and V of the layer are written (or their
        writing is queued before any read that follows; a backend for which that is later has ``sink_points`` of its own), or
        of all after the last where the backend runs the step ``at_once``. An
        exception of backend or sink becomes the step's failure; where a row's own binding or sink raised, its slot is blamed.
        A repeated step announces the same positions again, with the same bytes. DeviceLostError passes: nothing can be
        computed any more.
        """
        blamed: list[int] = []
        try:
            self._prepare(plan, blamed)
            batch = self._batch(plan)
            captured = [slot in self._capturing for slot in batch.slots[batch.sampled_rows].tolist()]
            self._run(plan, batch, sink, blamed)
        except DeviceLostError:
            raise
        except Exception as error:  # whatever it is, it ends these rows and not the loop
            return StartedStep(plan.step, None, [], _failure(plan.step, error, blamed))
        return StartedStep(plan.step, batch, captured, None)

    def ended(self, started: StartedStep) -> bool:
        """Whether ``finish`` would return without waiting. Only of backends that queue."""
        if started.failure is not None or started.batch is None:
            return True
        return cast(QueueingBackend, self._backend).ended(started.batch)

    def finish(self, started: StartedStep) -> StepResult:
        """Draw (or fetch what was drawn). Steps are finished in the order they were started in, each before the second after it
        starts."""
        batch = started.batch
        if started.failure is not None or batch is None:
            return started.failure or StepResult(started.step, [])
        try:
            tokens = [[token] for token in self._backend.sample(batch)] if len(batch.sampled_rows) else []
            digests = self._logit_digests(batch, started.captured) if batch.capture_logits else None
        except InvalidLogits as error:
            slot = int(batch.slots[batch.sampled_rows[error.row]])
            reason = f"no token can be drawn: {error.reason}"
            return StepResult(started.step, [], error=reason, failed_slots=[slot])
        except DeviceLostError:
            raise
        except Exception as error:
            return _failure(started.step, error, [])
        return StepResult(started.step, tokens, digests)

    def kv_digests(self, block_table: list[int], num_tokens: int) -> list[bytes]:
        """BLAKE2b-16 of each full unit of 16 tokens below ``num_tokens``: K then V of layer 0, of layer 1, …, canonical bytes."""
        num_units = num_tokens // UNIT_TOKENS
        if num_units == 0:
            return []
        half = UNIT_TOKENS * self._backend.kv_bytes_per_token_layer() // 2  # bytes of K (or V) of a unit in a layer
        buffer = memoryview(bytearray(2 * half * num_units))
        hashers = [blake2b(digest_size=DIGEST_BYTES) for _ in range(num_units)]
        table = np.asarray(block_table, np.int32)
        values = half * num_units
        for layer in range(self._num_layers):
            self._backend.read_kv(layer, table, 0, num_units * UNIT_TOKENS, buffer)
            for unit, hasher in enumerate(hashers):
                hasher.update(buffer[unit * half : (unit + 1) * half])
                hasher.update(buffer[values + unit * half : values + (unit + 1) * half])
        return [hasher.digest() for hasher in hashers]

    def _prepare(self, plan: StepPlan, blamed: list[int]) -> None:
        backend = self._backend
        for slot in plan.released:
            self._release(slot)
        for binding in plan.bound:
            slot = binding.slot
            self._release(slot)
            blamed.append(slot)
            backend.bind_slot(slot, binding.params, binding.choice, binding.prompt_ids, binding.output_ids)
            blamed.pop()
            self._bound.add(slot)
            if binding.capture:
                self._capturing.add(slot)
        for source, target in plan.block_copies:
            backend.copy_block(source, target)
        for slot, index, block in plan.new_blocks:
            self._tables[slot, index] = block

    def _release(self, slot: int) -> None:
        if slot in self._bound:
            self._bound.discard(slot)
            self._capturing.discard(slot)
            self._backend.release_slot(slot)

    def _batch(self, plan: StepPlan) -> Batch:
        rows = plan.rows
        counts = np.array([row.count for row in rows], np.int32)
        row_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=row_starts[1:])
        starts = np.array([row.start for row in rows], np.int32)
        positions = np.arange(row_starts[-1], dtype=np.int32) + np.repeat(starts - row_starts[:-1], counts)
        token_ids = np.full(row_starts[-1], -1, np.int32)
        for index, row in enumerate(rows):
            if row.token_ids is not None:
                token_ids[row_starts[index] : row_starts[index + 1]] = row.token_ids
        slots = np.array([row.slot for row in rows], np.int32)
        width = -(-int((starts + counts).max()) // self._block_size)
        sampled = [index for index, row in enumerate(rows) if row.sample]
        return Batch(
            token_ids=token_ids,
            positions=positions,
            row_starts=row_starts,
            slots=slots,
            block_tables=np.ascontiguousarray(self._tables[slots, :width]),
            sampled_rows=np.array(sampled, np.int32),
            capture_logits=bool(self._capturing) and any(rows[index].slot in self._capturing for index in sampled),
        )

    def _run(self, plan: StepPlan, batch: Batch, sink: LayerSink | None, blamed: list[int]) -> None:
        prefill = (
            [index for index, row in enumerate(plan.rows) if row.token_ids is not None] if sink is not None else []
        )
        start = 0
        if sink is not None and prefill:
            if self._at_once is not None and self._at_once(batch):
                self._backend.run(0, self._num_ops, batch)
                start = self._num_ops
            for layer, stop in enumerate(self._sink_points):
                if start < stop:
                    self._backend.run(start, stop, batch)
                    start = stop
                for index in prefill:
                    blamed.append(plan.rows[index].slot)
                    sink.layer_written(layer, index)
                    blamed.pop()
        if start < self._num_ops:
            self._backend.run(start, self._num_ops, batch)

    def _logit_digests(self, batch: Batch, captured: list[bool]) -> list[bytes]:
        """One a sampled row: BLAKE2b-16 of its fp32 logits, empty for a row that does not capture."""
        logits = self._backend.logits()
        if logits.dtype != np.float32 or len(logits) != len(batch.sampled_rows):
            raise TypeError(f"logits are {logits.dtype} {logits.shape}, not float32 of {len(batch.sampled_rows)} rows")
        return [
            blake2b(np.ascontiguousarray(values).data, digest_size=DIGEST_BYTES).digest() if capture else b""
            for capture, values in zip(captured, logits, strict=True)
        ]


def _failure(step: int, error: Exception, blamed: list[int]) -> StepResult:
    return StepResult(step, [], error=f"{type(error).__name__}: {error}", failed_slots=blamed)
