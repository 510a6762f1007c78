"""Several ranks are one backend: bits of the definition, equal on every path; failures that only some ranks have end the worker.

Ranks are threads here: they share nothing but what processes share, the memfds, eventfds and sockets.
"""

import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tiny_programs import GEOMETRY, GREEDY, Row, Weights, build_program, make_batch

from relay.errors import DeviceLostError, DoesNotFitError, StartupError
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.program import Geometry, Program
from relay.kernels.ranks import calls
from relay.kernels.ranks.backend import RankedBackend
from relay.kernels.ranks.exchange import Exchange, MeetingPlace
from relay.kernels.ranks.follower import obey
from relay.kernels.ranks.share import RankShare
from relay.kernels.ranks.split import even, fold
from relay.kernels.reference.backend import ReferenceBackend
from relay.kernels.reference.products import ChainProducts
from relay.kernels.weights import Encoding

WIDE = Geometry(
    num_layers=2, hidden=64, intermediate=320, num_heads=8, num_kv_heads=4, head_dim=32, vocab=300, max_positions=400
)
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 150, 70)]
TABLE = [4, 0, 3, 1, 5]


MADE: "list[Ranks]" = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    while MADE:
        group = MADE.pop()
        group.backend.close()
        for end in group.ends:
            end.close()
        group.stop()
        group.place.close()
        os.close(group.memory)


