"""Preemption, split, resume, cancel and failing steps: each ends with exactly the oracle's tokens and nothing held."""

import pytest

from relay.engine.scheduler import CannotFit, QueueFull
from relay.kernels.backend import SampledToken
from tests.engine.driver import Engine, key_of, limits, move, work
from tests.engine.hash_backend import oracle

PROMPT = [(i * 11) % 50 for i in range(40)]


def outputs_of(item):
    return oracle(item.token_ids, item.num_prompt, item.params, item.choice, 256)[0]


def idle(engine):
    assert not engine.scheduler.has_work()
    assert engine.scheduler.load().kv_used == 0


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_the_youngest_is_preempted_and_resumes_exactly(plan_ahead):
    engine = Engine(limits(num_blocks=9, growth_tokens=0), plan_ahead=plan_ahead)
    items = [work(r, [r] * 20, 60, seed=r) for r in range(4)]
    for item in items:
        engine.scheduler.add(item)
    for _ in range(62):
        engine.step()
    assert engine.collected[key_of(items[0])].finish == "length", "the oldest hardly waits"
    engine.run()
    for item in items:
        got = engine.collected[key_of(item)]
        assert got.tokens == outputs_of(item)
        assert got.positions == list(range(60))
        assert got.cached_tokens == 0, "recomputing one's own tokens is no cache hit"
    assert engine.scheduler.load().counters["preemptions"] >= 3
    idle(engine)


def test_expected_growth_makes_sequences_wait_rather_than_preempt():
    engine = Engine(limits(num_blocks=9, growth_tokens=60))
    items = [work(r, [r] * 20, 60, seed=r) for r in range(4)]
    for item, got in zip(items, engine.serve(*items), strict=True):
        assert got.tokens == outputs_of(item)
    assert engine.scheduler.load().counters["preemptions"] == 0


@pytest.mark.parametrize("block_size", [16, 32])
def test_split_over_two_engines(block_size):
    source, target = Engine(limits(max_num_batched_tokens=16)), Engine(limits(block_size=block_size), plan_ahead=True)
    busy = work(9, [5] * 7, 50)
    target.scheduler.add(busy)
    target.step()
    for request in (1, 2):  # the second finds most of its prompt in both caches
        item = work(request, PROMPT, 12, capture=True)
        reservation = target.scheduler.reserve(item)
        assert reservation.cached_tokens == (0 if request == 1 else 32)
        source.scheduler.add(item, prefill_only=True)
        source.run()
        key = key_of(item)
        assert source.scheduler.load().kv_used == 3
        first = source.collected[key].tokens
        target.step()
        move(source, target, item, SampledToken(first[0]), reservation.cached_tokens)
        source.scheduler.release(key)
        source.scheduler.release(key)
        target.run()
        got = target.collected[key]
        assert first + got.tokens == outputs_of(item)
        assert got.positions == list(range(1, 12))
        assert got.finish == "length"
        idle(source)
    assert target.collected[key_of(busy)].tokens == outputs_of(busy)
    idle(target)


def test_first_token_that_ends_the_sequence_ends_it_on_both_sides():
    source, target = Engine(limits()), Engine(limits())
    item = work(1, PROMPT, 9)
    item.params = type(item.params)(max_tokens=9, eos_token_ids=(outputs_of(item)[0],))
    reservation = target.scheduler.reserve(item)
    source.scheduler.add(item, prefill_only=True)
    source.run()
    got = source.collected[key_of(item)]
    assert (len(got.tokens), got.finish) == (1, "stop")
    move(source, target, item, SampledToken(got.tokens[0]), reservation.cached_tokens)
    assert target.collected[key_of(item)].finish == "stop"
    assert target.collected[key_of(item)].tokens == []
    source.scheduler.release(key_of(item))
    idle(source)
    idle(target)


def test_a_full_engine_refuses_a_reservation_and_holds_nothing_for_it():
    engine = Engine(limits(num_blocks=8, growth_tokens=32))
    assert engine.scheduler.reserve(work(1, [1] * 60, 40)) is not None  # 4 blocks and 2 of growth
    assert engine.scheduler.reserve(work(2, [2] * 30, 40)) is None
    engine.scheduler.check()
    engine.scheduler.cancel(key_of(work(1, [])))
    assert engine.scheduler.reserve(work(2, [2] * 30, 40)) is not None
    with pytest.raises(CannotFit):
        engine.scheduler.reserve(work(3, [1] * 128, 2))
    engine.scheduler.cancel(key_of(work(2, [])))
    with pytest.raises(KeyError):
        engine.scheduler.activate(key_of(work(2, [])), SampledToken(1))
    idle(engine)


