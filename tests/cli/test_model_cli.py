"""``relay model`` from outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from relay.cli.model import model
from relay.errors import CorruptModelError, ModelNotFoundError

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from gguf_files import write_gguf
from tiny_models import config_json, random_tensors, write_folder

from relay.models.cache import packs_dir
from relay.models.checked import remember
from relay.models.hf_config import parse_config


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    config = parse_config(config_json(), {}, "")
    return write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def relay_model(*arguments: str) -> Result:
    return CliRunner().invoke(model, list(arguments))


def test_pull_list_inspect_rm(gguf: Path, cache: Path) -> None:
    pulled = relay_model("pull", str(gguf))
    assert pulled.exit_code == 0
    assert "packing tiny 100 %" in pulled.stderr
    assert pulled.stdout.startswith("tiny: ")
    (listed,) = json.loads(relay_model("list", "--json").stdout)["models"]
    assert listed["architecture"] == "llama"
    assert (
        listed["digest"]
        in (facts := json.loads(relay_model("inspect", str(gguf), "--verify", "--json").stdout))["digest"]
    )
    assert facts["parameters"] == sum(
        tensor.size for tensor in random_tensors(parse_config(config_json(), {}, "")).values()
    )
    assert facts["context_length"] == 512
    assert facts["eos"] == {"0": "<|end|>"}
    assert facts["verified"] is True
    assert facts["encodings"].keys() == {"F32"}
    assert "context length" in relay_model("inspect", str(gguf)).stdout
    assert relay_model("rm", listed["name"]).exit_code == 0
    assert json.loads(relay_model("list", "--json").stdout) == {"models": []}
    assert "relay model pull smollm2" in relay_model("list").stdout
    assert gguf.exists()


def test_safetensors_are_read_and_not_packed(cache: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", config_json())
    pulled = relay_model("pull", str(folder), "--storage", "direct")
    assert pulled.exit_code == 0
    assert "reading folder 100 %" in pulled.stderr
    shown = relay_model("inspect", str(folder), "--verify", "--json")
    assert "reading" not in shown.stderr
    facts = json.loads(shown.stdout)
    assert (facts["storage"], facts["verified"], facts["encodings"].keys()) == ("direct", True, {"F32"})
    assert len(list(packs_dir(cache).glob("*.pack"))) == 1
    assert relay_model("pull", str(folder)).exit_code == 0
    full = json.loads(relay_model("inspect", str(folder), "--json").stdout)
    assert full["storage"] == "native"
    differ = {key for key, value in full.items() if value != facts.get(key)}
    assert differ == {"digest", "path", "bytes", "storage", "encodings"}  # the last by what fills panels
    assert relay_model("rm", str(folder)).exit_code == 0
    assert not list(packs_dir(cache).glob("*.pack"))


def test_rm_by_the_path_it_was_packed_from(gguf: Path, cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / gguf.name
    other.parent.mkdir()
    other.write_bytes(gguf.read_bytes())
    for path, storage in ((gguf, "native"), (gguf, "float32"), (other, "native")):
        assert relay_model("pull", str(path), "--storage", storage).exit_code == 0
    assert relay_model("rm", str(gguf)).exit_code == 0
    assert gguf.exists()
    assert len(json.loads(relay_model("list", "--json").stdout)["models"]) == 1
    assert isinstance(relay_model("rm", str(gguf)).exception, ModelNotFoundError)
    other.unlink()
    assert relay_model("rm", str(other)).exit_code == 0, "also when the file is gone"


def test_second_pull_packs_nothing(gguf: Path, cache: Path) -> None:
    relay_model("pull", str(gguf))
    assert "packing" not in relay_model("pull", str(gguf)).stderr


def test_errors_are_relay_errors_with_their_exit_codes(gguf: Path, cache: Path) -> None:
    missing = relay_model("pull", "/nonexistent")
    assert isinstance(missing.exception, ModelNotFoundError)
    assert "/nonexistent" in str(missing.exception)
    assert isinstance(relay_model("inspect", "smollm2").exception, ModelNotFoundError)
    gguf.write_bytes(gguf.read_bytes()[:5000])
    assert isinstance(relay_model("pull", str(gguf)).exception, CorruptModelError)
    assert (ModelNotFoundError.exit_code, CorruptModelError.exit_code) == (3, 6)


def test_verify_finds_a_flipped_bit(gguf: Path, cache: Path) -> None:
    relay_model("pull", str(gguf))
    (pack,) = packs_dir(cache).glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[6000] ^= 1
    pack.write_bytes(data)
    assert isinstance(relay_model("inspect", str(gguf)).exception, CorruptModelError)
    remember(pack, cache)  # as if the bit had rotted and nobody had written
    assert relay_model("inspect", str(gguf)).exit_code == 0
    assert isinstance(relay_model("inspect", str(gguf), "--verify").exception, CorruptModelError)


def test_opening_a_pack_imports_neither_gguf_nor_tokenizers_nor_the_hub(gguf: Path, cache: Path) -> None:
    """A worker's start-up: what it does not need is not loaded."""
    relay_model("pull", str(gguf))
    code = (
        "import sys, pathlib; from relay.models.store import open_model;"
        f"open_model({str(gguf)!r}, cache_dir=pathlib.Path({str(cache)!r}));"
        "unwanted = {'gguf', 'huggingface_hub', 'torch', 'transformers', 'tokenizers', 'jinja2', 'rich'};"
        "print(sorted(unwanted & sys.modules.keys()))"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
