"""A KV store of plain numpy arrays, and the layout the transfer tests use."""

import numpy as np

from relay.transfer.contract import Identity, Layout

LAYOUT = Layout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
BLOCK = 16


class ArrayStore:
    """Blocks [layer, block, K or V, token, head, dim] of fp32."""

    def __init__(self, num_blocks: int = 16, seed: int | None = None) -> None:
        shape = (LAYOUT.num_layers, num_blocks, 2, BLOCK, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        self.blocks = np.zeros(shape, np.float32)
        if seed is not None:
            self.blocks[:] = np.random.default_rng(seed).standard_normal(shape, np.float32)

    def read_kv(self, layer, block_table, first, count, out, heads=(0, LAYOUT.num_kv_heads)):
        positions = np.arange(first, first + count)
        mine = self.blocks[..., heads[0] : sum(heads), :]
        rows = mine[layer, block_table[positions // BLOCK], :, positions % BLOCK]  # [count, 2, head, dim]
        out[:] = rows.transpose(1, 0, 2, 3).tobytes()

    def write_kv(self, layer, block_table, first, count, data, heads=(0, LAYOUT.num_kv_heads)):
        positions = np.arange(first, first + count)
        rows = np.frombuffer(data, np.float32).reshape(2, count, heads[1], LAYOUT.head_dim)
        mine = self.blocks[..., heads[0] : sum(heads), :]
        mine[layer, block_table[positions // BLOCK], :, positions % BLOCK] = rows.transpose(1, 0, 2, 3)

    def tokens(self, block_table, count):
        """Everything of positions 0..count-1: [layer, count, 2, head, dim]."""
        positions = np.arange(count)
        table = np.asarray(block_table)
        return self.blocks[:, table[positions // BLOCK], :, positions % BLOCK].swapaxes(0, 1).copy()


def identity(worker: str, incarnation: int = 1, **other) -> Identity:
    values = {"model_digest": "m" * 8, "numerics_id": "n" * 8, "layout": LAYOUT} | other
    return Identity(worker=worker, incarnation=incarnation, **values)