class Ranks:
    """``ranks`` ranks of one worker; ``backend`` is the first, the others live in threads. Also its own ``Watch``."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        ranks: int,
        dtype: str = "float32",
        **numerics: str,
    ) -> None:
        self.place = MeetingPlace.create(ranks, 256 * 512)
        self.memory = os.memfd_create("test-ranks")
        self.errors: list[BaseException] = []
        self.shares = [
            RankShare(CpuBackend(1, max_tokens=256, max_sampled=8), Exchange(self.place, rank), ranks, rank)
            for rank in range(ranks)
        ]
        pairs = [socket.socketpair() for _ in range(1, ranks)]
        self.ends = [end for pair in pairs for end in pair]
        self.links = [theirs for _, theirs in pairs]
        self.backend = RankedBackend(self.shares[0], [ours for ours, _ in pairs], self.memory, self)
        self.threads = [
            threading.Thread(target=self._follow, args=(program, weights, rank, numerics), daemon=True)
            for rank in range(1, ranks)
        ]
        for thread in self.threads:
            thread.start()
        self.started = self.stopped = False
        self.awaited = 0
        MADE.append(self)
        self.backend.load(program, weights)
        self.backend.allocate_kv(6, 16, dtype)

    def _follow(self, program: Program, weights: Weights, rank: int, numerics: dict[str, str]) -> None:
        share, link = self.shares[rank], self.links[rank - 1]
        try:
            share.load(program, weights)
            calls.send(link, calls.encode(calls.Loaded({**share.backend.numerics(), **numerics})))
            obey(share, link, self.memory, rank)
        except BaseException as error:
            self.errors.append(error)
            link.close()

    def start(self) -> None:
        self.started = True

    def await_end(self) -> None:
        self.awaited += 1

    def stop(self) -> None:
        self.stopped = True
        for thread in self.threads:
            thread.join(10)


class SplitProducts(ChainProducts):
    """The definition for ranks: products over the depths that are cut are chains of the parts, folded as a tree."""

    def __init__(self, geometry: Geometry, ranks: int) -> None:
        dim, group = geometry.head_dim, geometry.num_heads // geometry.num_kv_heads
        units = -(-geometry.intermediate // 64)
        heads = [even(geometry.num_kv_heads, ranks, rank) for rank in range(ranks)]
        wide = [even(units, ranks, rank) for rank in range(ranks)]
        self._cuts = {
            geometry.num_heads * dim: [(a * group * dim, b * group * dim) for a, b in heads],
            geometry.intermediate: [(a * 64, min(b * 64, geometry.intermediate)) for a, b in wide],
        }

    def linear(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        whole = super().linear
        cuts = self._cuts.get(x.shape[1], [(0, x.shape[1])])
        return fold([whole(x[:, first:last], weight[:, first:last]) for first, last in cuts])


def run(backend: object, program: Program, pieces: list[int], decode: int = 3) -> tuple[np.ndarray, bytes]:
    """(logits of the last prompt token and of each decoded one, all KV bytes) of PROMPT computed in ``pieces``."""
    backend.bind_slot(2, GREEDY, 0, PROMPT, [])
    rows, at, logits = list(pieces), 0, []
    token = -1
    for count in [*rows, *[1] * decode]:
        tokens = PROMPT[at : at + count] if at < len(PROMPT) else [token]
        batch = make_batch([Row(2, tokens, at, TABLE, at + count >= len(PROMPT))])
        backend.run(0, len(program.ops), batch)
        at += count
        if at >= len(PROMPT):
            (sampled,) = backend.sample(batch)
            token = sampled.token_id
            logits.append(backend.logits()[0].copy())
    backend.release_slot(2)
    return np.stack(logits), kv_of(backend, program, at)


def kv_of(backend: object, program: Program, count: int) -> bytes:
    out = bytearray(count * backend.kv_bytes_per_token_layer())
    found = b""
    for layer in range(program.geometry.num_layers):
        backend.read_kv(layer, np.array(TABLE, np.int32), 0, count, memoryview(out))
        found += bytes(out)
    return found


@pytest.mark.parametrize(("geometry", "ranks"), [(GEOMETRY, 2), (WIDE, 3), (WIDE, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_the_definition_on_every_path(geometry: Geometry, ranks: int, dtype: str) -> None:
    program = build_program(geometry)
    weights = Weights(program, Encoding.Q8_0)
    reference = ReferenceBackend(SplitProducts(geometry, ranks))
    reference.load(program, weights)
    reference.allocate_kv(6, 16, dtype)
    logits, kv = run(reference, program, [70])
    one = CpuBackend(1, max_tokens=256, max_sampled=8)
    one.load(program, weights)
    one.allocate_kv(6, 16, dtype)
    assert not np.array_equal(run(one, program, [70])[0], logits), (
        "the order of the sum changes no bit: nothing is proven"
    )
    group = Ranks(program, weights, ranks, dtype)
    for pieces in ([70], [16, 54], [1, 2, 33, 34], [64, 6]):
        found, bytes_found = run(group.backend, program, pieces)
        assert np.array_equal(found, logits)
        assert bytes_found == kv
    assert group.started
    meetings = [share.exchange.meetings for share in group.shares]
    group.backend.close()
    assert meetings == meetings[:1] * ranks
    assert group.stopped
    assert group.errors == []


def test_rows_do_not_depend_on_their_neighbours_and_may_be_cut_at_every_layer() -> None:
    program = build_program(WIDE)
    group = Ranks(program, Weights(program), 2)
    backend = group.backend
    whole = make_batch([Row(0, PROMPT[:40], 0, [0, 1, 2])])
    backend.bind_slot(0, GREEDY, 0, PROMPT[:40], [])
    backend.bind_slot(1, GREEDY, 0, PROMPT[40:], [])
    backend.run(0, len(program.ops), whole)
    backend.sample(whole)
    alone = backend.logits().copy()
    both = make_batch([Row(1, PROMPT[40:], 0, [3, 4]), Row(0, PROMPT[:40], 0, [0, 1, 2])])
    start = 0
    for stop in [*program.sink_points, len(program.ops)]:
        backend.run(start, stop, both)
        start = stop
    backend.sample(both)
    assert np.array_equal(backend.logits()[1], alone[0])


def test_kv_written_from_outside_is_read_by_every_rank() -> None:
    program = build_program(WIDE)
    weights = Weights(program)
    first, second = Ranks(program, weights, 3), Ranks(program, weights, 3)
    run(first.backend, program, [70])
    size = 64 * first.backend.kv_bytes_per_token_layer()
    for layer in range(WIDE.num_layers):
        data = bytearray(size)
        first.backend.read_kv(layer, np.array(TABLE, np.int32), 0, 64, memoryview(data))
        table = np.array([0, 2, 1, 3, 4], np.int32)
        second.backend.write_kv(layer, table, 0, 64, memoryview(data))
        again = bytearray(size)
        second.backend.read_kv(layer, table, 0, 64, memoryview(again))
        assert again == data
    second.backend.copy_block(1, 5)  # the block of tokens 32..47
    results = []
    for backend, table in ((first.backend, TABLE), (second.backend, [0, 2, 5, 3, 4])):
        backend.bind_slot(1, GREEDY, 0, PROMPT, [])
        batch = make_batch([Row(1, PROMPT[64:], 64, table)])
        backend.run(0, len(program.ops), batch)
        results.append((backend.sample(batch), backend.logits().copy()))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("heads", [(0, 1), (1, 1), (2, 2), (1, 3), (0, 4), (1, 2)])
def test_heads_of_some_ranks(heads: tuple[int, int]) -> None:
    """Of one rank, of several, of a part of a rank's: read and written as they lie in the whole, and no other is touched."""
    program = build_program(WIDE)
    group = Ranks(program, Weights(program), 3)
    backend, count = group.backend, 37
    assert backend.kv_parts == ((0, 1), (1, 1), (2, 2))
    rng = np.random.default_rng(3)
    table = np.array([3, 0, 5], np.int32)
    whole = rng.integers(0, 256, (2, count, 4, 128), np.uint8)
    backend.write_kv(1, table, 5, count, memoryview(whole.tobytes()))
    first, last = heads[0], sum(heads)
    found = bytearray(2 * count * heads[1] * 128)
    backend.read_kv(1, table, 5, count, memoryview(found), heads)
    assert found == whole[:, :, first:last].tobytes()
    part = rng.integers(0, 256, (2, 20, heads[1], 128), np.uint8)
    backend.write_kv(1, table, 9, 20, memoryview(part.tobytes()), heads)
    whole[:, 4:24, first:last] = part
    found = bytearray(whole.nbytes)
    backend.read_kv(1, table, 5, count, memoryview(found))
    assert found == whole.tobytes()
    for wrong in ((0, 5), (4, 1), (-1, 2), (1, 0)):
        with pytest.raises(ValueError, match="heads"):
            backend.read_kv(1, table, 0, 1, memoryview(bytearray(256)), wrong)


