from tests.worker.harness import World, expected, work

PROMPT = [7, 3, 9, 1, 4] * 12  # 60 tokens


def test_split_equals_a_run_alone():
    world = World()
    p, d = world.worker("p"), world.worker("d")
    request = work(PROMPT, capture=True)
    accept = world.split(p, d, request)
    assert accept.cached_tokens == 0
    world.settle()
    tokens, finish, _, _ = expected(request)
    assert world.tokens(request) == tokens
    assert world.finish(request) == finish
    assert not world.failures
    p.check_empty()
    d.check_empty()
