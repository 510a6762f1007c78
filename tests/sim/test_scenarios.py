"""Directed scenarios: each holds under several seeds, repeats exactly, and rings when what it stages goes wrong."""

import json

import pytest

from relay.cli import main
from relay.sim.mutants import by_name, planted
from relay.sim.scenarios.catalogue import SCENARIOS, run_scenario

SEEDS = range(3)
NAMED = (
    "abort-storm",
    "master-stall",
    "registry-blip",
    "dead-affinity",
    "partial-kv",
    "stranded-kv-lease",
    "sigstop-leader",
    "swizzle-clog",
    "rolling-upgrade",
    "restart-storm",
    "decode-oom",
    "abort-in-every-state",
    "late-kv-writes",
    "refusal-storm",
    "two-gateways",
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario_holds(scenario) -> None:
    for seed in SEEDS:
        run = run_scenario(scenario, seed)
        assert run.failure is None, run.failure.report()
        assert run.requests


def test_every_named_incident_is_staged_and_told() -> None:
    assert {scenario.name for scenario in SCENARIOS} >= set(NAMED)
    for scenario in SCENARIOS:
        assert len(scenario.incident) > 40
        assert len(scenario.plan) > 40


def test_a_scenario_repeats() -> None:
    scenario = SCENARIOS[0]
    assert run_scenario(scenario, 1).trace_hash == run_scenario(scenario, 1).trace_hash
    assert run_scenario(scenario, 1).trace_hash != run_scenario(scenario, 2).trace_hash


@pytest.mark.parametrize(
    ("scenario", "mutant"),
    [
        ("abort-storm", "no cancel fan-out"),
        ("abort-in-every-state", "cancel does not reach decode"),
        ("master-stall", "own stall is others' death"),
        ("sigstop-leader", "a frozen engine is fine"),
        ("partial-kv", "a layer short accepted"),
        ("long-prefill-queue", "leases are not renewed"),
        ("prefill-hands-back", "a peer's drain is told as its own"),
        ("refused-and-again", "a refused order is taken when it comes again"),
        ("stranded-kv-lease", "leases never expire on P"),
        ("stranded-kv-lease", "leases never expire on D"),
        ("registry-blip", "hedge budget ignored"),
        ("dead-affinity", "silence is never death"),
        ("lying-hedge", "disagreement ignored"),
        ("hung-backend", "no hedges"),
        ("poison-request", "crashes are never blamed"),
        ("late-poison", "choices of one request go anywhere"),
        ("hang-seen-by-another", "a hang is told to no other gateway"),
        ("strangers", "stale attempt accepted"),
        ("strangers", "KV crosses between unequal numerics"),
        ("two-gateways", "an adopted stream begins one late"),
        ("rolling-upgrade", "draining workers are given work"),
        ("sigterm-under-load", "a drain never ends"),
        ("restart-storm", "a crash loop starts again at once"),
        ("decode-oom", "a failed step counts as computed"),
        ("crosswise", "refused work is asked for again at once"),
    ],
)
def test_a_scenario_notices_what_went_wrong_there(scenario: str, mutant: str) -> None:
    played = next(each for each in SCENARIOS if each.name == scenario)
    with planted(by_name(mutant)):
        runs = [run_scenario(played, seed) for seed in range(5)]
    failure = next((run.failure for run in runs if run.failure is not None), None)
    assert failure is not None
    assert failure.report().splitlines()[-1] == f"replay: relay sim --scenario {scenario} --seed {failure.seed}"


def test_command_line(capsys) -> None:
    assert main.run(["sim", "--scenario", "partial-kv", "--seed", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["violations"] == 0
    assert answer["scenarios"][0]["scenario"] == "partial-kv"
    assert main.run(["sim", "--scenario", "no such"]) == 2
    assert "partial-kv" in capsys.readouterr().err
    assert main.run(["sim", "--scenario", "partial-kv", "--seeds", "3"]) == 2
    assert main.run(["sim", "--scenarios", "--mutants"]) == 2
