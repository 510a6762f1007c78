"""What ``benchmarks.resume`` makes of the times it saw."""

from benchmarks import goals
from benchmarks.resume import KINDS, Stream, Trial, summary


def stream(*arrivals_s: float) -> Stream:
    return Stream(list(arrivals_s))


def test_the_wait_ends_behind_the_silence_that_has_the_loss_in_it() -> None:
    assert stream(1.0, 1.1, 1.6, 1.7).resumed_s(struck_s=1.15, lost_s=1.16) == 1.6


def test_last_words_of_the_dead_worker_are_no_resume() -> None:
    assert stream(1.0, 1.1, 1.155, 1.165, 1.6, 3.0).resumed_s(struck_s=1.15, lost_s=1.16) == 1.6


def test_a_later_silence_is_not_the_wait() -> None:
    assert stream(1.0, 1.1, 1.3, 9.0).resumed_s(struck_s=1.15, lost_s=1.16) == 1.3


def test_a_hedge_may_be_there_before_the_loss_is_noted() -> None:
    assert stream(1.0, 1.1, 1.155, 2.2, 2.21, 2.22, 2.65, 2.66).resumed_s(struck_s=1.15, lost_s=2.6) == 2.2
    assert stream(1.0, 1.1, 2.2, 2.21).resumed_s(struck_s=1.15, lost_s=2.6) == 2.2


def test_without_a_token_yet_the_wait_begins_with_the_fault() -> None:
    assert stream(1.9, 2.0).resumed_s(struck_s=1.15, lost_s=1.16) == 1.9


def test_trials_add_up_and_the_goals_read_them() -> None:
    trials = [Trial(0.001, 0.25, 0.2, 0.01, 460, True), Trial(0.002, 0.05, 0.2, 0.01, 460, False)]
    row = summary(trials)
    assert (row["n"], row["identical"]) == (2, 1)
    assert row["detect_ms"] == {"p50": 1.0, "p99": 2.0}
    assert row["beyond_reprefill_ms"] == {"p50": -150.0, "p99": 50.0}
    assert row["histogram_ms"] == {"50\u2013100": 1, "200\u2013300": 1}
    result = {"shapes": {"1P+2D": {kind.name: row for kind in KINDS}}}
    read = {goal.text: goal.read(result) for goal in goals.GOALS if goal.source == "resume"}
    assert len(read) == 4
    assert read["a killed worker noticed, ms, p99"] == {"split": 2.0}
    assert read["next token after a SIGSTOP of the engine less a re-prefill, ms, p99"] == {"split": 50.0}
