"""The contract between the engine and the arithmetic: a dozen fused ops over opaque arrays.

One ``Backend`` object belongs to one engine process and is driven by one thread (``read_kv`` and ``write_kv`` may be called by
transfer threads at the same time, on blocks no running step touches… a reader may read tokens that are already written).
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from relay.kernels.kv_frames import Heads
from relay.kernels.program import Program
from relay.kernels.weights import WeightSource
from relay.protocol.sampling import SamplingParams


@dataclass(slots=True)
class Batch:
    """Rows of one step as arrays. A *sequence row* r covers tokens row_starts[r]..row_starts[r+1]-1 of the step."""

    token_ids: np.ndarray  # int32 [tokens]; -1: the last token sampled for the row's slot
    positions: np.ndarray  # int32 [tokens]; absolute position in its sequence
    row_starts: np.ndarray  # int32 [rows + 1]
    slots: np.ndarray  # int32 [rows]
    block_tables: np.ndarray  # int32 [rows, max_blocks]; entries past a row's need are ignored
    sampled_rows: np.ndarray  # int32 [sampled]; rows whose last token's logits are drawn from, ascending
    capture_logits: bool = False  # keep the sampled rows' logits for ``Backend.logits``


@dataclass(slots=True)
class SampledToken:
    """One drawn token; ``logprob`` is of the raw distribution; ``top`` holds the ``logprobs`` best (id, logprob), best first."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


class Backend(Protocol):
    """Loads one program, owns its KV cache, runs ranges of ops and draws tokens."""

    name: str

    def load(self, program: Program, weights: WeightSource) -> None:
        """Bind ``program`` to ``weights`` (kept by reference where possible). Raises DoesNotFitError, CorruptModelError."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str) -> None:
        """Make the paged cache: ``num_blocks`` blocks of ``block_size`` tokens (a multiple of 16) for every layer.

        ``dtype`` is "float32" or "bfloat16". Memory is touched only when written. Raises DoesNotFitError.
        """
        ...

    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """Give ``slot`` to a sequence: sampler state is rebuilt from token ids alone, so a resume needs nothing else.

        The last of ``prompt_ids + output_ids`` becomes the slot's last token.
        """
        ...

    def release_slot(self, slot: int) -> None: ...

    def run(self, start: int, stop: int, batch: Batch) -> None:
        """Run ops [start, stop) of the program on ``batch``. Buffers persist between ranges of the same step."""
        ...

    def sample(self, batch: Batch) -> list[SampledToken]:
        """Draw one token for each of ``batch.sampled_rows`` and remember it as its slot's last token."""
        ...

    def logits(self) -> np.ndarray:
        """fp32 [sampled, vocab] of the last ``sample`` with ``capture_logits``; raw, before any sampling parameter."""
        ...

    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of K plus V of one token in one layer in the canonical layout."""
        ...

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        """Copy K then V of positions first..first+count-1 of a sequence into ``out``: canonical [token][kv_head][dim] each.

        ``heads``: of these alone; None: of all.
        """
        ...

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        """The inverse of ``read_kv``. Two threads may write different heads of the same positions at once."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every layer (copy-on-write)."""
        ...

    def numerics(self) -> dict[str, str]:
        """What determines this backend's bits apart from the weights: canon version, instruction class, dtypes, probe digest."""
        ...

    def close(self) -> None: ...


class QueueingBackend(Backend, Protocol):
    """A backend on a device with a queue of its own: ``run`` returns when the work is queued, ``sample`` waits for it.

    ``run`` may be called for step n + 1 (token ids -1 are the device's to know) before ``sample`` for step n.
    """

    def ended(self, batch: Batch) -> bool:
        """Whether all that was queued for ``batch`` is done, so that ``sample`` will not wait."""
        ...

    def at_once(self, batch: Batch) -> bool:
        """Whether ``batch`` is to be run whole: a layer at a time it would take longer to queue than to compute."""
        ...

    def kv_blocks_that_fit(self, block_size: int, fraction: float) -> int:
        """After ``load``: KV blocks for which ``fraction`` of the device has room beside what this process holds.
        Raises DoesNotFitError for none."""
        ...

    def warm_up(self, longest: int) -> None:
        """After ``allocate_kv``, before any sequence: compile what sequences of at most ``longest`` tokens need."""
        ...


class LayerSink(Protocol):
    """Told that K and V of these tokens are in the cache; called after the write and before that layer's attention."""

    def layer_written(self, layer: int, row: int) -> None:
        """``row`` is the sequence row of the running batch. Must not block: the step waits."""
        ...
