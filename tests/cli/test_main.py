"""The command line itself: help without heavy imports, one line for errors, exit codes."""

import json
import shlex
import subprocess
import sys

import click
import pytest
from tests.cli.serving import ENVIRONMENT

from relay import __version__
from relay.cli import main
from relay.cli.banner import first_request
from relay.config import ServeConfig, WorkerConfig, parse_bytes
from relay.errors import RelayError, UsageError


def test_help_names_every_command_and_imports_none(capsys):
    code = "import sys; from relay.cli.main import run; run(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    for command in main.COMMANDS:
        assert command in run.stdout
    modules = set(run.stderr.split())
    assert not modules & {"numpy", "uvloop", "starlette", "tokenizers", "torch", "msgspec", "asyncio"}


def test_version(capsys):
    assert main.run(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("arguments", [["no-such-command"], ["status", "--nope"], ["serve", "--port", "x"]])
def test_usage_errors_are_one_line(capsys, arguments):
    assert main.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("relay: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["model"]])
def test_a_bare_command_shows_its_help(capsys, arguments):
    assert main.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: relay")
    assert captured.err.count("\n") > 5


@pytest.mark.parametrize("command", ["serve", "verify"])
def test_every_option_is_explained(command):
    group = main.cli
    options = group.get_command(click.Context(group), command).params
    assert [option.name for option in options if isinstance(option, click.Option) and not option.help] == []


def test_first_request_is_bounded_and_survives_the_shell():
    words = shlex.split(first_request("http://127.0.0.1:8000", 'it\'s "tiny"'))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == 'it\'s "tiny"'
    assert 0 < body["max_tokens"] <= 500


def test_status_without_a_server_is_one_line(capsys):
    assert main.run(["status", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        "relay: no server at http://127.0.0.1:1; start one with: relay serve, or name another with --url\n"
    )


def test_status_of_an_unknown_host_is_one_line(capsys):
    assert main.run(["status", "--url", "http://relay.invalid"]) == 1
    assert capsys.readouterr().err.startswith("relay: no answer from http://relay.invalid/status: ")


def test_status_of_something_else_is_one_line(capsys):
    assert main.run(["status", "--url", "file:///etc/passwd"]) == 2
    assert "does not begin with http" in capsys.readouterr().err


def test_exit_codes_are_distinct():
    codes = [kind.exit_code for kind in RelayError.__subclasses__() if "exit_code" in vars(kind)]
    assert len(set(codes)) == len(codes)
    assert RelayError.exit_code not in codes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("10kb", 10240),
        (" 3 T ", 3 << 40),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "nan", "inf", "1X", "1GG", "1e400"])
def test_bad_sizes(text):
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_slots():
    assert ServeConfig("m").slots == [("prefill-0", "prefill"), ("decode-0", "decode")]
    assert ServeConfig("m", prefill=0, decode=2).slots == [("worker-0", "both"), ("worker-1", "both")]


@pytest.mark.parametrize(
    "values",
    [
        {"block_size": 8},
        {"block_size": 24},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 15},
        {"max_num_seqs": 513},
        {"threads": -1},
        {"threads": 100_000},
        {"block_size": 1 << 30},
        {"max_num_batched_tokens": 10**20},
        {"kv_cache_memory_bytes": 0},
        {"max_model_len": 0},
        {"kv_cache_dtype": "int3"},
        {"dtype": "float64"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "float16"},
        {"quantization": "int8"},
        {"transport": "ipc"},
        {"backend": "cuda", "block_size": 64, "dtype": "float32"},
        {"backend": "cuda", "block_size": 64, "dtype": "float16", "kv_cache_dtype": "bfloat16"},
    ],
)
def test_worker_settings_are_checked(values):
    with pytest.raises(UsageError):
        WorkerConfig(**values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"kv_cache_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, "bfloat16"),
        ({"quantization": "int8", "transport": "ipc"}, "bfloat16"),
    ],
)
def test_a_gpu_keeps_kv_in_the_type_it_computes_in(values, expected):
    assert WorkerConfig.of("cuda", **values).resolved_kv_dtype == expected


@pytest.mark.parametrize(
    "values",
    [
        {"port": 65536},
        {"port": -1},
        {"prefill": 65},
        {"seed": -1},
        {"grace_s": -1.0},
        {"decode": 0},
        {"served_model_name": ""},
        {"worker_address": "localhost:9000"},
        {"worker_address": "tcp://127.0.0.1:9000,tcp://127.0.0.1:9001"},
        {"worker_address": "tcp://127.0.0.1:9000", "gateways": 2},
        {"worker_port": 65535, "gateways": 2},
    ],
)
def test_serve_settings_are_checked(values):
    with pytest.raises(UsageError):
        ServeConfig("m", **values)


def test_every_gateway_can_have_something_between_it_and_its_workers():
    assert ServeConfig("m").worker_addresses == []
    two = ServeConfig("m", gateways=2, worker_port=9000, worker_address="tcp://127.0.0.1:1,tcp://127.0.0.1:2")
    assert two.worker_addresses == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


@pytest.mark.parametrize("tokens", [0, -1])
def test_the_flag_that_is_wrong_is_the_one_that_is_named(tokens):
    with pytest.raises(UsageError, match=f"--max-num-batched-tokens must be .* not {tokens}"):
        WorkerConfig.of("cpu", max_num_batched_tokens=tokens)
