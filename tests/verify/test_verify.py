"""``relay verify`` from outside on a tiny random model, and the tests of this test: an injected fault must turn it red."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relay.verify.compare import SequenceOutput, compare, difference
from relay.verify.paths import PATHS, QUICK
from tests.cli.serving import ENVIRONMENT, write_tiny_model

TIMEOUT_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("verify")
    return write_tiny_model(folder / "tiny"), folder / "cache"


def verify(model: tuple[Path, Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    path, cache = model
    command = [
        sys.executable,
        "-m",
        "relay.cli.main",
        "verify",
        str(path),
        "--offline",
        "--cache-dir",
        str(cache),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_S, check=False)


def test_every_quick_path_is_identical_and_was_taken(model: tuple[Path, Path]) -> None:
    result = verify(model, "--quick", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert set(report["paths"]) == set(QUICK)
    assert report["compared"] == report["identical"] > 0
    for path in report["paths"].values():
        assert path["compared"] == path["identical"] > 0
        assert path["logit_rows"] > 0
        assert path["kv_blocks"] > 0
        assert path["evidence"]


@pytest.mark.parametrize("fault", ["kv-bit", "rounding"])
def test_an_injected_fault_turns_it_red(model: tuple[Path, Path], fault: str) -> None:
    result = verify(model, "--inject", fault, "--json")
    assert result.returncode == 1, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert 0 <= report["identical"] < report["compared"]


def test_weights_in_int8_are_the_gpu_s(model: tuple[Path, Path]) -> None:
    result = verify(model, "--quantization", "int8")
    assert result.returncode == 2
    assert result.stderr == "relay: --quantization int8 needs --backend cuda, not cpu\n"


@pytest.mark.parametrize("path", ["preempted", "prefix cache", "resumed, P killed"])
def test_paths_that_need_the_whole_request_set(model: tuple[Path, Path], path: str) -> None:
    result = verify(model, "--path", path, "--json")
    report = json.loads(result.stdout)
    assert list(report["paths"]) == [path]
    assert result.returncode == 0, report


def test_the_issue_s_paths_are_all_there() -> None:
    assert {"batched", "prefix cache", "preempted", "split", "resumed, P killed", "resumed, D killed"} < set(PATHS)
    assert sum(name.startswith("chunks of") for name in PATHS) >= 3


def output(**changes: object) -> SequenceOutput:
    values: dict[str, object] = {
        "token_ids": [1, 2, 3],
        "logit_digests": [b"a", b"b", b"c"],
        "kv_digests": [b"k"],
        "finish": "length",
    }
    return SequenceOutput(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 4]},
        {"token_ids": [1, 2]},
        {"logit_digests": [b"a", b"b", b"x"]},
        {"logit_digests": []},
        {"kv_digests": [b"x"]},
        {"kv_digests": []},
        {"finish": "stop"},
        {"logprobs": [(-1.0, [])]},
    ],
    ids=str,
)
def test_any_difference_is_seen(changes: dict[str, object]) -> None:
    assert difference("r", output(), output(**changes))
    assert compare({"r": output()}, {"r": output(**changes)}, "taken").identical == 0


def test_equal_outputs_are_identical_and_a_missing_one_is_not() -> None:
    report = compare({"r": output()}, {"r": output()}, "taken")
    assert (report.compared, report.identical, report.logit_rows, report.kv_blocks) == (1, 1, 3, 1)
    assert compare({"r": output()}, {}, "taken").identical == 0
