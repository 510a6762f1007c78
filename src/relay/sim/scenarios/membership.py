"""Scenarios about who is believed to be alive."""

from relay.config import SECOND
from relay.sim.clients import Client
from relay.sim.scenarios.stage import Scenario, Stage, cluster, control, scheduler
from relay.sim.swarm import MS
from relay.worker.core import WorkerConfig
from relay.worker.held import HeldState


def _busy(stage: Stage, requests: int = 6, max_tokens: int = 40) -> list[Client]:
    """Requests that are all under way."""
    clients = [stage.submit(prompt=40, max_tokens=max_tokens, salt=salt) for salt in range(requests)]
    stage.until(lambda: any(client.tokens[0] for client in clients), "the first token comes")
    return clients


def _master_stall(stage: Stage) -> None:
    clients = _busy(stage)
    before = stage.incarnations()
    stage.stall_gateway(13_800)
    stage.finish(*clients)
    stage.require(stage.incarnations() == before, f"workers were replaced: {stage.incarnations()}")
    stage.require(not stage.counter("resumed"), "attempts were given up because the gateway had slept")


def _registry_blip(stage: Stage) -> None:
    clients = _busy(stage)
    before = stage.incarnations()
    mend = stage.cut_off(*stage.world.workers)
    stage.wait(
        1200
    )  # longer than the silence that means death of one worker, shorter than that which means death of all
    mend()
    stage.finish(*clients)
    stage.require(stage.incarnations() == before, f"workers were replaced: {stage.incarnations()}")


def _dead_affinity(stage: Stage) -> None:
    stage.finish(stage.submit(prompt=60, max_tokens=2, shared=49, salt=1))
    stage.wait(100)
    probe = stage.submit(prompt=60, max_tokens=30, shared=49, salt=2)
    stage.until(lambda: bool(probe.tokens[0]), "the first token comes")
    favourite = stage.decode_of(probe)
    # Dead: what shares the prefix goes elsewhere at once, and what ran there goes on.
    stage.kill(favourite)
    stage.until(lambda: not stage.ready(favourite), "the death is noticed", 10)
    followers = [stage.submit(prompt=60, max_tokens=2, shared=49, salt=salt) for salt in range(3, 6)]
    stage.finish(probe, *followers, within_ms=1000)
    stage.until(lambda: stage.ready(favourite), "it comes back")
    # Merely silent: no new work from the moment of suspicion on, however much of it is cached there.
    stage.finish(*[stage.submit(prompt=60, max_tokens=2, shared=49, salt=salt) for salt in range(6, 9)])
    stage.wait(200)
    probe = stage.submit(prompt=60, max_tokens=2, shared=49, salt=9)
    favourite = stage.decode_of(probe)
    stage.finish(probe)
    mend = stage.cut_off(favourite)
    stage.until(lambda: stage.world.gateway.core.state.workers[favourite].suspect, "it is suspected", 700)
    follower = stage.submit(prompt=60, max_tokens=2, shared=49, salt=10)
    stage.require(stage.decode_of(follower) != favourite, f"new work went to {favourite}, which is suspected")
    stage.finish(follower, within_ms=1000)
    mend()


def _sigstop_leader(stage: Stage) -> None:
    bound_ms = {"engine": 800, "both": 1500}
    for salt, which in enumerate(bound_ms):
        client = stage.submit(prompt=40, max_tokens=60, salt=salt)
        stage.until(lambda: len(client.tokens[0]) > 2, "it runs")  # noqa: B023 - called at once
        worker = stage.decode_of(client)
        have = len(client.tokens[0])
        thaw = stage.freeze(worker, agent=which == "both")
        stage.until(lambda: len(client.tokens[0]) > have + 1, f"{which} frozen: goes on", bound_ms[which])  # noqa: B023
        stage.require(stage.decode_of(client) != worker, f"it goes on at {worker}, which is frozen")
        thaw()  # its last words change nothing, its incarnation is over
        stage.finish(client)
        stage.until(lambda: stage.ready(worker), f"{worker} is back")  # noqa: B023


