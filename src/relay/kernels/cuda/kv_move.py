"""One kernel between the paged cache and frames in the canonical layout [layer][K or V][token][kv_head][dim], either way.

Bytes are moved as 32-bit words, so the type of the cache does not matter; on the way each program adds its words to its frame's
digest (``relay.kernels.kv_frames`` defines it). One launch serves any number of frames of any number of layers: a frame costs
eight words of a plan and not a launch. Where the heads lie in several caches, each has a launch of its own, whose sums add up to
the frames'. Frames and caches may lie in memory of another process or another GPU: they are only read or written.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import power_of_two_from
from relay.kernels.cuda.launcher import Launcher, Options
from relay.kernels.kv_frames import GOLDEN, MIX, KvRange

TOKENS = 4  # of one program: with 4 warps the fastest between two H200s and within one
# Words of a plan that describe one frame: offset, table, first, count, layer, layers, then twice two numbers of 16 bits: the first
# head in this cache and how many are moved; where they begin among the frame's heads and how many it has.
FIELDS = 8

_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
_MIX: tl.constexpr = tl.constexpr(MIX)


@triton.jit(do_not_specialize=["layer_units", "part_units"])
def move_kernel(
    cache,
    flat,
    plan,
    sums,
    layer_units,
    part_units,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROW: tl.constexpr,
    STORE: tl.constexpr,
):
    """TILE tokens of one layer of one frame: into ``flat``, or into the cache where STORE. WORDS: 32-bit words of a head. Units
    are 16 words, so that the compiler knows what it may load at once.
    """
    frame = tl.program_id(2)
    at = plan + frame * 8
    offset = tl.multiple_of(tl.load(at), 4).to(tl.int64)
    table = plan + tl.load(at + 1)
    first = tl.load(at + 2)
    count = tl.load(at + 3)
    layer = tl.load(at + 4)
    index = tl.program_id(1)
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if (index < tl.load(at + 5)) & (tl.program_id(0) * TILE < count):
        own, others = tl.load(at + 6), tl.load(at + 7)
        width = (others >> 16) * WORDS  # of a token in the frame
        e = tl.arange(0, ROW)
        mask = (tokens < count)[:, None] & (e < (own >> 16) * WORDS)[None, :]
        position = first + tokens
        block = tl.load(table + position // BLOCK - first // BLOCK, mask=tokens < count, other=0).to(tl.int64)
        row = block * (HEADS * BLOCK * WORDS) + position % BLOCK * WORDS
        place = row[:, None] + (((own & 0xFFFF) + e // WORDS) * (BLOCK * WORDS) + e % WORDS)[None, :]
        source = cache + (layer + index).to(tl.int64) * layer_units * 16
        total = tl.zeros((TILE, ROW), tl.uint64)
        for part in tl.static_range(2):
            half = part * part_units.to(tl.int64) * 16  # K of a layer may be over 8 GiB
            begin = (index * 2 + part).to(tl.int64) * count * width + (others & 0xFFFF) * WORDS
            word = begin + ((tokens * width)[:, None] + e[None, :])  # of one K or V there are less than 2^31
            if STORE:
                values = tl.load(flat + offset + word, mask=mask, other=0)
                tl.store(source + half + place, values, mask=mask)
            else:
                values = tl.load(source + half + place, mask=mask, other=0)
                tl.store(flat + offset + word, values, mask=mask)
            x = (word.to(tl.uint64) + 1) * _GOLDEN
            x = (x ^ (x >> 32)) * _MIX
            x = (x ^ (x >> 32)) | 1
            counted = (values.to(tl.uint32, bitcast=True).to(tl.uint64) + 1) * x
            total += tl.where(mask, counted, tl.zeros((TILE, ROW), tl.uint64))
        tl.atomic_add(sums + frame, tl.sum(tl.sum(total, 1), 0).to(tl.int64, bitcast=True))


def shared_heads(one: KvRange, first_head: int, heads: int, all_heads: int) -> range:
    """Those of ``one`` among ``heads`` heads from ``first_head`` on."""
    asked, many = one.heads or (0, all_heads)
    return range(max(asked, first_head), min(asked + many, first_head + heads))


class Plan:
    """Frames of one launch as words for the device: a sum of zero each, their descriptions, their block tables, each once."""

    def __init__(
        self,
        ranges: Sequence[KvRange],
        offsets: Sequence[int],
        block_size: int,
        heads: int,
        first_head: int = 0,
        all_heads: int = 0,
    ) -> None:
        """``offsets`` of the frames in bytes, multiples of 16. The cache has ``heads`` heads from ``first_head`` on, of
        ``all_heads``, which frames have that say nothing of heads; 0: there are no others. Each frame has some of the cache's."""
        self.frames = len(ranges)
        self.start = (
            -(-2 * self.frames // 4) * 4
        )  # the sums, two words each, then 16 bytes of alignment for what follows
        self.grid = (
            max(-(-one.count // TOKENS) for one in ranges),
            max(one.layers for one in ranges),
            self.frames,
        )
        rows: list[int] = []
        tables: list[np.ndarray] = []
        places: dict[
            tuple[int, int, int], int
        ] = {}  # of tables: frames of a launch are mostly other layers of the same tokens
        end_of_tables = self.frames * FIELDS
        for one, offset in zip(ranges, offsets, strict=True):
            blocks = one.first // block_size, (one.first + one.count - 1) // block_size + 1
            at = places.setdefault((id(one.block_table), *blocks), end_of_tables)
            if at == end_of_tables:
                tables.append(one.block_table[slice(*blocks)])
                end_of_tables += len(tables[-1])
            asked, many = one.heads or (0, all_heads or heads)
            shared = shared_heads(one, first_head, heads, all_heads or heads)
            assert shared, "a frame none of whose heads are in this cache"
            low, high = shared.start, shared.stop
            own, others = low - first_head | (high - low) << 16, low - asked | many << 16
            rows += [offset // 4, at, one.first, one.count, one.layer, one.layers, own, others]
        self.words = np.concatenate([np.array([0] * self.start + rows, np.int32), *tables], dtype=np.int32)


def move(kv: torch.Tensor, flat: torch.Tensor, plan: Plan, words: torch.Tensor, *, store: bool) -> torch.Tensor:
    """Launch for ``kv`` [layers, 2, blocks, kv_heads, block_size, dim] of a 16-bit type; ``words`` are the plan's on the device.

    ``flat`` is uint8 and holds the frames. Returns the sums, int64 [frames], for ``kv_frames.folded``.
    """
    _, _, _, heads, block_size, dim = kv.shape
    sums = words[: 2 * plan.frames].view(torch.int64)
    described = words[plan.start :]
    memory = (kv.view(torch.int32), flat.view(torch.int32), described, sums)
    assert all(one.data_ptr() % 16 == 0 for one in memory), "the kernel is compiled for memory at multiples of 16 bytes"
    strides = (kv.stride(0) // 32, kv.stride(1) // 32)
    constants = (heads, dim // 2, block_size, TOKENS, power_of_two_from(heads * dim // 2), store)
    _move(plan.grid, memory, strides, constants, Options(False))
    return sums


_move = Launcher(move_kernel)
