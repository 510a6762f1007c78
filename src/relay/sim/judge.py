"""How a request may end (I5, I11): a failure or a refusal needs something that excuses it."""

from typing import TYPE_CHECKING

from relay.config import SECOND
from relay.control.contract import RequestFailure
from relay.sim.clients import Client
from relay.sim.kernel import Violation

if TYPE_CHECKING:
    from relay.sim.world import World


def judge(world: "World", client: Client, failure: RequestFailure, refused: bool) -> None:
    """Whether a request may end like this (I5, I11)."""
    world.kernel.sometimes(f"{'refused' if refused else 'failed'}: {failure.code}")
    code = failure.code
    total = len(client.submission.token_ids) + client.submission.params.max_tokens
    disturbed = world.num_faults > client.expectation.faults_before or (world.phase == "chaos" and world.num_faults > 0)
    if failure.status in (429, 503) and code != "numerics_changed" and not (failure.retry_after_s or 0) >= 1:
        raise Violation("I5", f"request {client.request}: {code} without a time to retry after")
    if refused:
        fine = {
            "context_length_exceeded": total > world.swarm.scheduler.max_model_len,
            "kv_cache_exceeded": total > world.swarm.kv_tokens,
            "queue_full": True,
            "no_workers": disturbed
            or _crash_looping(world)
            or not any(node.running for node in world.workers.values()),
        }.get(code, False)
    else:
        fine = {
            # Taken before its gateway had seen any worker.
            "kv_cache_exceeded": total > world.swarm.kv_tokens,
            "deadline_exceeded": client.submission.deadline_ns is not None
            and world.kernel.now_ns >= client.submission.deadline_ns,
            # To the gateway a crash that was injected looks like any other.
            "quarantined": client.expectation.poison or world.faults["crash_engine"] > 0,
            # An upgrade by itself ends no stream, where there is another worker to keep the old numerics for it. Crashes do:
            # what starts again computes as the new version does, whoever has ended it.
            # A limit (docs/failure-model.md): the last worker of old numerics waits only for the gateway that was told.
            "numerics_changed": len(world.numerics) > 1
            and (
                world.num_faults > 0
                or world.poison_crashes > 0
                or len(world.swarm.slots) == 1
                or client.gateway != world.swarm.gateways[0]  # which is given all orders
            ),
            "no_workers": disturbed,
            "retries_exhausted": disturbed or client.expectation.poison,
            "token_disagreement": world.wrong_machines > 0,
            "engine_error": world.step_errors > 0,
        }.get(code, False)
    if client.expectation.probe or not fine:
        name = "I11" if code == "quarantined" else "I12" if client.expectation.probe else "I5"
        raise Violation(
            name, f"request {client.request} {'refused' if refused else 'failed'}: {code}: {failure.message}"
        )


def _crash_looping(world: "World") -> bool:
    """Whether faults and poison may have ended workers so often that none counts as coming back, until one is stable."""
    restart = world.swarm.control.restart
    memory_s = restart.stable_after_s + restart.max_delay_s + world.swarm.control.detector.start_deadline_s
    recent = world.kernel.now_ns - world.last_fault_ns <= int(memory_s * SECOND)
    ends = world.num_faults + world.crashed_starts + world.poison_crashes
    return recent and ends >= restart.crash_loop_failures
