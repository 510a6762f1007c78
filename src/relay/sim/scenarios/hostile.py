"""Scenarios about requests that kill and visitors that lie."""

from dataclasses import replace

from relay.sim import strangers
from relay.sim.scenarios.stage import Scenario, Stage, cluster, control, scheduler
from relay.sim.swarm import MS
from relay.worker.core import WorkerConfig

PAIR = ("gateway-0", "gateway-1")


def _poison_request(stage: Stage) -> None:
    early = [stage.submit(prompt=60, max_tokens=20, salt=salt) for salt in range(6)]
    poison = stage.submit(prompt=60, max_tokens=8, salt=50, poison=True)
    late = [stage.submit(prompt=60, max_tokens=8, salt=salt) for salt in range(6, 14)]
    stage.until(lambda: not poison.open, "the poison is recognised", 30_000)
    failure = poison.failure
    stage.require(failure is not None and failure.code == "quarantined", f"the poison ended with {failure}")
    stage.finish(*early, *late)
    crashes = stage.world.poison_crashes
    stage.require(crashes <= 3, f"the poison has taken {crashes} engines")


def _late_poison(stage: Stage) -> None:
    others = [stage.submit(prompt=60, max_tokens=20, salt=salt) for salt in range(4)]
    poison = stage.submit(prompt=60, max_tokens=20, salt=50, n=4, poison=True, late=5)
    stage.until(lambda: not poison.open, "the poison is recognised", 30_000)
    failure = poison.failure
    stage.require(failure is not None and failure.code == "quarantined", f"the poison ended with {failure}")
    stage.finish(*others)
    crashes = stage.world.poison_crashes
    stage.require(crashes <= 3, f"the poison has taken {crashes} engines")


def _hang_seen_by_another(stage: Stage) -> None:
    own = PAIR[0]
    others = [stage.submit(prompt=40, max_tokens=12, salt=salt) for salt in range(4)]
    poison = stage.submit(prompt=40, max_tokens=8, salt=50, poison=True)

    def hung() -> str:
        return next((name for name, node in stage.world.workers.items() if node.running and node.running.hung), "")

    while poison.open:
        stage.until(lambda: not poison.open or hung() != "", "an engine hangs", 10_000)
        name = hung()
        if name:
            mend = stage.partition((name, own))
            life = stage.incarnations()[name]
            stage.until(lambda: stage.incarnations()[name] > life, "its own hears of its end")  # noqa: B023
            mend()
        stage.require(stage.world.poison_crashes <= 3, f"the poison has hung {stage.world.poison_crashes} engines")
    failure = poison.failure
    stage.require(failure is not None and failure.code == "quarantined", f"the poison ended with {failure}")
    stage.finish(*others)


def _strangers(stage: Stage) -> None:
    for salt, way in enumerate((*strangers.TO_GATEWAY, *strangers.TO_ENGINE)):
        client = stage.submit(prompt=80, max_tokens=4, salt=salt)
        decode = stage.engine("decode-0")
        stage.until(lambda: any(r.bytes_copied for r in decode.transport.receivers()), "D receives KV")  # noqa: B023
        strangers.call(stage.world, decode, way)
        stage.finish(client)
    stage.require(not stage.counter("resumed"), "an attempt was given up because of a stranger")
    stage.require(not stage.counter("workers_lost"), "a worker was lost because of a stranger")


SCENARIOS = (
    Scenario(
        "poison-request",
        "vLLM (CVE-2025-48944): one malformed request killed its worker, and a router that retries takes it to the next one",
        "a request that crashes every engine among 14 that do not: it is quarantined after at most three, no other fails",
        cluster(0, 3, scheduler=scheduler(max_num_seqs=4)),
        _poison_request,
    ),
    Scenario(
        "late-poison",
        "vLLM (CVE-2025-48944) again, where what crashes the worker is drawn: several choices of one request reach it at once",
        "a request of four choices, each of which crashes its engine after five tokens: quarantined after at most three",
        cluster(0, 5, scheduler=scheduler(max_num_seqs=2)),
        _late_poison,
    ),
    Scenario(
        "hang-seen-by-another",
        "Two front ends share the workers: the one that notices a hang is not the one whose request it was, and nobody is blamed",
        "a poison hangs its engines, out of sight of its own gateway; the other one has them killed: quarantined after three",
        replace(
            cluster(0, 4, gateways=PAIR, worker=WorkerConfig(report_interval_ns=10 * MS, orphan_hold_ns=2000 * MS)),
            control=control(step_deadline_s=0.6),
            poison_hangs=True,
        ),
        _hang_seen_by_another,
    ),
    Scenario(
        "strangers",
        "vLLM, SGLang, LightLLM (CVE-2025-32444, CVE-2026-3059, CVE-2026-26220): KV ports took what anybody sent them",
        "somebody calls the gateway and D's KV port in each wrong way there is while D receives KV: nothing changes",
        cluster(1, 1),
        _strangers,
    ),
)