def _swizzle_clog(stage: Stage) -> None:
    below = stage.kernel.tape.below
    clients = _busy(stage, 8, 60)
    hosts = ["gateway", *stage.world.workers]
    for _ in range(3):
        pairs = [(a, b) for a in hosts for b in hosts if a != b and below(2, "clogged")]
        mends = []
        for pair in pairs:
            mends.append(stage.partition(pair))
            stage.wait(below(60, "clog ms"))
        while mends:
            mends.pop(below(len(mends), "unclog"))()
            stage.wait(below(60, "unclog ms"))
    stage.finish(*clients, within_ms=60_000)


def _restart_storm(stage: Stage) -> None:
    worker = "worker-0"
    clients = [stage.submit(prompt=40, max_tokens=20, salt=salt) for salt in range(3)]
    begun_ns = stage.kernel.now_ns
    while stage.kernel.now_ns - begun_ns < 10 * SECOND:  # it crashes whenever it is up
        if stage.node(worker).running is not None:
            stage.crash(worker)
        stage.wait(5)
    lives = stage.incarnations()[worker]
    stage.require(lives <= 10 + 8, f"{lives} starts in 10 s: the delays do not grow")
    stage.finish(*clients)
    stage.require(stage.incarnations()["worker-1"] == 1, "a crash loop elsewhere cost worker-1 its life")
    failure = stage.submit(prompt=40, max_tokens=2, salt=9)
    stage.finish(failure, within_ms=1000)
    stage.until(lambda: stage.ready(worker), "it is given another chance", 3000)


def _rolling_upgrade(stage: Stage) -> None:
    clients = [stage.submit(prompt=40, max_tokens=60, salt=salt) for salt in range(6)]
    stage.until(lambda: all(client.tokens[0] for client in clients), "all run")
    stage.world.upgrade()
    for worker in list(stage.world.workers):
        before = stage.incarnations()[worker]
        clients.append(stage.submit(prompt=40, max_tokens=30, salt=len(clients)))
        stage.terminate(worker)
        stage.until(
            lambda: stage.incarnations()[worker] > before and stage.ready(worker),  # noqa: B023 - called at once
            f"{worker} is replaced",
            20_000,
        )
    stage.finish(*clients)
    ids = {name: node.running.numerics for name, node in stage.world.workers.items() if node.running}
    stage.require(len(set(ids.values())) == 1 and "numerics-2" in ids.values(), f"the upgrade left {ids}")


def _version_skew(stage: Stage) -> None:
    clients = [stage.submit(prompt=40, max_tokens=50, salt=salt) for salt in range(3)]
    stage.until(lambda: all(client.tokens[0] for client in clients), "all run")
    stage.world.upgrade()
    first, second, third = stage.world.workers
    stage.kill(first)  # comes back with other numerics
    stage.until(lambda: stage.incarnations()[first] > 1 and stage.ready(first), f"{first} is replaced")
    stage.kill(second)  # its streams may go on at the third one only, however free the first one is
    stage.finish(*clients)
    stage.require(stage.engine(first).numerics != stage.engine(third).numerics, "there was no skew")


def _sigterm(stage: Stage) -> None:
    for salt, victim in enumerate(("decode-0", "prefill-0", "decode-1")):
        clients = [stage.submit(prompt=80, max_tokens=30, salt=10 * salt + each) for each in range(4)]
        stage.until(lambda: not stage.idle(victim), f"{victim} has work")  # noqa: B023 - called at once
        before = stage.incarnations()[victim]
        stage.terminate(victim)
        stage.until(
            lambda: stage.incarnations()[victim] > before and stage.ready(victim),  # noqa: B023
            f"{victim} is replaced",
            3000,
        )
        stage.finish(*clients, within_ms=5000)


