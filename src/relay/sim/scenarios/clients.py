"""Scenarios about clients that go away."""

from collections.abc import Callable

from relay.control.transitions import AttemptState
from relay.sim.clients import Client
from relay.sim.scenarios.stage import Scenario, Stage, cluster
from relay.worker.held import HeldState

GONE_MS = 1000  # by then nothing of a client that left may be held anywhere


def _abort_storm(stage: Stage) -> None:
    below = stage.kernel.tape.below
    for wave in range(3):
        clients = [stage.submit(prompt=40 + salt, max_tokens=40, salt=20 * wave + salt) for salt in range(20)]
        for client in clients:
            stage.wait(below(8, "abort ms"))
            stage.disconnect(client)
        stage.until(stage.all_idle, "nothing is held for clients that left", GONE_MS)
        stage.finish(
            *[stage.submit(prompt=40, max_tokens=4, salt=20 * wave + salt) for salt in range(4)], within_ms=1000
        )


def _moments(stage: Stage, client: Client) -> dict[str, Callable[[], bool]]:
    """Every state that gateway, P and D have for a request."""
    state, holds = stage.in_state, stage.holds
    return {
        "reserving": lambda: state(client, AttemptState.RESERVING),
        "prefilling": lambda: state(client, AttemptState.PREFILLING),
        "P computes": lambda: holds("prefill-0", client, HeldState.PREFILLING),
        "D receives": lambda: any(r.bytes_copied for r in stage.engine("decode-0").transport.receivers()),
        "P has handed off": lambda: holds("prefill-0", client, HeldState.HANDED_OFF),
        "handoff": lambda: state(client, AttemptState.HANDOFF),
        "running": lambda: state(client, AttemptState.RUNNING),
        "some tokens": lambda: len(client.tokens[0]) > 3,
        "nearly done": lambda: len(client.tokens[0]) > 8,
    }


def _abort_everywhere(stage: Stage) -> None:
    names = list(_moments(stage, stage.submit(prompt=2, max_tokens=1)))
    stage.wait(200)
    waiting = [stage.submit(prompt=60, max_tokens=4, salt=salt) for salt in range(12)]
    stage.until(lambda: any(stage.waits(client) for client in waiting), "one waits")
    for client in waiting:
        stage.disconnect(client)
    for salt, name in enumerate(names):
        client = stage.submit(prompt=80, max_tokens=10, salt=salt)
        stage.until(_moments(stage, client)[name], f"a request is in state {name!r}")
        stage.disconnect(client)
        stage.until(stage.all_idle, f"nothing is held of a request that left in state {name!r}", GONE_MS)
    stage.require(not stage.counter("resumed"), "somebody took a cancelled request for one that failed")


SCENARIOS = (
    Scenario(
        "abort-storm",
        "SGLang (pull request 28651): aborts did not reach decode, each held its place for 300 s, and throughput fell to 1/15",
        "three waves of 20 clients leave at random moments: within a second nothing of them is held, and new requests finish",
        cluster(1, 2),
        _abort_storm,
    ),
    Scenario(
        "abort-in-every-state",
        "SGLang (pull request 28651) again: the abort was lost in one state of many",
        "one client leaves in each state that gateway, P and D have: within a second all workers are idle",
        cluster(1, 1),
        _abort_everywhere,
    ),
)
