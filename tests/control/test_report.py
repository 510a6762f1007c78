"""What the gateway tells about itself."""

from world import World


def test_choices_that_ended_are_not_running() -> None:
    world = World(lambda n: 0, [("worker-0", "both")]).ready()
    assert world.submit(list(range(20)), max_tokens=30, n=3) is None
    while not world.clients[1].tokens:
        world.run(1)
    world.stop_choice(1, 0)
    requests = world.core.status(0)["requests"]
    assert isinstance(requests, dict)
    assert requests["running"] + requests["waiting"] == 2
    gauges = {name: value for name, labels, value in world.core.metrics(0) if not labels}
    assert gauges["relay_num_requests_running"] == requests["running"]
