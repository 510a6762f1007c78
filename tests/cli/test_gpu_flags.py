"""What only GPUs have is refused in one line without them, and before any model is opened."""

import importlib.util
import sys

import pytest

from relay.cli import main
from relay.cluster import nvml
from relay.config import DEFAULTS, WorkerConfig
from relay.errors import UsageError
from relay.extras import install_hint, require_gpu
from relay.models import store
from relay.transfer.nixl import wire

UTILIZATION = ("--gpu-memory-utilization", "0.5")


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def opened(*arguments, **named):
        raise AssertionError("the model was opened")

    monkeypatch.setattr(store, "open_model", opened)


def one_line(capsys, *arguments):
    assert main.run([*arguments, "--offline"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("serve", ("--device", "cuda:7"), "--device needs --backend cuda, not {}"),
        ("serve", ("--device", "cuda:0"), "--device needs --backend cuda, not {}"),  # the default, but given
        ("serve", UTILIZATION, "--gpu-memory-utilization needs --backend cuda, not {}"),
        (
            "serve",
            ("--prefill-devices", "cuda:0"),
            "--prefill-devices and --decode-devices need --backend cuda, not {}",
        ),
        ("serve", ("--decode-devices", "cuda:0"), "--prefill-devices and --decode-devices need --backend cuda, not {}"),
        ("verify", ("--device", "cuda:7"), "--device needs --backend cuda, not {}"),
        ("chaos", ("--device", "cuda:7"), "--device needs --backend cuda, not {}"),
        ("chaos", ("--transport", "ipc"), "--transport ipc needs --backend cuda, not {}"),
        ("chaos", ("--kv-cache-dtype", "float16"), "--kv-cache-dtype float16 needs --backend cuda, not {}"),
    ],
)
def test_flags_of_gpus_are_refused_without_one(capsys, backend, command, flags, words):
    assert one_line(capsys, command, "--backend", backend, *flags) == f"relay: {words.format(backend)}\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--prefill", "0", "--prefill-devices", "cuda:0", "--decode-devices", "cuda:1"),
            "--prefill-devices names devices, but with --prefill 0 there are no prefill workers",
        ),
        (("--decode", "0", "--decode-devices", "cuda:1"), "--decode must be between 1 and 64"),
    ],
)
def test_devices_of_a_role_without_workers_are_refused(capsys, flags, words):
    assert one_line(capsys, "serve", "--backend", "cuda", *flags).startswith(f"relay: {words}")


def test_what_nobody_gave_is_no_flag():
    for backend in DEFAULTS:
        worker = WorkerConfig.of(backend, devices=None, gpu_memory_utilization=None)
        assert (worker.devices, worker.gpu_memory_utilization) == (("cuda:0",), 0.9)
    given = WorkerConfig.of("cuda", devices=("cuda:3",), gpu_memory_utilization=0.5)
    assert (given.devices, given.gpu_memory_utilization) == (("cuda:3",), 0.5)


def without(*names):
    found = importlib.util.find_spec
    return lambda name, package=None: None if name in names else found("json" if name in ("torch", "triton") else name)


@pytest.mark.parametrize("missing", [("torch",), ("triton",), ("torch", "triton")])
@pytest.mark.parametrize("command", [("serve",), ("serve", "--gateways", "2"), ("verify",), ("chaos",)])
def test_a_missing_extra_is_found_before_the_model_is_opened(capsys, monkeypatch, command, missing):
    monkeypatch.setattr(importlib.util, "find_spec", without(*missing))
    line = one_line(capsys, *command, "--backend", "cuda")
    assert line.startswith(f"relay: --backend cuda needs {' and '.join(missing)}, which cannot be imported here: pip ")
    assert install_hint("gpu") in line


def test_an_extra_that_is_there_is_not_missed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without())
    require_gpu()


def test_hints_hold_in_a_checkout_and_come_from_one_place(monkeypatch):
    for extra in ("gpu", "nixl"):
        assert f"pip install '.[{extra}]' in a checkout" in install_hint(extra)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert install_hint("gpu") in nvml.detect({}).problem
    monkeypatch.setattr(wire, "installed", lambda: None)
    with pytest.raises(UsageError) as caught:
        wire.require_installed()
    assert install_hint("nixl") in str(caught.value)
