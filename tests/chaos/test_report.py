"""Results of cells: kept on disk for the same settings only, and added up without losing a failure."""

from dataclasses import replace

import pytest

from relay.chaos.kept import Kept
from relay.chaos.oracle import Calm
from relay.chaos.report import percentile, report
from relay.chaos.settings import CellResult, ChaosSettings
from relay.chaos.shapes import Shape

SHAPE = Shape(1, 2)
CALM = Calm(token_s=0.001, step_s=0.01)
SETTINGS = ChaosSettings(requests=3, faults=2, seeds=(1,), shapes=(SHAPE,))


def cell(**values) -> CellResult:
    result = CellResult("1P+2D", 1, 3, identical=3, faults={"kill_both": 2}, signals={"SIGKILL": 4})
    result.roles_struck = {"decode": 1}
    result.moments = {"kill_both": {"decoding": 3}}
    result.resume_ms = {"kill_both": [10.0, 30.0, 20.0]}
    result.resumed_tokens = [100, 0, 300]
    return replace(result, **values)


def test_a_cell_is_found_again(tmp_path):
    Kept(tmp_path, SETTINGS).keep(SHAPE, 1, cell(), CALM)
    found = Kept(tmp_path, SETTINGS).find(SHAPE, 1)
    assert found is not None
    assert (found.result, found.calm) == (cell(), CALM)
    assert Kept(tmp_path, SETTINGS).find(SHAPE, 2) is None
    assert Kept(tmp_path, SETTINGS).find(Shape(0, 3), 1) is None
    assert Kept(None, SETTINGS).find(SHAPE, 1) is None


@pytest.mark.parametrize(
    "change", [{"requests": 4}, {"faults": 3}, {"kinds": ("cut_kv",)}, {"serve": ("--threads", "1")}]
)
def test_a_cell_of_another_run_is_not(tmp_path, change):
    Kept(tmp_path, SETTINGS).keep(SHAPE, 1, cell(), CALM)
    assert Kept(tmp_path, replace(SETTINGS, **change)).find(SHAPE, 1) is None
    assert Kept(tmp_path, replace(SETTINGS, seeds=(1, 2))).find(SHAPE, 1) is not None


@pytest.mark.parametrize(
    "trouble",
    [
        {"identical": 2, "different": 1},
        {"identical": 2, "failed": 1},
        {"leaked": 1},
        {"problems": ["x"]},
        {"poison": 1},
    ],
)
def test_a_cell_that_failed_is_run_again(tmp_path, trouble):
    assert not cell(**trouble).passed
    Kept(tmp_path, SETTINGS).keep(SHAPE, 1, cell(**trouble), CALM)
    assert Kept(tmp_path, SETTINGS).find(SHAPE, 1) is None


def test_a_damaged_file_is_run_again(tmp_path):
    kept = Kept(tmp_path, SETTINGS)
    kept.keep(SHAPE, 1, cell(), CALM)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    assert kept.find(SHAPE, 1) is None


def test_cells_add_up():
    document = report(
        [cell(), cell(seed=2, identical=2, failed=1, leaked=2, problems=["request 1: gone"])], [CALM, CALM]
    )
    assert (document["requests"], document["identical"], document["failed"], document["leaked"]) == (6, 5, 1, 2)
    assert document["faults"] == {"kill_both": 4}
    assert document["signals"] == {"SIGKILL": 8}
    assert document["roles_struck"] == {"decode": 2}
    assert document["moments"] == {"kill_both": {"decoding": 6}}
    assert document["resume_ms"] == {"n": 6, "p50": 20.0, "p99": 30.0}
    assert document["by_kind"]["kill_both"]["detect_ms"] == {"n": 0, "p50": None, "p99": None}
    assert document["calm"]["reprefill_and_step_ms_p50"] == pytest.approx(110.0)
    assert document["problems"] == ["1P+2D seed 2: request 1: gone"]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentiles_are_nearest_ranks(share, value):
    assert percentile([float(number) for number in range(100, 0, -1)], share) == value
    assert percentile([7.0], share) == 7.0
    assert percentile([], share) is None