def test_blocks_a_step_in_flight_may_write_are_not_reserved():
    engine, source = Engine(limits(num_blocks=4, growth_tokens=0)), Engine(limits())
    old, new = work(1, [3] * 40, 9), work(2, PROMPT, 9)
    engine.scheduler.add(old)
    engine.plan()
    engine.scheduler.cancel(key_of(old))
    assert engine.scheduler.reserve(new) is None, "two of the blocks needed are still written"
    engine.execute()
    engine.land()
    assert engine.scheduler.reserve(new) is not None
    source.scheduler.add(new, prefill_only=True)
    source.run()
    first = source.collected[key_of(new)].tokens
    move(source, engine, new, SampledToken(first[0]), 0)
    engine.run()
    assert first + engine.collected[key_of(new)].tokens == outputs_of(new)


def test_a_slot_is_not_given_away_while_a_step_in_flight_names_it():
    engine = Engine(limits(max_num_seqs=1))
    engine.scheduler.add(work(1, [1, 2], 9))
    engine.plan()
    engine.scheduler.cancel(key_of(work(1, [])))
    engine.scheduler.add(work(2, [3, 4], 2))
    assert engine.scheduler.plan() is None
    engine.execute()
    engine.land()
    engine.run()
    assert engine.collected[key_of(work(2, []))].tokens == outputs_of(work(2, [3, 4], 2))


def test_seats_bound_running_and_reserved_sequences():
    engine = Engine(limits(max_num_seqs=2))
    engine.scheduler.add(work(1, [1], 3))
    engine.step()
    assert engine.scheduler.reserve(work(2, [2], 3)) is not None
    assert engine.scheduler.reserve(work(3, [3], 3)) is None


@pytest.mark.parametrize("committed", [1, 5, 11])
def test_resume_continues_where_the_client_stands(committed):
    whole = work(1, PROMPT, 12, seed=3, min_tokens=4, frequency_penalty=0.5, eos_token_ids=tuple(range(0, 50, 3)))
    expected = outputs_of(whole)
    committed = min(committed, len(expected) - 1)
    engine = Engine(limits(max_num_batched_tokens=16))
    resumed = work(1, PROMPT + expected[:committed], 12, num_prompt=len(PROMPT), attempt=2)
    resumed.params = whole.params
    (got,) = engine.serve(resumed)
    assert got.tokens == expected[committed:]
    assert got.positions[0] == committed


def test_max_model_len_ends_a_sequence():
    engine = Engine(limits(max_model_len=50))
    (got,) = engine.serve(work(1, PROMPT, 100))
    assert (len(got.tokens), got.finish) == (10, "length")


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_cancel_is_legal_in_every_state(plan_ahead):
    engine = Engine(limits(max_num_seqs=3, max_num_batched_tokens=24), plan_ahead=plan_ahead)
    scheduler = engine.scheduler
    waiting, prefilling, decoding, reserved, held = (work(r, [r] * 40, 9) for r in range(5))
    scheduler.add(held, prefill_only=True)
    engine.run()
    scheduler.add(decoding)
    engine.step()
    engine.step()
    scheduler.reserve(reserved)
    scheduler.add(prefilling)
    engine.plan()
    scheduler.add(waiting)
    for item in (waiting, prefilling, decoding, reserved, held, work(77, [1])):
        scheduler.cancel(key_of(item))
        scheduler.cancel(key_of(item))
        scheduler.check()
    assert scheduler.load().kv_used > 0, "the step in flight still writes"
    engine.execute()
    engine.land()
    engine.run()
    idle(engine)


def test_release_leaves_sequences_that_run_here_alone():
    engine = Engine(limits())
    item = work(1, PROMPT, 4)
    engine.scheduler.add(item)
    engine.step()
    engine.scheduler.release(key_of(item))
    engine.run()
    assert engine.collected[key_of(item)].tokens == outputs_of(item)


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_a_poisoned_prompt_fails_alone(plan_ahead):
    engine = Engine(limits(), plan_ahead=plan_ahead, poison=77)
    good = [work(r, PROMPT[r:], 20, seed=r) for r in range(4)]
    bad = [work(9, [1, 2, 77], 5), work(10, [*PROMPT, 77], 5)]
    for item in good[:2]:
        engine.scheduler.add(item)
    for _ in range(3):
        engine.step()
    collected = engine.serve(*good[2:], *bad)
    assert [got.failed for got in collected] == [None, None, *["RuntimeError: poison"] * 2]
    for item in good:
        assert engine.collected[key_of(item)].tokens == outputs_of(item)
    idle(engine)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("plan_ahead", [False, True])
