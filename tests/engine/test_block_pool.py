import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.engine.block_pool import BlockPool, BlockState
from relay.engine.prefix_cache import PrefixCache


def pool_of(count, evicted=None):
    return BlockPool(count, evicted.append if evicted is not None else lambda block: None)


def test_the_longest_unused_cached_block_is_evicted_and_free_ones_come_first():
    evicted = []
    pool = pool_of(3, evicted)
    a, b, c = (pool.allocate() for _ in range(3))
    pool.publish(a)
    pool.publish(b)
    pool.release([b])
    pool.release([a, c])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 2, 0)
    assert pool.allocate() == c
    assert pool.allocate() == b
    pool.acquire(a)
    assert evicted == [b]
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_block_of_a_step_in_flight_returns_when_the_last_such_step_has_finished():
    pool = pool_of(2)
    block = pool.allocate()
    pool.publish(block)
    pool.release([block], after_step=5)
    assert pool.state(block) is BlockState.QUARANTINED
    pool.acquire(block)
    pool.release([block], after_step=6)
    pool.settle(5)
    assert pool.state(block) is BlockState.QUARANTINED
    pool.settle(6)
    assert pool.state(block) is BlockState.CACHED
    pool.check({})


def test_misuse_is_refused():
    pool = pool_of(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([block])
    with pytest.raises(ValueError, match="free"):
        pool.acquire(block)
    with pytest.raises(ValueError, match="no holder"):
        pool.publish(block)


def test_check_sees_a_lost_holder():
    pool = pool_of(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check({})
    pool.check({block: 1})


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "acquire", "release", "publish", "settle"]), st.integers(0, 7)),
        max_size=80,
    )
)
def test_every_block_is_in_one_state(operations):
    evicted = []
    pool = pool_of(5, evicted)
    held: list[int] = []
    published: set[int] = set()
    step = 0
    for name, n in operations:
        if name == "allocate" and pool.available:
            held.append(pool.allocate())
        elif name == "acquire" and published:
            block = sorted(published)[n % len(published)]
            pool.acquire(block)
            held.append(block)
        elif name == "release" and held:
            step += 1
            pool.release([held.pop(n % len(held))], step if n % 2 else 0)
        elif name == "publish" and held:
            block = held[n % len(held)]
            pool.publish(block)
            published.add(block)
        elif name == "settle":
            pool.settle(step)
        published.difference_update(evicted)
        evicted.clear()
        pool.check({block: held.count(block) for block in held})
    pool.release(held)
    pool.settle(step)
    assert pool.num_cached == len(published)
    assert pool.num_free == 5 - len(published)


def test_tokens_and_parent_are_compared_on_a_hit():
    cache = PrefixCache()
    assert cache.publish(4, b"root", (b"h",), [1, 2])
    assert cache.lookup(b"root", b"h", [1, 2]) == 4
    assert cache.lookup(b"root", b"h", [1, 3]) is None
    assert cache.lookup(b"other", b"h", [1, 2]) is None
    assert cache.lookup(b"root", b"g", [1, 2]) is None


def test_a_second_block_of_equal_content_stays_private():
    cache = PrefixCache()
    assert cache.publish(1, b"root", (b"h",), [1])
    assert not cache.publish(2, b"root", (b"h",), [1])
    assert 2 not in cache
    cache.forget(1)
    assert cache.changes() == ([], [])
    assert len(cache) == 0


def test_a_unit_shared_by_two_blocks_is_gone_with_the_last():
    cache = PrefixCache()
    cache.publish(1, b"root", (b"a", b"b"), [1, 2])
    cache.publish(2, b"root", (b"a", b"c"), [1, 3])
    assert cache.changes() == ([b"a", b"b", b"c"], [])
    assert cache.lookup_start(b"root", [b"a", b"x"], [1, 9]) == (1, 1)
    cache.forget(1)
    assert cache.changes() == ([], [b"b"])
    assert cache.lookup_start(b"root", [b"a", b"x"], [1, 9]) == (2, 1)
    cache.forget(2)
    assert sorted(cache.changes()[1]) == [b"a", b"c"]
    cache.check()
