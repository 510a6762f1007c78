"""``relay serve --backend cuda`` with a made-up NVML: one line for what cannot work before a worker starts, notes for the rest."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
from tests.cli.serving import write_tiny_model
from tests.cluster.fake_nvml import GIB, FakeNvml, h200s

from relay.cli import main, server, supervisor

APART = {(0, 1): ("OK", "CHIPSET_NOT_SUPPORTED", "NOT_SUPPORTED")}
SPLIT = ("--prefill-devices", "cuda:0", "--decode-devices", "cuda:1")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("placement")
    return write_tiny_model(folder / "tiny"), folder / "cache"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Torch and Triton seem to be there, and no worker may start; the start's logging ends with the test."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: find("json" if name in ("torch", "triton") else name)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.getLogger().level)

    def started(*arguments, **named):
        raise AssertionError("workers were made")

    for module in (server, supervisor):
        monkeypatch.setattr(module, "LocalWorkers", started)


def serve(monkeypatch, model: tuple[Path, Path], nvml: FakeNvml, *flags: str) -> int:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    path, cache = model
    return main.run(
        ["serve", str(path), "--cache-dir", str(cache), "--offline", "--port", "0", "--backend", "cuda", *flags]
    )


@pytest.mark.parametrize("gateways", ["1", "2"])
@pytest.mark.parametrize(
    ("nvml", "flags", "code", "words"),
    [
        (h200s(2), ("--decode-devices", "cuda:2"), 2, "cuda:2 for decode-0 does not exist: this machine has cuda:0 ("),
        (
            h200s(2, pairs=APART),
            (*SPLIT, "--transport", "ipc"),
            2,
            "--transport ipc: no peer access between cuda:0 (prefill-0) and cuda:1 (decode-0): one NUMA node, ",
        ),
        (
            h200s(2, pairs=APART),
            ("--prefill", "0", "--decode-devices", "cuda:0,cuda:1", "--tensor-parallel-size", "2"),
            2,
            "worker-0: no peer access between cuda:0 and cuda:1 (",
        ),
        (FakeNvml([80 * GIB] * 2, [80 * GIB, GIB]), SPLIT, 4, "decode-0 does not fit on cuda:1 (NVIDIA H200): "),
    ],
)
def test_what_cannot_work_is_one_line(monkeypatch, capfd, model, gateways, nvml, flags, code, words) -> None:
    assert serve(monkeypatch, model, nvml, "--gateways", gateways, *flags) == code
    captured = capfd.readouterr()
    (line,) = [line for line in captured.err.splitlines() if not line.startswith("reading tiny ")]
    assert line.startswith(f"relay: {words}")
    assert captured.out == ""


class NoWorkers:
    """As much of ``LocalWorkers`` as a start needs whose workers count as ready at once."""

    def __init__(self, *arguments, **named) -> None:
        self.gateway = ""

    def attach(self, shell) -> None:
        pass

    def start(self, worker, role) -> None:
        pass

    def stop(self, worker, **named) -> None:
        pass

    async def close(self, grace_s: float) -> None:
        pass


def test_the_banner_has_the_placement_and_its_notes(monkeypatch, capfd, model) -> None:
    async def at_once(*arguments) -> bool:
        return True

    monkeypatch.setattr(server, "LocalWorkers", NoWorkers)
    monkeypatch.setattr(server, "fit_context", lambda config, shell: None)
    monkeypatch.setattr(server.Server, "_complete", at_once)
    monkeypatch.setattr(server.Server, "_serve", at_once)
    assert serve(monkeypatch, model, h200s(2, pairs=APART), *SPLIT) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("devices  ")]
    assert lines == [
        "devices  cuda:0 NVIDIA H200, 140.0 GiB, 139.0 free",
        "devices  cuda:1 NVIDIA H200, 140.0 GiB, 139.0 free",
        "devices  cuda:0 - cuda:1: one NUMA node, no peer access (the chipset does not support it)",
        "devices  prefill-0 on cuda:0, decode-0 on cuda:1",
        "devices  no peer access between cuda:0 (prefill-0) and cuda:1 (decode-0): one NUMA node, the chipset does not support it; "
        "KV between them goes through host memory; for the direct way choose devices that are peers (`relay devices` lists them)",
    ]