def _handed_back(stage: Stage) -> None:
    for salt in range(2):
        client = stage.submit(prompt=100, max_tokens=12, salt=salt)
        decode = stage.decode_of(client)
        lives = stage.incarnations()
        stage.until(lambda: stage.holds("prefill-0", client, HeldState.PREFILLING), "P computes it")  # noqa: B023
        stage.terminate("prefill-0")
        stage.finish(client)
        stage.until(
            lambda: stage.incarnations()["prefill-0"] > lives["prefill-0"] and stage.ready("prefill-0"),  # noqa: B023
            "P is replaced",
            3000,
        )
        stage.require("attempt 2:" in stage.story(client), "P was in time: the scenario is too easy")
        stage.require(stage.incarnations()[decode] == lives[decode], f"{decode} left with P")


SCENARIOS = (
    Scenario(
        "master-stall",
        "Mooncake (issues 3937, 4181): the master stood still for 13.8 s, all 10 s leases ran out, its whole index was erased",
        "the gateway stops for 13.8 s under load: no worker is replaced and no attempt given up, since the silence was its own",
        cluster(1, 2),
        _master_stall,
    ),
    Scenario(
        "registry-blip",
        "Dynamo (issue 3493): etcd was away for a moment, leases ran out, and every component restarted at once",
        "gateway and workers lose sight of each other all at once for longer than one worker may be silent: nobody is restarted",
        cluster(1, 2),
        _registry_blip,
    ),
    Scenario(
        "dead-affinity",
        "Dynamo (pull request 11646): cache affinity kept choosing a worker that was dead",
        "the worker that has the prefix is killed, later cut off: what shares the prefix goes elsewhere and finishes at once",
        cluster(0, 2, load_ms=400),
        _dead_affinity,
    ),
    Scenario(
        "sigstop-leader",
        "Mooncake (issue 2253): a leader that was stopped, not killed, was never noticed",
        "SIGSTOP to an engine, then to engine and agent: the stream goes on elsewhere in time, SIGCONT changes nothing",
        cluster(0, 2),
        _sigstop_leader,
    ),
    Scenario(
        "swizzle-clog",
        "FoundationDB: clogging a random subset of connections one by one and unclogging them in another order finds most bugs",
        "directions between gateway and workers are blocked one by one and opened in another order, three times",
        cluster(2, 2, control=control(handoff_deadline_s=1.0)),
        _swizzle_clog,
    ),
    Scenario(
        "restart-storm",
        "Dynamo (pull request 7932): everything restarted and registered at the same moment and took the name service down",
        "an engine crashes whenever it is up, for 10 s: its starts become rare, the other worker serves and is not blamed",
        cluster(0, 2, load_ms=20),
        _restart_storm,
    ),
    Scenario(
        "rolling-upgrade",
        "llm-d: the router takes any prefill worker to fit any decode worker, so an upgrade needs a second pool",
        "workers are replaced one after another by ones with other numerics under load: KV never crosses, no stream fails",
        cluster(2, 2),
        _rolling_upgrade,
    ),
    Scenario(
        "sigterm-under-load",
        "vLLM: SIGTERM aborts what runs, and a prefill worker cannot wait until its KV has been pulled",
        "decode and prefill workers get SIGTERM in the middle of streams, with 60 ms to drain: all streams go on, exactly",
        cluster(1, 2, worker=WorkerConfig(report_interval_ns=10 * MS, drain_timeout_ns=60 * MS)),
        _sigterm,
    ),
    Scenario(
        "prefill-hands-back",
        "the fault matrix of this project: P drained, D passed on the reason, and the gateways had the healthy D leave as well",
        "P gets SIGTERM under a prompt that takes longer than its drain may: the prompt goes elsewhere, D stays",
        cluster(
            1,
            2,
            gateways=("gateway-0", "gateway-1"),
            scheduler=scheduler(max_num_batched_tokens=16),
            step_ns=40 * MS,
            worker=WorkerConfig(report_interval_ns=10 * MS, drain_timeout_ns=60 * MS),
        ),
        _handed_back,
    ),
    Scenario(
        "version-skew",
        "rolling upgrades everywhere: for a while old and new workers serve together, and a stream changes its bits on the way",
        "one of three workers has other numerics already when another dies: its streams go on at the one that is like it",
        cluster(0, 3),
        _version_skew,
    ),
)
