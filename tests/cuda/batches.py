"""Steps made of sequence rows."""

from collections.abc import Sequence

import numpy as np

from relay.kernels.backend import Batch


def batch_of(pieces: Sequence[tuple[Sequence[int] | np.ndarray, int, Sequence[int] | np.ndarray, int]]) -> Batch:
    """(tokens, first position, block table, slot) of each sequence row."""
    width = max(len(table) for _, _, table, _ in pieces)
    tables = np.zeros((len(pieces), width), np.int32)
    for row, (_, _, table, _) in enumerate(pieces):
        tables[row, : len(table)] = table
    counts = [len(tokens) for tokens, *_ in pieces]
    return Batch(
        token_ids=np.concatenate([tokens for tokens, *_ in pieces]).astype(np.int32),
        positions=np.concatenate([np.arange(first, first + len(t)) for t, first, *_ in pieces]).astype(np.int32),
        row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        slots=np.array([slot for *_, slot in pieces], np.int32),
        block_tables=tables,
        sampled_rows=np.arange(len(pieces), dtype=np.int32),
    )
