"""One step's integers on the device: packed on the host, moved in one copy, read by every kernel of the step."""

from dataclasses import dataclass, field

import numpy as np
import torch

from relay.kernels.backend import Batch
from relay.kernels.cuda.attention_decode import split_count
from relay.kernels.cuda.attention_prefill import prefill_work
from relay.kernels.program import Buffer

_ALIGN = 4  # int32 words: every array starts on 16 bytes, so kernels are compiled once


@dataclass(slots=True)
class Step:
    """Device views of one step. ``tokens`` rows are computed; in a captured graph all sizes are the bucket's."""

    rows: int  # step tokens, padding included
    sampled: int
    token_ids: torch.Tensor  # int32 [rows]
    positions: torch.Tensor  # int32 [rows + 1]; -1: padding
    token_rows: torch.Tensor  # int32 [rows]; row of block_tables
    token_slots: torch.Tensor  # int32 [rows]
    block_tables: torch.Tensor  # int32 [sequence rows, width]
    sampled_tokens: torch.Tensor  # int32 [sampled]; step token whose logits are drawn from
    sampled_slots: torch.Tensor  # int32 [sampled]
    decode_tokens: torch.Tensor  # int32 [decode entries]
    decode_rows: torch.Tensor  # int32 [decode entries]
    work: torch.Tensor  # int32 [prefill programs, 5]
    splits: int  # of the longest decode entry, a power of two
    keys: int = 0  # tokens of the sequences with prefill programs
    views: dict[Buffer, torch.Tensor] = field(default_factory=dict)  # the step's rows of the backend's buffers


class Layout:
    """Where each array lies in the packed buffer, given the sizes."""

    def __init__(
        self,
        rows: int,
        sequences: int,
        width: int,
        sampled: int,
        decodes: int,
        programs: int,
        splits: int,
        keys: int = 0,
    ) -> None:
        self.sizes = {
            "token_ids": (rows,),
            "positions": (rows + 1,),  # the last is no token's: padding of attention has it
            "token_rows": (rows,),
            "token_slots": (rows,),
            "block_tables": (sequences, width),
            "sampled_tokens": (sampled,),
            "sampled_slots": (sampled,),
            "decode_tokens": (decodes,),
            "decode_rows": (decodes,),
            "work": (programs, 5),
        }
        self.rows, self.sampled, self.splits, self.keys = rows, sampled, splits, keys
        self.offsets: dict[str, int] = {}
        self.words = 0
        for name, shape in self.sizes.items():
            self.offsets[name] = self.words
            self.words += -(-int(np.prod(shape)) // _ALIGN) * _ALIGN

    def views(self, buffer: torch.Tensor) -> Step:
        """The step over an int32 device buffer of at least ``words`` words."""
        arrays = {
            name: buffer[self.offsets[name] : self.offsets[name] + int(np.prod(shape))].view(shape)
            for name, shape in self.sizes.items()
        }
        return Step(rows=self.rows, sampled=self.sampled, splits=self.splits, keys=self.keys, **arrays)

    def host(self, packed: np.ndarray, name: str) -> np.ndarray:
        """The array's place in the packed host buffer, to be filled."""
        shape = self.sizes[name]
        return packed[self.offsets[name] : self.offsets[name] + int(np.prod(shape))].reshape(shape)


@dataclass(slots=True)
class Shape:
    """What of a batch decides how it runs: one new token a row is decode, more is prefill."""

    counts: np.ndarray  # int32 [sequence rows]
    decode: np.ndarray  # sequence rows with one token
    longest: int  # tokens of the longest decode row, its new one included
    programs: list[tuple[int, int, int, int, int]]
    keys: int  # tokens of the sequences with prefill programs

    @property
    def only_decode(self) -> bool:
        return len(self.decode) == len(self.counts)


def shape_of(batch: Batch, group: int, tile_rows: int) -> Shape:
    """Split a batch into decode entries and prefill programs."""
    counts = np.diff(batch.row_starts)
    decode = np.flatnonzero(counts == 1)
    chunks = [
        (int(row), int(batch.row_starts[row]), int(counts[row]), int(batch.positions[batch.row_starts[row]]))
        for row in np.flatnonzero(counts > 1)
    ]
    ends = batch.positions[batch.row_starts[decode]] if len(decode) else np.zeros(0, np.int32)
    longest = int(ends.max()) + 1 if len(ends) else 0
    keys = sum(tokens + start for _, _, tokens, start in chunks)
    return Shape(counts, decode, longest, prefill_work(chunks, group, tile_rows), keys)


def exact_layout(batch: Batch, shape: Shape) -> Layout:
    """Sizes of the batch itself, for a step that is not captured."""
    return Layout(
        len(batch.token_ids),
        len(shape.counts),
        batch.block_tables.shape[1],
        len(batch.sampled_rows),
        len(shape.decode),
        len(shape.programs),
        split_count(shape.longest) if shape.longest else 1,
        shape.keys,
    )


def fill(layout: Layout, packed: np.ndarray, batch: Batch, shape: Shape, spare_slot: int) -> None:
    """Write the batch into the packed host buffer; entries beyond it become padding: computed, never kept.

    ``spare_slot`` takes what padding rows draw.
    """
    tokens = len(batch.token_ids)
    rows = np.repeat(np.arange(len(shape.counts), dtype=np.int32), shape.counts)
    _put(layout, packed, "token_ids", batch.token_ids, 0)
    _put(layout, packed, "positions", batch.positions, -1)
    _put(layout, packed, "token_rows", rows, 0)
    _put(layout, packed, "token_slots", batch.slots[rows], 0)
    tables = layout.host(packed, "block_tables")
    width = min(tables.shape[1], batch.block_tables.shape[1])
    tables[: len(shape.counts), :width] = batch.block_tables[:, :width]
    last = batch.row_starts[batch.sampled_rows + 1] - 1
    _put(layout, packed, "sampled_tokens", last, max(tokens - 1, 0))
    _put(layout, packed, "sampled_slots", batch.slots[batch.sampled_rows], spare_slot)
    _put(layout, packed, "decode_tokens", batch.row_starts[shape.decode], layout.rows)
    _put(layout, packed, "decode_rows", shape.decode, 0)
    work = layout.host(packed, "work")
    work[: len(shape.programs)] = np.array(shape.programs, np.int32).reshape(-1, 5)
    work[len(shape.programs) :] = _no_work(layout)


def empty(layout: Layout, spare_slot: int) -> np.ndarray:
    """Packed integers of a step that is all padding."""
    packed = np.zeros(layout.words, np.int32)
    for name, padding in (("positions", -1), ("sampled_slots", spare_slot), ("decode_tokens", layout.rows)):
        layout.host(packed, name)[...] = padding
    layout.host(packed, "work")[...] = _no_work(layout)
    return packed


def _no_work(layout: Layout) -> tuple[int, int, int, int, int]:
    """A program of one row that is no token's, for one key of the first sequence: the least a program can do."""
    return 0, layout.rows, 1, 0, 0


def _put(layout: Layout, packed: np.ndarray, name: str, values: np.ndarray, padding: int) -> None:
    target = layout.host(packed, name)
    target[: len(values)] = values
    target[len(values) :] = padding
