"""``--transport nixl`` from outside: refused in one line without the extra; with it, the same bits and a row of the benchmark."""

import json
import subprocess
import sys

import pytest
from tests.cli.serving import ENVIRONMENT, write_tiny_model
from tests.transfer.nodes import NO_NIXL

from relay.cli import main
from relay.extras import install_hint
from relay.transfer.nixl import wire


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nixl")
    return write_tiny_model(folder / "tiny"), "--offline", "--cache-dir", folder / "cache", "--json"


def relay(*arguments):
    command = [sys.executable, "-m", "relay.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False)


@pytest.mark.parametrize("arguments", [("serve", "--offline"), ("bench", "kv", "--offline"), ("verify", "--offline")])
def test_without_the_extra_it_is_refused_in_one_line(capsys, monkeypatch, arguments):
    monkeypatch.setattr(wire, "installed", lambda: None)
    assert main.run([*arguments, "--transport", "nixl"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert install_hint("nixl") in lines[0]


@NO_NIXL
def test_a_split_over_nixl_has_the_same_bits(model):
    result = relay("verify", *model, "--path", "split", "--transport", "nixl")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["compared"] == report["identical"] > 0
    assert report["paths"]["split"]["evidence"].endswith(" over nixl")


@NO_NIXL
def test_the_benchmark_has_a_row(model):
    result = relay("bench", "kv", *model, "--transport", "nixl", "--tokens", "200", "--runs", "2", "--probes", "0")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert {row["transport"] for row in rows} == {"nixl"}
    assert all(row["wire_s"] > 0 for row in rows)
