"""``relay bench kv`` from outside on a tiny random model: rows, ceilings, pictures; and what its figures mean."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from tests.cli.serving import ENVIRONMENT, write_tiny_model

from relay.bench.kv import LEAST_RUNS, percentile, ratios

ROW = {
    *("transport", "tokens", "bytes", "wire_s", "exposed_s", "exposed_p90_s", "noise_s"),
    *("baseline_exposed_s", "hidden_share", "prefill_s"),
}


def bench(*arguments):
    command = [sys.executable, "-m", "relay.cli.main", "bench", "kv", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=200, check=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    model = write_tiny_model(folder / "tiny")
    arguments = ("--offline", "--cache-dir", folder / "cache", "--tokens", "40,200", "--runs", "9", "--seconds", "0")
    arguments += ("--probes", "0")
    done = bench(model, "--json", *arguments, "--chart", folder / "charts")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "charts"


def test_a_row_for_every_length_transport_and_dtype(result):
    rows = result[0]["rows"]
    kinds = {(row["tokens"], row["transport"], row["kv_cache_dtype"]) for row in rows}
    assert kinds == {(n, t, d) for n in (40, 200) for t in ("shm", "tcp") for d in ("float32", "bfloat16")}
    for row in rows:
        assert set(row) >= ROW
        assert row["wire_s"] > 0
        assert row["burst_gb_s"] > 0
        assert row["ceiling_gb_s"] > 0
        assert row["burst_of_ceiling"] > 0
        assert row["send_cpu_s"] > 0
        assert row["receive_cpu_s"] > 0
        assert row["runs"] == LEAST_RUNS  # as none may begin within no time
        assert row["hidden_share"] == pytest.approx(1 - row["exposed_s"] / row["baseline_exposed_s"])
        assert row["below_noise"] == (abs(row["exposed_s"]) <= row["noise_s"])
    sizes = {(row["tokens"], row["kv_cache_dtype"]): row["bytes"] for row in rows}
    assert sizes[200, "float32"] == 2 * sizes[200, "bfloat16"] == 5 * sizes[40, "float32"]


def test_ceilings_with_and_without_checksum(result):
    found = {(row["ceiling"], row["checksum"]) for row in result[0]["ceilings"]}
    assert found == {(name, checked) for name in ("memcpy", "two memcpys", "plain socket") for checked in (True, False)}
    assert all(row["gb_s"] > 0 for row in result[0]["ceilings"])


def test_the_pictures_are_svg_and_show_every_stage(result):
    pictures = {path.name: path.read_text() for path in result[1].iterdir()}
    assert set(pictures) == {"kv-exposed.svg", "kv-timeline-shm.svg", "kv-timeline-tcp.svg"}
    for text in pictures.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
    for what in ("compute layer", "pack layer", "wire layer", "scatter layer"):
        assert what in pictures["kv-timeline-shm.svg"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tokens", "many"), "--tokens: 'many'"),
        (("--tokens", "100000"), "too many for tiny"),
        (("--tokens", "1024"), "too many for tiny"),
        (("--transport", "pigeon"), "--transport: 'pigeon'"),
        (("--kv-cache-dtype", "int8"), "--kv-cache-dtype: 'int8'"),
        (("--threads", "-5"), "--threads"),
        (("--seconds", "nan"), "--seconds"),
        (("--chart", "/dev/null/x"), "--chart"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, arguments, text):
    model = write_tiny_model(tmp_path / "tiny")
    done = bench(model, "--offline", "--cache-dir", tmp_path / "cache", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.splitlines()[-1].startswith("relay: ")
    assert "Traceback" not in done.stderr


def test_ratios_are_of_what_was_measured_together():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_percentile_is_nearest_rank():
    values = [float(value) for value in range(1, 21)]
    assert percentile(values, 0.9) == 18
    assert percentile(values, 0.1) == 2
    assert percentile([3.0], 0.9) == 3
