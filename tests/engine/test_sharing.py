"""Equal prefixes are computed once: from the cache, by waiting for a step in flight, by copying the start of a block."""

import pytest

from tests.engine.driver import Engine, key_of, limits, work
from tests.engine.hash_backend import oracle

SHARED = [(i * i) % 50 for i in range(128)]


def exact(items, collected):
    for item, got in zip(items, collected, strict=True):
        assert got.tokens == oracle(item.token_ids, item.num_prompt, item.params, item.choice, 256)[0]


@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_requests_that_arrive_together_compute_a_shared_prefix_once(plan_ahead, block_size):
    engine = Engine(limits(block_size=block_size, max_num_batched_tokens=48), plan_ahead=plan_ahead)
    items = [work(r, [*SHARED, r, r + 1, r + 2], 1) for r in range(8)]
    exact(items, engine.serve(*items))
    assert engine.backend.tokens_computed == len(SHARED) + 8 * 3
    assert [engine.collected[key_of(item)].cached_tokens for item in items] == [0] + [len(SHARED)] * 7


@pytest.mark.parametrize("length", [5, 16, 23, 32, 100, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_choices_of_one_prompt_compute_only_the_last_token_again(length, block_size):
    engine = Engine(limits(block_size=block_size))
    items = [work(1, SHARED[:length], 5, choice=c, seed=4) for c in range(4)]
    collected = engine.serve(*items)
    exact(items, collected)
    copies = engine.scheduler.load().counters["copied_blocks"]
    again = (
        1
        if (length - 1) % block_size * 8 >= block_size or (length - 1) % block_size == 0
        else (length - 1) % block_size + 1
    )
    assert engine.backend.tokens_computed == length + 3 * again + 4 * 4
    assert copies == (3 if (length - 1) % block_size * 8 >= block_size else 0)
    assert len({tuple(got.tokens) for got in collected}) == 4


def test_a_running_choice_lends_its_tail_to_a_later_one():
    engine = Engine(limits())
    engine.scheduler.add(work(1, SHARED[:30], 20))
    for _ in range(4):
        engine.step()
    before = engine.backend.tokens_computed
    items = [work(2, [*SHARED[:28], 1, 2], 1)]
    exact(items, engine.serve(*items))
    assert engine.collected[key_of(items[0])].cached_tokens == 28
    assert engine.backend.tokens_computed - before == 2 + 20 - 4


def test_a_tail_is_copied_only_as_far_as_it_is_computed():
    engine = Engine(limits())
    engine.scheduler.add(work(1, SHARED[:20], 20))
    for _ in range(5):
        engine.step()
    known = SHARED[:20] + engine.collected[key_of(work(1, []))].tokens
    item = work(2, [*known, 1, 2], 2)
    exact([item], engine.serve(item))
    assert engine.collected[key_of(item)].cached_tokens == len(known) - 1, "the last token drawn has no KV yet"


def test_tokens_that_part_inside_a_published_block_are_copied_up_to_there():
    engine = Engine(limits(block_size=64))
    first, second = work(1, SHARED, 1), work(2, [*SHARED[:112], *([1] * 10)], 1)
    exact([first], engine.serve(first))
    exact([second], engine.serve(second))
    assert engine.collected[key_of(second)].cached_tokens == 112
    assert engine.plans[-1].block_copies


def test_a_block_to_be_copied_cannot_be_taken_before_the_step_has_copied_it():
    engine = Engine(limits(block_size=64, num_blocks=4))
    engine.serve(work(1, SHARED[:64], 1))
    engine.scheduler.add(work(2, [*SHARED[:40], 1, 2], 1))
    assert engine.plan()
    ((source, _),) = engine.plans[-1].block_copies
    reservation = engine.scheduler.reserve(work(3, [5] * 100, 1))
    assert reservation is not None
    assert source not in reservation.block_table
    assert engine.scheduler.reserve(work(4, [6] * 10, 1)) is None
    engine.execute()
    engine.land()
    assert engine.scheduler.reserve(work(4, [6] * 10, 1)) is not None


def test_the_last_token_is_never_taken_from_the_cache():
    engine = Engine(limits())
    for request in (1, 2):
        engine.serve(work(request, SHARED, 1))
    assert engine.collected[key_of(work(2, []))].cached_tokens == len(SHARED) - 1
    assert engine.plans[-1].num_tokens == 1


def test_salt_separates_equal_prompts():
    engine = Engine(limits())
    items = [work(r, SHARED, 1, salt=salt) for r, salt in enumerate(["", "a", "b", "a"])]
    exact(items, engine.serve(*items))
    assert [engine.collected[key_of(item)].cached_tokens for item in items] == [0, 0, 0, len(SHARED) - 1]


def test_a_follower_computes_for_itself_when_its_leader_is_cancelled():
    engine = Engine(limits(max_num_batched_tokens=32), plan_ahead=True)
    leader, follower = work(1, SHARED, 3), work(2, SHARED, 3)
    engine.scheduler.add(leader)
    engine.scheduler.add(follower)
    engine.step()
    engine.scheduler.cancel(key_of(leader))
    engine.run()
    exact([follower], [engine.collected[key_of(follower)]])
    assert key_of(leader) not in engine.collected


def test_generated_tokens_are_cached_for_the_next_turn():
    engine = Engine(limits())
    first = work(1, SHARED[:20], 40)
    (got,) = engine.serve(first)
    second = work(2, [*SHARED[:20], *got.tokens, 1, 2, 3], 1)
    exact([second], engine.serve(second))
    assert engine.collected[key_of(second)].cached_tokens == 48  # 59 positions were computed: three full blocks


def test_the_router_hears_what_is_cached_and_what_is_gone():
    engine = Engine(limits(num_blocks=10, block_size=32, max_model_len=256))
    engine.serve(work(1, SHARED, 1))
    added, removed = engine.scheduler.cache_changes()
    assert (len(added), removed) == (8, [])
    assert sorted(engine.scheduler.cached_units()) == sorted(added)
    assert engine.scheduler.cache_changes() == ([], [])
    engine.serve(work(2, [49] * 250, 1))
    news, gone = engine.scheduler.cache_changes()
    assert len(news) == 14
    assert set(gone) <= set(added)
    assert sorted(set(added) - set(gone) | set(news)) == sorted(engine.scheduler.cached_units())
