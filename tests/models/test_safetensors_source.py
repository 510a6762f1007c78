"""Model folders: shards, damage, missing parts; each error is one line naming file and tensor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import config_json, random_tensors, write_folder

from relay.errors import CorruptModelError
from relay.models.cache import packs_dir
from relay.models.hf_config import parse_config
from relay.models.safetensors_source import SafetensorsSource
from relay.models.store import open_model


def tensors() -> dict[str, np.ndarray]:
    return random_tensors(parse_config(config_json(), {}, ""))


def refusal(folder: Path) -> str:
    with pytest.raises(CorruptModelError) as refused:
        SafetensorsSource(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_shards_give_the_pack_of_the_single_file(tmp_path: Path) -> None:
    single = write_folder(tmp_path / "single", config_json())
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_bytes((single / "config.json").read_bytes())
    everything = tensors()
    names = sorted(everything)
    weight_map = {}
    for i in range(3):
        part = {name: everything[name] for name in names[i::3]}
        save_file(part, sharded / f"model-{i}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{i}.safetensors"))
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    a, b = (open_model(str(folder), cache_dir=tmp_path / "cache") for folder in (single, sharded))
    assert a.digest == b.digest
    assert a.name == "single"


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    missing = tensors()
    del missing["model.layers.1.mlp.up_proj.weight"]
    text = refusal(write_folder(tmp_path / "missing", config_json(), tensors=missing))
    assert "tensor model.layers.1.mlp.up_proj.weight is missing" in text
    unknown = {**tensors(), "model.layers.0.mlp.gate.weight": np.zeros((2, 64), np.float32)}
    assert "model.layers.0.mlp.gate.weight belongs to no llama" in refusal(
        write_folder(tmp_path / "unknown", config_json(), tensors=unknown)
    )
    headless = tensors()
    del headless["lm_head.weight"]
    text = refusal(write_folder(tmp_path / "headless", config_json(), tensors=headless))
    assert text.endswith("tensor lm_head.weight is missing although tie_word_embeddings is false")


def test_bias_in_the_file_but_not_in_the_config(tmp_path: Path) -> None:
    biased = random_tensors(parse_config(config_json(attention_bias=True), {}, ""))
    assert "bias belongs to no llama" in refusal(write_folder(tmp_path / "m", config_json(), tensors=biased))


def test_wrong_shape_is_named_when_packing(tmp_path: Path) -> None:
    wrong = {**tensors(), "model.layers.0.mlp.down_proj.weight": np.zeros((64, 95), np.float32)}
    folder = write_folder(tmp_path / "m", config_json(), tensors=wrong)
    with pytest.raises(
        CorruptModelError, match=r"m: weight layers\.0\.down has shape \[64, 95\], the config asks for \[64, 96\]"
    ):
        open_model(str(folder), cache_dir=tmp_path / "cache")
    assert not list(packs_dir(tmp_path / "cache").iterdir())


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:size])
        text = refusal(folder)
        assert str(file) in text
    assert "truncated: tensor" in text
    assert "1 bytes after the end" in text
    file.write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
    assert "header is incomplete" in refusal(folder)
    file.write_bytes(whole[:8] + b"!" + whole[9:])
    assert "header is not JSON" in refusal(folder)


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {"dtype": None},
        {"dtype": ["F32"]},
        {"data_offsets": [0.0, 256.0]},
        {"data_offsets": ["0", "256"]},
        {"data_offsets": [False, 256]},
        {"data_offsets": [256, 0]},
        {"data_offsets": [-256, 0]},
        {"data_offsets": [0]},
        {"shape": [64.0]},
        {"shape": [-64]},
        {"shape": "64"},
        {"shape": None},
    ],
)
def test_damaged_header_entries(entry: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["model.norm.weight"] = {**header["model.norm.weight"], **entry} if entry else entry
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + whole[end:])
    assert refusal(folder) == f"{file}: tensor model.norm.weight has a damaged header entry"


def test_a_header_too_deep_and_texts_that_are_not_utf8(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes(b"\xff")
        assert f"{name}: not UTF-8" in refusal(folder)
        (folder / name).unlink()
    raw = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert "the header is not JSON (maximum recursion" in refusal(folder)


def test_unserved_dtype(tmp_path: Path) -> None:
    odd = {**tensors(), "model.norm.weight": np.ones(64, np.float64)}
    folder = write_folder(tmp_path / "m", config_json(), tensors=odd)
    with pytest.raises(CorruptModelError, match=r"tensor model\.norm\.weight has dtype F64"):
        open_model(str(folder), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{}", "weight_map is missing"),
        ("[", "not JSON"),
        ('{"weight_map": {"a": "../evil.safetensors"}}', "outside the folder"),
        ('{"weight_map": {"a": ".."}}', "outside the folder"),
        ('{"weight_map": {"a": "none.safetensors"}}', "none.safetensors: cannot be read"),
        ('{"weight_map": {"a": "x", "b": 5}}', "the shard of b is no file name: 5"),
        ('{"weight_map": {"a": ["x"]}}', "the shard of a is no file name: ['x']"),
        ('{"weight_map": {"a": ""}}', "the shard of a is no file name: ''"),
        ('{"weight_map": {"a": "a\\u0000b"}}', "the shard of a is no file name: 'a\\x00b'"),
        ("[" * 100_000, "not JSON (maximum recursion"),
    ],
)
def test_damaged_index(index: str, text: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    (folder / "model.safetensors.index.json").write_text(index)
    assert text in refusal(folder)


def test_folder_without_weights_and_config_that_is_not_json(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal(folder)


def test_texts_beside_the_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [2, 7], "temperature": 0.6, "_from_model_config": true}'
    )
    settings = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "T"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = SafetensorsSource(folder)
    assert source.config.eos_token_ids == (2, 7)
    assert source.tokenizer.generation == {"eos_token_id": [2, 7], "temperature": 0.6}
    assert source.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert source.tokenizer.chat_template == "T"
    (folder / "chat_template.jinja").write_text("from the file")
    assert SafetensorsSource(folder).tokenizer.chat_template == "from the file"
    model = open_model(str(folder), cache_dir=tmp_path / "cache")
    assert model.generation_defaults == {"eos_token_id": [2, 7], "temperature": 0.6}
    with pytest.raises(CorruptModelError, match=r"no tokenizer\.json"):
        model.tokenizer  # noqa: B018 - the access is the test
