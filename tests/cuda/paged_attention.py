"""One sequence in paged caches whose free memory is NaN, on any device: attention that ends where a block, tile or split begins."""

from collections.abc import Iterable

import torch

from relay.kernels.cuda import attention_hopper
from relay.kernels.cuda.attention_decode import decode_attention, decode_scratch, split_count
from relay.kernels.cuda.attention_prefill import prefill_attention, prefill_tile, prefill_work
from relay.kernels.cuda.launch import HOPPER_SHARED

GROUP = 4
KV_HEADS = 2
LENGTH = 513
ENDS = [64, 128, 512]
"""Each the first position of a tile and of a block of 64; the last also of a split."""
CHUNKS = [(49, 65), (113, 135), (497, 513)]
"""Each with a program that ends at one of ENDS, whether it takes 32 rows or 64; the second goes on behind it."""
HOPPER = "hopper"
Tile = tuple[int, int]  # rows and warps of a program


def tiles() -> list[Tile]:
    """All that ``prefill_tile`` chooses, by head and GPU."""
    return sorted(
        {prefill_tile(dim, shared) for dim in (64, 128, 256) for shared in (99 << 10, 163 << 10, HOPPER_SHARED)}
    )


class PagedSequence:
    """Its tokens' q, K and V; caches of it with blocks of any size."""

    def __init__(self, dim: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        self.dim, self.device = dim, device
        self._generator = torch.Generator().manual_seed(11)
        self.qkv = self._random(LENGTH, (GROUP + 2) * KV_HEADS * dim).to(device, dtype)
        self.keys, self.values = (self._random(LENGTH, KV_HEADS, dim).to(device, dtype) for _ in range(2))
        # A query's own key weighs much, so it is missed.
        self.keys[ENDS] = self.qkv[ENDS, : GROUP * KV_HEADS * dim].view(len(ENDS), KV_HEADS, GROUP, dim)[:, :, 0]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def cached(self, block: int) -> "Paged":
        """In blocks of ``block`` tokens, anywhere."""
        count = -(-LENGTH // block)
        order = torch.randperm(count + 2, generator=self._generator)[:count]
        caches = []
        for kept in (self.keys, self.values):
            cache = torch.full(
                (count + 2, KV_HEADS, block, self.dim), float("nan"), dtype=kept.dtype, device=kept.device
            )
            padded = torch.full((count * block, KV_HEADS, self.dim), float("nan"), dtype=kept.dtype, device=kept.device)
            padded[:LENGTH] = kept
            cache[order.to(kept.device)] = padded.view(count, block, KV_HEADS, self.dim).transpose(1, 2)
            caches.append(cache)
        return Paged(self, caches, order.to(self.device, torch.int32)[None])

    def exact(self, last: int) -> torch.Tensor:
        """The output of the token at ``last`` in fp64."""
        q = self.qkv[last, : GROUP * KV_HEADS * self.dim].double().view(KV_HEADS, GROUP, self.dim)
        keys, values = (one[: last + 1].double().transpose(0, 1) for one in (self.keys, self.values))
        weights = (q @ keys.transpose(1, 2) * self.dim**-0.5).softmax(-1)
        return (weights @ values).view(-1)


class Paged:
    def __init__(self, sequence: PagedSequence, caches: list[torch.Tensor], table: torch.Tensor) -> None:
        self._sequence, self._caches, self._table = sequence, caches, table

    def prefilled(self, tile: Tile | str) -> torch.Tensor:
        """Outputs of CHUNKS, one below the other; ``tile`` or HOPPER's kernel."""
        return torch.cat([self._prefill(first, stop, tile) for first, stop in CHUNKS])

    def _prefill(self, first: int, stop: int, tile: Tile | str) -> torch.Tensor:
        sequence = self._sequence
        out = torch.full((stop - first, GROUP * KV_HEADS * sequence.dim), float("nan"), device=sequence.device)
        rows = attention_hopper.TILE_ROWS if isinstance(tile, str) else tile[0]
        items = prefill_work([(0, 0, stop - first, first)], GROUP, rows)
        work = torch.tensor(items, dtype=torch.int32, device=sequence.device)
        arguments = (sequence.qkv[first:stop].contiguous(), *self._caches, self._table, work, out, sequence.dim**-0.5)
        if isinstance(tile, str):
            attention_hopper.prefill_attention(*arguments, stop)
        else:
            prefill_attention(*arguments, tile_rows=rows, warps=tile[1])
        return out

    def decoded(self) -> torch.Tensor:
        """Outputs of ENDS, each as a decode."""
        sequence, count = self._sequence, len(ENDS)
        out = torch.full((count, GROUP * KV_HEADS * sequence.dim), float("nan"), device=sequence.device)
        positions, entries, rows = (
            torch.tensor(one, dtype=torch.int32, device=sequence.device) for one in (ENDS, range(count), [0] * count)
        )
        splits = split_count(LENGTH)
        scratch = decode_scratch(count, GROUP * KV_HEADS, sequence.dim, splits, sequence.device)
        decode_attention(
            sequence.qkv[ENDS],
            *self._caches,
            self._table,
            positions,
            entries,
            rows,
            scratch,
            out,
            sequence.dim**-0.5,
            splits,
        )
        return out


def at_ends(prefilled: torch.Tensor) -> torch.Tensor:
    """The rows of ``Paged.prefilled`` that ``Paged.decoded`` has."""
    tokens = [token for first, stop in CHUNKS for token in range(first, stop)]
    return prefilled[[tokens.index(end) for end in ENDS]]


def check_tiles(dim: int, blocks: Iterable[int], dtype: torch.dtype, device: str, hopper: bool = False) -> None:
    """Every tile, every size of blocks and, if ``hopper``, the Hopper kernel give the bits of any other; decode gives them too."""
    sequence = PagedSequence(dim, dtype, device)
    want = None
    for block in blocks:
        paged = sequence.cached(block)
        choices: list[Tile | str] = [*tiles(), *([HOPPER] if hopper and block % 64 == 0 else [])]
        for tile in choices:
            found = paged.prefilled(tile)
            want = found if want is None else want
            assert torch.equal(found, want), f"dim {dim}, blocks of {block}, tile {tile}"
        assert torch.equal(paged.decoded(), at_ends(want)), f"dim {dim}, blocks of {block}: decode"
    assert want is not None
    for end, found in zip(ENDS, at_ends(want), strict=True):
        assert torch.allclose(found.double(), sequence.exact(end), atol=1e-2), f"dim {dim}: the token at {end}"
