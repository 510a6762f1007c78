"""What ``relay bench kv`` measures of a full D, on a tiny model with a pool to match: counts, not times."""

import dataclasses

import pytest
from tests.cli.serving import write_tiny_model

from relay.bench.backpressure import GOING_ON, Load, measure_backpressure
from relay.models.progress import console_progress
from relay.models.store import open_model

SMALL = Load(pool=9648, growth=3000, long_prompt=192, short_prompt=16, probe=96)
PROBES = 2 * GOING_ON


def test_a_full_d_fails_nobody_and_says_so_to_those_that_go_on(tmp_path):
    folder = write_tiny_model(tmp_path / "tiny", positions=4096)
    model = open_model(str(folder), cache_dir=tmp_path / "cache", offline=True, progress=console_progress())
    row = measure_backpressure(model, 1, PROBES, SMALL)
    assert row["failed_requests"] == 0
    assert row["refused_full"] >= 1, row  # the first probe goes on, and all streams run
    assert row["parked"] >= 1, row
    assert 1 <= row["probes"] <= PROBES
    assert 1 <= row["probes_free"] <= PROBES
    assert row["ttft_p99_ratio"] == pytest.approx(row["ttft_p99_full_s"] / row["ttft_p99_free_s"])


@pytest.mark.parametrize("wrong", [{"probe": 72}, {"long_prompt": 100}, {"long_prompt": 300}, {"short_prompt": 180}])
def test_a_load_that_would_not_fill_d_or_always_does_is_refused(wrong):
    with pytest.raises(ValueError, match="left free"):
        dataclasses.replace(SMALL, **wrong)