def test_a_rank_without_room_for_kv_says_so() -> None:
    program = build_program(GEOMETRY)
    group = Ranks(program, Weights(program), 2)

    def full(*_: object, **__: object) -> None:
        raise DoesNotFitError("a KV cache of 6 blocks does not fit")

    group.shares[1].backend.allocate_kv = full  # type: ignore[method-assign, assignment]
    with pytest.raises(DoesNotFitError, match="6 blocks does not fit"):
        group.backend.allocate_kv(6, 16, "float32")


def test_a_batch_that_does_not_fit_fails_everywhere_and_nothing_else_changes() -> None:
    program = build_program(GEOMETRY)
    group = Ranks(program, Weights(program), 2)
    before, _ = run(group.backend, program, [70])
    with pytest.raises(ValueError, match="a block table that does not cover"):
        group.backend.run(0, len(program.ops), make_batch([Row(0, [1], 0, [99])]))
    with pytest.raises(ValueError, match="a block table that does not cover"):
        group.backend.read_kv(0, np.zeros(1, np.int32), 0, 99, memoryview(bytearray(99 * 2 * 2 * 32 * 4)))
    after, _ = run(group.backend, program, [70])
    assert np.array_equal(before, after)
    group.backend.close()
    assert group.errors == []


def test_a_rank_that_failed_alone_ends_the_worker() -> None:
    program = build_program(GEOMETRY)
    group = Ranks(program, Weights(program), 2)
    group.shares[1].backend.copy_block = None  # type: ignore[method-assign, assignment]
    group.backend.copy_block(0, 1)
    group.backend.release_slot(0)
    group.threads[0].join(10)
    with pytest.raises(DeviceLostError, match="rank 1 of this worker has ended"):
        group.backend.release_slot(0)
    assert "rank 1 failed 1 calls, rank 0 0" in str(group.errors[0])
    assert group.awaited == 1, "whoever watches says first how the rank ended"


