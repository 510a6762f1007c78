import itertools
from hashlib import blake2b

import numpy as np
import pytest

from relay.engine.runner import Runner
from relay.engine.step import SlotBinding, StepPlan, StepRow
from relay.kernels.sampler import InvalidLogits
from relay.protocol.sampling import SamplingParams
from tests.engine.driver import Engine, key_of, limits, work
from tests.engine.hash_backend import LAYERS, HashBackend, oracle, program

PARAMS = SamplingParams(max_tokens=5)


class Sink:
    """Remembers what it heard, with the KV bytes that were in the cache at that moment."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.heard: list[tuple[int, int, int, int, bytes]] = []
        self.raises_for: int | None = None

    def layer_written(self, layer: int, row: int) -> None:
        plan = self.engine.plans[-1]
        start, count, slot = plan.rows[row].start, plan.rows[row].count, plan.rows[row].slot
        key = self.engine.scheduler.key_of_slot(slot)
        if key.request == self.raises_for:
            raise ConnectionError("peer is gone")
        data = bytearray(16 * count)
        self.engine.backend.read_kv(
            layer, np.array(self.engine.scheduler.block_table(key)), start, count, memoryview(data)
        )
        self.heard.append((key.request, layer, start, count, bytes(data)))


def test_the_sink_hears_every_layer_of_every_prefill_chunk_once_and_in_order():
    engine = Engine(limits(max_num_batched_tokens=32))
    engine.sink = sink = Sink(engine)
    items = [work(1, list(range(40)), 3), work(2, [9] * 10, 3)]
    engine.serve(*items)
    for item in items:
        mine = [entry for entry in sink.heard if entry[0] == item.request]
        for layer in range(LAYERS):
            spans = [(start, count) for _, its, start, count, _ in mine if its == layer]
            assert spans == ([(0, 32), (32, 8)] if item.request == 1 else [(0, 10)])
    kv = b"".join(entry[4][: 16 * entry[3] // 2] for entry in sink.heard if entry[0] == 1 and entry[1] == 0)
    units = oracle(items[0].token_ids, 40, items[0].params, 0, 256)[3]
    assert kv[:128] == units[0][:128], "K of layer 0 was not in the cache when it was announced"


def test_a_backend_says_where_a_layer_is_written():
    """Ranks on devices: only behind their next meeting."""
    engine = Engine(limits(max_num_batched_tokens=32))
    ops = len(program().ops)
    engine.backend.sink_points = tuple(min(point + 1, ops) for point in program().sink_points)
    engine.runner = Runner(engine.backend, program(), engine.scheduler.limits)
    engine.sink = sink = Sink(engine)
    ran, run = [], engine.backend.run
    engine.backend.run = lambda start, stop, batch: (ran.append(stop), run(start, stop, batch))
    engine.serve(work(1, list(range(20)), 1))
    assert [layer for _, layer, *_ in sink.heard] == list(range(LAYERS))
    assert ran == [*engine.backend.sink_points, ops]


def test_a_sink_that_raises_fails_its_row_only():
    engine = Engine(limits())
    engine.sink = Sink(engine)
    engine.sink.raises_for = 2
    items = [work(r, [r] * 20, 3) for r in (1, 2, 3)]
    collected = engine.serve(*items)
    assert [got.failed for got in collected] == [None, "ConnectionError: peer is gone", None]
    assert collected[2].tokens == oracle(items[2].token_ids, 20, items[2].params, 0, 256)[0]


def test_a_row_without_a_drawable_token_fails_alone():
    engine = Engine(limits())
    draw = engine.backend.sample

    def sample(batch):
        for index, row in enumerate(batch.sampled_rows.tolist()):
            prompt_ids = engine.backend.slots[int(batch.slots[row])][2]
            if prompt_ids[0] == 2:
                raise InvalidLogits(index, "a NaN")
        return draw(batch)

    engine.backend.sample = sample
    items = [work(r, [r] * 20, 3) for r in (1, 2, 3)]
    collected = engine.serve(*items)
    assert [got.failed for got in collected] == [None, "no token can be drawn: a NaN", None]
    assert collected[2].tokens == oracle(items[2].token_ids, 20, items[2].params, 0, 256)[0]


def test_digests_are_of_captured_rows_only_and_of_full_units():
    engine = Engine(limits())
    plain, captured = work(1, [1] * 30, 4), work(2, [2] * 30, 4, capture=True)
    a, b = engine.serve(plain, captured)
    _, _, rows, units = oracle(captured.token_ids, 30, captured.params, 0, 256)
    assert a.logit_digests == []
    assert a.kv_digests is None
    assert b.logit_digests == [blake2b(row, digest_size=16).digest() for row in rows]
    assert b.kv_digests == [blake2b(unit, digest_size=16).digest() for unit in units]
    assert len(units) == 33 // 16
    assert engine.runner.kv_digests([0], 15) == []


class Recorder(HashBackend):
    """Remembers the batch of each first range."""

    def run(self, start, stop, batch):
        if start == 0:
            self.batch = batch
        super().run(start, stop, batch)


def test_the_arrays_of_a_batch():
    backend = Recorder()
    backend.allocate_kv(8, 16)
    runner = Runner(backend, program(), limits(num_blocks=8))
    bound = [SlotBinding(3, PARAMS, 0, [5] * 17, [6]), SlotBinding(1, PARAMS, 0, [1, 2, 3, 4], [])]
    tables = [(3, 0, 7), (3, 1, 2), (1, 0, 4)]
    rows = [StepRow(3, 17, 1, None, True), StepRow(1, 0, 3, [1, 2, 3], False)]
    result = runner.execute(StepPlan(1, rows, bound=bound, new_blocks=tables, num_tokens=4))
    assert result.error is None
    assert len(result.tokens) == 1
    batch = backend.batch
    assert batch.token_ids.tolist() == [-1, 1, 2, 3]
    assert batch.positions.tolist() == [17, 0, 1, 2]
    assert batch.row_starts.tolist() == [0, 1, 4]
    assert batch.slots.tolist() == [3, 1]
    assert batch.sampled_rows.tolist() == [0]
    assert batch.block_tables.shape == (2, 2)
    assert batch.block_tables[0].tolist() == [7, 2]
    assert batch.block_tables[1, 0] == 4
    for array in (
        batch.token_ids,
        batch.positions,
        batch.row_starts,
        batch.slots,
        batch.block_tables,
        batch.sampled_rows,
    ):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert not batch.capture_logits


class Whole(HashBackend):
    """Wants steps of few tokens at once."""

    def __init__(self, heard):
        super().__init__()
        self.heard = heard

    def at_once(self, batch):
        return len(batch.token_ids) <= 4

    def run(self, start, stop, batch):
        self.heard.append((start, stop))
        super().run(start, stop, batch)


@pytest.mark.parametrize(("count", "whole"), [(4, True), (5, False)])
def test_layers_of_a_step_that_runs_at_once_are_announced_behind_it(count, whole):
    heard = []

    class Sink:
        def layer_written(self, layer, row):
            heard.append((layer, row, "written"))

    backend = Whole(heard)
    backend.allocate_kv(8, 16)
    runner = Runner(backend, program(), limits(num_blocks=8))
    bound = [SlotBinding(0, PARAMS, 0, [5] * 9, [])]
    rows = [StepRow(0, 0, count, [5] * count, False)]
    result = runner.execute(StepPlan(1, rows, bound=bound, new_blocks=[(0, 0, 3)], num_tokens=count), Sink())
    assert result.error is None
    points, ops = program().sink_points, len(program().ops)
    written = [(layer, 0, "written") for layer in range(len(points))]
    if whole:
        assert heard == [(0, ops), *written]
    else:
        ranges = itertools.pairwise([0, *points])
        assert heard == [*itertools.chain(*zip(ranges, written, strict=True)), (points[-1], ops)]


def test_a_step_without_sampled_rows_draws_nothing():
    engine = Engine(limits(max_num_batched_tokens=16))
    engine.scheduler.add(work(1, [4] * 40, 2))
    engine.plan()
    engine.execute()
    assert engine.executed[0].tokens == []
    assert engine.land()
    engine.run()
    assert len(engine.collected[key_of(work(1, []))].tokens) == 2
