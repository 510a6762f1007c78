import pytest

from relay.engine.scheduler import CannotFit
from tests.engine.driver import Engine, key_of, limits, work
from tests.engine.hash_backend import oracle


def expect(item, bounds):
    outputs, finish, _, _ = oracle(item.token_ids, item.num_prompt, item.params, item.choice, bounds.max_model_len)
    return outputs, finish


@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("budget", [8, 20, 64, 300])
def test_batched_and_chunked_output_is_the_oracles(plan_ahead, block_size, budget):
    bounds = limits(block_size=block_size, max_num_batched_tokens=budget)
    engine = Engine(bounds, plan_ahead=plan_ahead)
    items = [
        work(r, [(r * 7 + i) % 50 for i in range(1 + 13 * r)], 6 + r, seed=r, eos_token_ids=(3,)) for r in range(8)
    ]
    for item, got in zip(items, engine.serve(*items), strict=True):
        assert (got.tokens, got.finish) == expect(item, bounds)
        assert got.positions == list(range(len(got.tokens)))


def test_work_that_never_fits_is_refused():
    engine = Engine(limits(num_blocks=4))
    with pytest.raises(CannotFit, match="blocks"):
        engine.scheduler.add(work(1, [1] * 60, 6))
    with pytest.raises(CannotFit, match="nothing to generate"):
        engine.scheduler.add(work(1, [1] * 10, 2, num_prompt=8))
    engine.scheduler.add(work(1, [1] * 60, 5))
    with pytest.raises(ValueError, match="known"):
        engine.scheduler.add(work(1, [1] * 60, 5))
    engine.scheduler.cancel(key_of(work(1, [1])))
    engine.scheduler.check()
    assert not engine.scheduler.has_work()
