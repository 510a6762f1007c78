"""Scenarios about workers that are neither well nor dead."""

from dataclasses import replace

from relay.control_config import ControlConfig, HedgeConfig
from relay.sim.clients import Client
from relay.sim.scenarios.stage import Scenario, Stage, cluster, control

CRAWL = 100  # times slower: a step takes 0.4 s
HANG = 10**6


def _hedging(**detector: float) -> ControlConfig:
    """Hedges are opened early and can always be paid."""
    hedge = HedgeConfig(budget_per_mille=1000, slow_step_s=0.15, slow_factor=8)
    return replace(control(**detector), hedge=hedge)


def _hedged(stage: Stage, salt: int, slower: int = CRAWL, wrong: str = "") -> tuple[Client, str, str]:
    """(client, its worker, the hedge's worker), when the hedge has just been opened: the worker crawls (and is ``wrong``)."""
    client = stage.submit(prompt=40, max_tokens=30, salt=salt, logprobs=1)
    stage.until(lambda: len(client.tokens[0]) > 2, "it runs")
    worker = stage.decode_of(client)
    stage.fault("slow", worker)
    client.deceived = bool(wrong)
    stage.engine(worker).backend.wrong = wrong
    stage.engine(worker).slow = slower
    stage.until(lambda: len(stage.live(client)) == 2, "a second attempt is opened")
    return client, worker, stage.live(client)[1].decode.id


def _hung_backend(stage: Stage) -> None:
    stage.finish(*[stage.submit(prompt=40, max_tokens=8, salt=salt) for salt in range(6)])
    before = stage.incarnations()
    client, worker, _ = _hedged(stage, 7, slower=HANG)
    have = len(client.tokens[0])
    stage.until(lambda: len(client.tokens[0]) > have, "the hedge goes on", 200)
    others = [stage.submit(prompt=40, max_tokens=4, salt=salt) for salt in range(8, 12)]
    stage.finish(client, *others, within_ms=2000)
    stage.require(stage.counter("hedges_won") == 1, "the hedge did not win")
    stage.until(lambda: stage.incarnations()[worker] > before[worker] and stage.ready(worker), "it is replaced", 4000)


def _lying_hedge(stage: Stage) -> None:
    stage.finish(*[stage.submit(prompt=40, max_tokens=8, salt=salt) for salt in range(6)])
    stage.world.wrong_machines += 1
    wrong = stage.kernel.tape.of(("token", "logprob"), "wrong")
    client, worker, second = _hedged(stage, 7)
    stage.engine(second).backend.wrong = wrong
    mend = stage.partition((second, "gateway"))  # its words come when the other one has said the same position
    have = len(client.tokens[0])
    stage.until(lambda: len(client.tokens[0]) > have, "the first attempt says the position too")
    mend()
    stage.until(lambda: stage.counter("token_disagreements") > 0, f"a wrong {wrong} rings the alarm")
    stage.engine(worker).slow = 1
    stage.finish(client)  # a third worker agrees with what the client was sent; so does the oracle
    stage.engine(second).backend.wrong = ""
    stage.require("disagree" in stage.world.gateway.core.state.alarm, "the alarm is not kept")


def _lying_worker(stage: Stage) -> None:
    stage.finish(*[stage.submit(prompt=40, max_tokens=8, salt=salt) for salt in range(6)])
    stage.world.wrong_machines += 1
    client, worker, second = _hedged(stage, 7, wrong="token")
    mend = stage.partition((second, "gateway"))
    have = len(client.tokens[0])
    stage.until(lambda: len(client.tokens[0]) > have, "the client gets a wrong token")
    stage.engine(worker).backend.wrong = ""
    mend()
    stage.until(lambda: not client.open, "two against one are noticed")
    failure = client.failure
    stage.require(
        failure is not None and failure.code == "token_disagreement", f"it ended with {failure}: silently resolved"
    )
    stage.engine(worker).slow = 1


SCENARIOS = (
    Scenario(
        "hung-backend",
        "vLLM production-stack (issue 749): one backend that hung made the router hang for everybody",
        "a worker hangs in a step: a hedge goes on within 0.2 s of the suspicion, others finish, the worker is replaced",
        cluster(0, 3, control=_hedging(step_deadline_s=3.0)),
        _hung_backend,
    ),
    Scenario(
        "lying-hedge",
        "the fault matrix of this project: a machine that computes wrongly and says nothing (bad memory, bad GPU)",
        "a second attempt gives another token, or another logprob, than the first: the alarm rings, a third worker decides",
        cluster(0, 3, control=_hedging()),
        _lying_hedge,
    ),
    Scenario(
        "lying-worker",
        "the fault matrix of this project: the machine that computes wrongly is the one the client has listened to",
        "the wrong token is with the client when the hedge disagrees: the request ends with an error that says so",
        cluster(0, 3, control=_hedging()),
        _lying_worker,
    ),
)
