"""What each rank of a tensor-parallel worker computes: pure functions of a program and the number of ranks.

Every rank runs a program with the ops of the whole one, index by index, over its share of heads, intermediate width and vocabulary;
after some ops ranks *meet*: partial products are summed, or parts of the logits exchanged. The canonical order of a sum is in
docs/decisions/0014-several-gpus.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from relay.devices import MAX_RANKS
from relay.errors import CorruptModelError, UsageError
from relay.kernels.program import Buffer, Geometry, Linear, Op, Program

UNIT = 64  # columns of the intermediate width and rows of the vocabulary go to ranks in units of a panel

Range = tuple[int, int]  # first, one past the last
Summable = TypeVar("Summable")


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a packed matrix or vector: these outputs, one range below the other, and these columns (None: all)."""

    name: str
    rows: tuple[Range, ...]
    depth: Range | None = None


@dataclass(frozen=True, slots=True)
class Sum:
    """X += (sum over ranks of ``src``) + bias, as one linear that accumulates would have done it."""

    src: Buffer
    bias: str | None


@dataclass(frozen=True, slots=True)
class Gather:
    """Every rank's columns of L, where they belong: ``parts`` by rank."""

    parts: tuple[Range, ...]


Meeting = Sum | Gather


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's share. ``meetings`` by the index of the op they follow; ``cuts`` by the weight's name in ``program``."""

    program: Program
    meetings: dict[int, Meeting]
    cuts: dict[str, Cut]
    kv_heads: Range


def even(units: int, ranks: int, rank: int) -> Range:
    """The units of ``rank``: contiguous, and no two ranks differ by more than one."""
    return rank * units // ranks, (rank + 1) * units // ranks


def check_ranks(geometry: Geometry, ranks: int) -> None:
    """Raises UsageError where there is not enough of something for every rank."""
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"--tensor-parallel-size must be between 1 and {MAX_RANKS}, not {ranks}")
    if geometry.num_kv_heads < ranks:
        raise UsageError(
            f"--tensor-parallel-size {ranks}: the model has {geometry.num_kv_heads} KV heads and each rank needs one; "
            f"use at most {geometry.num_kv_heads}, and more workers instead"
        )
    if -(-geometry.intermediate // UNIT) < ranks or -(-geometry.vocab // UNIT) < ranks:
        raise UsageError(
            f"--tensor-parallel-size {ranks}: an intermediate width of {geometry.intermediate} and a vocabulary of "
            f"{geometry.vocab} in units of {UNIT} do not reach for every rank"
        )


def kv_head_ranges(geometry: Geometry, ranks: int) -> tuple[Range, ...]:
    """KV heads by rank."""
    return tuple(even(geometry.num_kv_heads, ranks, rank) for rank in range(ranks))


def met_points(points: Sequence[int], meetings: Collection[int]) -> tuple[int, ...]:
    """For each place in the program the one just after the next meeting: there every rank has passed it."""
    return tuple(min(index for index in meetings if index >= point) + 1 for point in points)


def split_program(whole: Program, ranks: int, rank: int) -> RankProgram:
    """Raises UsageError for too many ranks, CorruptModelError for a program of an unknown form."""
    check_ranks(whole.geometry, ranks)
    return _Splitter(whole, ranks, rank).split()


def fold(values: Sequence[Summable]) -> Summable:
    """The tree of neighbours: ((v0 + v1) + (v2 + v3)) + …; an odd one out goes up as it is."""
    level = list(values)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]  # type: ignore[operator]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


class _Splitter:
    def __init__(self, whole: Program, ranks: int, rank: int) -> None:
        g = self._whole = whole.geometry
        self._ops, self._ranks, self._rank = whole.ops, ranks, rank
        self._kv = even(g.num_kv_heads, ranks, rank)
        group = g.num_heads // g.num_kv_heads
        self._heads = (self._kv[0] * group, self._kv[1] * group)
        self._wide = self._units(g.intermediate, rank)
        self._geometry = replace(
            g,
            num_heads=self._heads[1] - self._heads[0],
            num_kv_heads=self._kv[1] - self._kv[0],
            intermediate=self._wide[1] - self._wide[0],
        )
        self._meetings: dict[int, Meeting] = {}
        self._cuts: dict[str, Cut] = {}

    def split(self) -> RankProgram:
        ops = tuple(self._op(index, op) for index, op in enumerate(self._ops))
        return RankProgram(Program(ops, self._geometry), self._meetings, self._cuts, self._kv)

    def _units(self, size: int, rank: int) -> Range:
        first, last = even(-(-size // UNIT), self._ranks, rank)
        return first * UNIT, min(last * UNIT, size)

    def _op(self, index: int, op: Op) -> Op:
        if not isinstance(op, Linear):
            return op
        match op.dst, op.src:
            case Buffer.QKV, _:
                return replace(op, weight=self._cut(op.weight, self._qkv_rows()), bias=self._bias(op, self._qkv_rows()))
            case Buffer.G, _:
                rows = tuple((start + self._wide[0], start + self._wide[1]) for start in (0, self._whole.intermediate))
                return replace(op, weight=self._cut(op.weight, rows), bias=self._bias(op, rows))
            case Buffer.L, _:
                parts = tuple(self._units(self._whole.vocab, rank) for rank in range(self._ranks))
                own = parts[self._rank]
                self._meetings[index] = Gather(parts)
                return replace(
                    op, weight=self._cut(op.weight, (own,)), bias=self._bias(op, (own,)), outputs=own[1] - own[0]
                )
            case Buffer.X, Buffer.A | Buffer.U if op.accumulate:
                dim = self._whole.head_dim
                depth = (self._heads[0] * dim, self._heads[1] * dim) if op.src is Buffer.A else self._wide
                weight = self._cut(op.weight, ((0, self._whole.hidden),), depth)
                # H is free here: what it held was read by the linear before.
                self._meetings[index] = Sum(Buffer.H, op.bias)
                return Linear(op.src, Buffer.H, weight)
        raise CorruptModelError(f"a linear from {op.src} to {op.dst} cannot be cut for ranks")

    def _qkv_rows(self) -> tuple[Range, ...]:
        g = self._whole
        k, v = g.num_heads, g.num_heads + g.num_kv_heads
        heads = (self._heads, (k + self._kv[0], k + self._kv[1]), (v + self._kv[0], v + self._kv[1]))
        return tuple((first * g.head_dim, last * g.head_dim) for first, last in heads)

    def _cut(self, name: str, rows: tuple[Range, ...], depth: Range | None = None) -> str:
        """The name under which the rank finds its part."""
        part = f"{name}#{self._rank}of{self._ranks}"
        self._cuts[part] = Cut(name, rows, depth)
        return part

    def _bias(self, op: Linear, rows: tuple[Range, ...]) -> str | None:
        return None if op.bias is None else self._cut(op.bias, rows)