def test_one_exception_without_a_culprit_costs_nobody_anything(plan_ahead, late):
    engine = Engine(limits(block_size=32, max_num_batched_tokens=32), plan_ahead=plan_ahead)
    items = [work(r, PROMPT[: 10 + 9 * r], 20, seed=r) for r in range(4)] + [
        work(9, PROMPT, 20, choice=c) for c in range(3)
    ]
    for item in items:
        engine.scheduler.add(item)
    for step in range(60):
        raises = step % 7 == 3 and engine.scheduler.load().running > 1
        engine.backend.raises, engine.backend.raises_late = raises and not late, raises and late
        engine.step()
    engine.backend.raises = engine.backend.raises_late = 0
    engine.run()
    for item in items:
        got = engine.collected[key_of(item)]
        assert got.failed is not None or got.tokens == outputs_of(item)
    assert sum(engine.collected[key_of(item)].failed is None for item in items) >= 5
    assert engine.scheduler.load().counters["step_errors"] > 3
    idle(engine)


def test_an_engine_whose_every_step_raises_fails_all_and_stays_alive():
    engine = Engine(limits(), plan_ahead=True)
    engine.backend.raises = 10**9
    items = [work(r, [r] * 10, 5) for r in range(6)]
    assert all(got.failed == "RuntimeError: injected" for got in engine.serve(*items))
    engine.backend.raises = 0
    (got,) = engine.serve(work(9, PROMPT, 5))
    assert got.tokens == outputs_of(work(9, PROMPT, 5))
    idle(engine)


def test_a_binding_that_raises_fails_its_sequence_only():
    engine = Engine(limits())
    bind = engine.backend.bind_slot

    def picky(slot, params, *rest):
        if params.seed == 13:
            raise ValueError("bad seed")
        bind(slot, params, *rest)

    engine.backend.bind_slot = picky
    items = [work(r, PROMPT, 5, seed=12 + r) for r in range(3)]
    collected = engine.serve(*items)
    assert [got.failed for got in collected] == [None, "ValueError: bad seed", None]
    assert collected[0].tokens == outputs_of(items[0])
    assert collected[2].tokens == outputs_of(items[2])
    assert engine.scheduler.load().counters["step_errors"] == 1


def test_the_queue_is_bounded():
    engine = Engine(limits(max_num_waiting=2))
    engine.scheduler.add(work(1, [1]))
    engine.scheduler.add(work(2, [1]))
    with pytest.raises(QueueFull, match="waiting"):
        engine.scheduler.add(work(3, [1]))


def test_only_one_step_may_be_planned_ahead():
    engine = Engine(limits())
    engine.scheduler.add(work(1, PROMPT, 9))
    assert engine.plan()
    assert engine.plan()
    with pytest.raises(RuntimeError, match="two steps"):
        engine.scheduler.plan()


def prepare_adoption(engine, shared, late):
    """A local sequence prefills what a reservation already waits for; then the KV of all of it comes from another engine."""
    source = Engine(limits())
    assert engine.scheduler.reserve(shared).cached_tokens == 0
    source.scheduler.add(shared, prefill_only=True)
    source.run()
    first = SampledToken(source.collected[key_of(shared)].tokens[0])
    late()
    move(source, engine, shared, first, 0)


def test_a_prefilling_sequence_goes_on_behind_blocks_that_arrived_meanwhile():
    engine = Engine(limits(max_num_batched_tokens=16))
    shared, local = work(1, PROMPT + PROMPT, 2), work(2, [*PROMPT, *PROMPT, 7, 8], 5)

    def late():
        engine.scheduler.add(local)
        engine.step()

    prepare_adoption(engine, shared, late)
    engine.run()
    assert engine.collected[key_of(local)].tokens == outputs_of(local)
    assert engine.collected[key_of(local)].cached_tokens == 64
    assert engine.scheduler.load().counters["prefill_tokens"] == 16 + 2


def test_blocks_adopted_ahead_of_a_step_that_fails_are_not_written():
    engine = Engine(limits(max_num_batched_tokens=24))
    shared, other, local = work(1, PROMPT + PROMPT, 2), work(2, [9] * 90, 2), work(3, [*PROMPT, *PROMPT, 7, 8], 5)

    def late():
        engine.scheduler.add(other)
        engine.scheduler.add(local)
        engine.step()
        assert engine.plan()
        assert [(row.start, row.count) for row in engine.plans[-1].rows] == [(16, 16), (8, 8)]

    prepare_adoption(engine, shared, late)
    assert engine.plan()
    assert (engine.plans[-1].rows[-1].start, engine.plans[-1].rows[-1].count) != (16, 8), "nothing was adopted"
    engine.backend.raises = 1
    engine.run()
    for item in (other, local):
        assert engine.collected[key_of(item)].tokens == outputs_of(item)
    assert engine.scheduler.load().counters["step_errors"] == 1
