"""What ranks compute, and the weights cut for them."""

import numpy as np
import pytest
from tiny_programs import GEOMETRY, Weights, build_program, source

from relay.errors import UsageError
from relay.kernels import packing
from relay.kernels.program import Buffer, Geometry, Linear, RopeWriteKv
from relay.kernels.ranks.split import Gather, Sum, even, fold, met_points, split_program
from relay.kernels.ranks.weights import RankWeights, cut_matrix
from relay.kernels.weights import Encoding


def test_the_tree_is_of_neighbours_in_rank_order() -> None:
    assert fold(["0"]) == "0"

    class Named(str):
        def __add__(self, other: str) -> "Named":
            return Named(f"({self}+{other})")

    assert fold([Named(i) for i in range(4)]) == "((0+1)+(2+3))"
    assert fold([Named(i) for i in range(7)]) == "(((0+1)+(2+3))+((4+5)+6))"


def test_every_unit_belongs_to_one_rank() -> None:
    for units in range(1, 30):
        for ranks in range(1, min(units, 8) + 1):
            ranges = [even(units, ranks, rank) for rank in range(ranks)]
            assert [one for first, last in ranges for one in range(first, last)] == list(range(units))
            assert {last - first for first, last in ranges} <= {units // ranks, units // ranks + 1}


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize(("rows", "depth"), [
    (((0, 64),), None), (((64, 150),), None), (((3, 70), (100, 150)), None), (((0, 150),), (32, 96)), (((10, 11),), (64, 96)),
    (((0, 64), (64, 128)), None), (((128, 150), (0, 64)), None),
])  # fmt: skip
def test_a_cut_has_the_bits_of_its_part(
    encoding: Encoding, rows: tuple[tuple[int, int], ...], depth: tuple[int, int] | None
) -> None:
    values = np.random.default_rng(1).normal(size=(150, 96)).astype(np.float32)
    whole = packing.pack_matrix(source(values, encoding))
    part = cut_matrix(whole, rows, depth)
    first, last = depth or (0, 96)
    wanted = packing.unpack_matrix(whole)[np.concatenate([np.arange(a, b) for a, b in rows]), first:last]
    assert np.array_equal(packing.unpack_matrix(part), wanted)
    assert part.data.ctypes.data % 64 == 0
    assert part.data.size == packing.packed_bytes(part.n, part.k, encoding)


def test_whole_panels_are_not_copied() -> None:
    whole = packing.pack_matrix(source(np.ones((256, 32), np.float32), Encoding.BF16))
    assert np.shares_memory(cut_matrix(whole, ((64, 192),)).data, whole.data)


def test_a_cut_through_a_group_is_refused() -> None:
    whole = packing.pack_matrix(source(np.ones((64, 96), np.float32), Encoding.Q8_0))
    with pytest.raises(UsageError, match="columns 16 to 96 of a Q8_0 matrix cut its groups of 32"):
        cut_matrix(whole, ((0, 64),), (16, 96))


def test_ops_keep_their_places() -> None:
    whole = build_program()
    for rank in range(2):
        part = split_program(whole, 2, rank)
        assert part.program.sink_points == whole.sink_points
        assert [type(op) for op in part.program.ops] == [type(op) for op in whole.ops]
        assert sorted(part.meetings) == [
            index for index, op in enumerate(whole.ops) if isinstance(op, Linear) and op.dst in (Buffer.X, Buffer.L)
        ]
        assert {type(meeting) for meeting in part.meetings.values()} == {Sum, Gather}
        assert part.kv_heads == (rank, rank + 1)
        g = part.program.geometry
        assert (g.num_heads, g.num_kv_heads, g.intermediate, g.vocab) == (2, 1, (64, 32)[rank], GEOMETRY.vocab)


def test_all_ranks_have_written_a_layer_behind_the_sum_after_its_attention() -> None:
    program = build_program()
    points = met_points(program.sink_points, split_program(program, 2, 0).meetings)
    assert len(points) == GEOMETRY.num_layers
    for written, met in zip(program.sink_points, points, strict=True):
        between = program.ops[written:met]
        assert isinstance(between[-1], Linear)
        assert between[-1].src is Buffer.A, "that sum"
        assert not any(isinstance(op, RopeWriteKv) for op in between), "another layer was written first"


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    whole = build_program()
    weights = Weights(whole)
    parts = [split_program(whole, 2, rank) for rank in range(2)]
    found = [RankWeights(weights, part.cuts) for part in parts]

    def unpacked(name: str) -> list[np.ndarray]:
        return [packing.unpack_matrix(one.matrix(f"{name}#{rank}of2")) for rank, one in enumerate(found)]

    def plain(name: str) -> np.ndarray:
        return packing.unpack_matrix(weights.matrix(name))

    assert np.array_equal(np.concatenate(unpacked("0.out"), axis=1), plain("0.out"))
    assert np.array_equal(np.concatenate(unpacked("1.down"), axis=1), plain("1.down"))
    assert np.array_equal(np.concatenate(unpacked("embed")), plain("embed"))
    q, k = np.split(plain("0.qkv")[:192], [128])
    assert np.array_equal(unpacked("0.qkv")[1][:64], q[64:])
    assert np.array_equal(unpacked("0.qkv")[1][64:96], k[32:])
    assert np.array_equal(found[1].vector("0.qkv_bias#1of2")[:64], weights.vector("0.qkv_bias")[64:128])
    gate, up = np.split(plain("0.gate_up"), 2)
    assert np.array_equal(unpacked("0.gate_up")[1], np.concatenate([gate[64:], up[64:]]))


@pytest.mark.parametrize(
    ("geometry", "ranks", "said"),
    [
        (GEOMETRY, 3, "the model has 2 KV heads and each rank needs one; use at most 2"),
        (GEOMETRY, 9, "between 1 and 8"),
        (Geometry(1, 64, 64, 8, 8, 32, 512, 64), 2, "do not reach for every rank"),
    ],
)
def test_too_many_ranks(geometry: Geometry, ranks: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split_program(build_program(geometry), ranks, 0)