def test_ranks_at_different_places_do_not_add() -> None:
    place = MeetingPlace.create(2, 64)
    ends = [Exchange(place, rank) for rank in range(2)]
    ends[1].name = (1, 7)
    failures = []

    def arrive(end: Exchange) -> None:
        try:
            end.sum(np.ones((1, 4), np.float32))
        except DeviceLostError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=arrive, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert failures == ["ranks met at different places: [[0, 0], [1, 7]]"] * 2
    place.close()


def test_ranks_of_other_numerics_are_refused() -> None:
    program = build_program(GEOMETRY)
    with pytest.raises(StartupError, match=r"rank 1 computes other bits than rank 0 \(probe\)"):
        Ranks(program, Weights(program), 2, probe="0" * 16)


def test_the_numerics_id_names_the_ranks() -> None:
    program = build_program(WIDE)
    found = []
    for ranks in (2, 4):
        group = Ranks(program, Weights(program), ranks)
        found.append(group.backend.numerics())
    assert found[0] != found[1]
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"ranks"}


def test_steps_may_be_sampled_after_the_next_one_ran() -> None:
    """As with work queued on a device: the others sample the batch that rank 0 samples."""
    program = build_program(WIDE)
    group = Ranks(program, Weights(program), 2)
    sampled: list[int] = []
    group.shares[1].backend.sample = lambda batch: sampled.append(len(batch.token_ids)) or []  # type: ignore[method-assign]
    group.shares[0].backend.sample = lambda batch: []  # type: ignore[method-assign]
    steps = [make_batch([Row(0, PROMPT[:count], 0, [0, 1, 2, 3])]) for count in (5, 6, 7)]
    group.backend.run(0, len(program.ops), steps[0])
    group.backend.run(0, len(program.ops), steps[1])
    group.backend.sample(steps[0])
    group.backend.run(0, len(program.ops), steps[2])
    group.backend.sample(steps[1])
    group.backend.sample(steps[2])
    group.backend.close()
    group.threads[0].join(10)
    assert sampled == [5, 6, 7]


def test_a_transport_sees_no_rank_by_itself() -> None:
    """What copies the heads of rank 0 alone must not be found on the backend of all."""
    group = Ranks(build_program(GEOMETRY), Weights(build_program(GEOMETRY)), 2)
    assert not [
        name for name in ("read_kv_crc", "write_kv_crc", "stage", "collect", "register") if hasattr(group.backend, name)
    ]


def test_calls_survive_the_wire() -> None:
    ours, theirs = socket.socketpair()
    batch = make_batch([Row(3, [1, 2, 3], 5, [7, 8]), Row(1, [4], 9, [2])])
    calls.send(
        ours, calls.encode(calls.Run(start=2, stop=9, number=4, batch=calls.pack_batch(batch), max_blocks=2, failed=3))
    )
    call = calls.receive_call(theirs)
    assert isinstance(call, calls.Run)
    assert (call.start, call.stop, call.number, call.failed) == (2, 9, 4, 3)
    assert call.batch is not None
    found = calls.unpack_batch(call.batch, call.max_blocks)
    for name in ("token_ids", "positions", "row_starts", "slots", "block_tables", "sampled_rows"):
        assert np.array_equal(getattr(found, name), getattr(batch, name))
    ours.close()
    with pytest.raises(calls.LinkEnded):
        calls.receive_call(theirs)
    theirs.close()
