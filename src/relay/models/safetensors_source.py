"""A Hugging Face folder (config.json, safetensors in one file or shards, tokenizer.json) as a Checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from relay.errors import CorruptModelError
from relay.kernels.packing import MatrixSource, from_bf16, from_f16, from_f32
from relay.models.checkpoint import TokenizerFiles
from relay.models.config import ModelConfig
from relay.models.hf_config import parse_config
from relay.models.layout import weight_items
from relay.models.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_LAYER_PARTS = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_MODEL_PARTS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}


class SafetensorsSource:
    """An opened folder: every tensor the model needs is there, of the right shape, before anything is packed."""

    def __init__(self, folder: Path) -> None:
        """Raises CorruptModelError naming file and field or tensor."""
        self._folder = folder
        generation = _optional_json(folder / "generation_config.json")
        self._config = parse_config(read_json(folder / "config.json"), generation, str(folder / "config.json"))
        self._tokenizer = read_tokenizer_files(folder, generation)
        self._files = _open_files(folder)
        if self._config.tied_embeddings and self._has_its_own_head():
            self._config = replace(self._config, tied_embeddings=False)
        self._check_complete()

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer(self) -> TokenizerFiles:
        return self._tokenizer

    def matrix(self, name: str) -> MatrixSource:
        tensor = self._tensor(name)
        if tensor.ndim != 2:
            raise CorruptModelError(f"{self._where(name)} must be a matrix, not of shape {list(tensor.shape)}")
        if tensor.dtype == np.uint16:
            return from_bf16(tensor)
        return from_f16(tensor) if tensor.dtype == np.float16 else from_f32(tensor)

    def vector(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        if tensor.ndim != 1:
            raise CorruptModelError(f"{self._where(name)} must be a vector, not of shape {list(tensor.shape)}")
        if tensor.dtype == np.uint16:
            return (tensor.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return tensor.astype(np.float32)

    def _tensor(self, name: str) -> np.ndarray:
        return self._files[file_name(name)].tensor(file_name(name))

    def _where(self, name: str) -> str:
        return f"{self._folder}: tensor {file_name(name)}"

    def _has_its_own_head(self) -> bool:
        """A head that differs from the embedding counts although the config ties them, as in transformers."""
        if not {_MODEL_PARTS["lm_head"], _MODEL_PARTS["embed"]} <= self._files.keys():
            return False
        return not np.array_equal(self._tensor("lm_head"), self._tensor("embed"))

    def _check_complete(self) -> None:
        needed = {file_name(part) for item in weight_items(self._config) for part in item.parts}
        for name in sorted(needed - self._files.keys()):
            hint = " although tie_word_embeddings is false" if name == _MODEL_PARTS["lm_head"] else ""
            raise CorruptModelError(f"{self._folder}: tensor {name} is missing{hint}")
        for name in sorted(self._files.keys() - needed):
            # A tied model's copy of the embedding, and tables that old checkpoints stored, add nothing.
            if name != _MODEL_PARTS["lm_head"] and not name.endswith("rotary_emb.inv_freq"):
                raise CorruptModelError(
                    f"{self._folder}: tensor {name} belongs to no {self._config.architecture} model this config describes"
                )


def file_name(part: str) -> str:
    """The name in the file of a part named as in ``layout.py``."""
    if part in _MODEL_PARTS:
        return _MODEL_PARTS[part]
    _, layer, kind = part.split(".")
    return f"model.layers.{layer}.{_LAYER_PARTS[kind]}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CorruptModelError."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CorruptModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CorruptModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path}: not a JSON object")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name → the file that holds it."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CorruptModelError(f"{folder / INDEX}: weight_map is missing")
        files = {name: SafetensorsFile(_shard(folder, name)) for name in sorted(set(weight_map.values()))}
        for tensor, shard in weight_map.items():
            if tensor not in files[shard].names:
                raise CorruptModelError(f"{folder / shard}: tensor {tensor} is missing (the index says it is here)")
        return {tensor: files[shard] for tensor, shard in weight_map.items()}
    if not (folder / SINGLE).exists():
        raise CorruptModelError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
    file = SafetensorsFile(folder / SINGLE)
    return dict.fromkeys(file.names, file)


def _shard(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise CorruptModelError(f"{folder / INDEX}: shard {name!r} is outside the folder")
    return folder / name


def read_tokenizer_files(folder: Path, generation: dict[str, Any]) -> TokenizerFiles:
    """tokenizer.json with what tokenizer_config.json and the chat template files add to it."""
    path = folder / "tokenizer.json"
    settings = _optional_json(folder / "tokenizer_config.json")
    special = _special_tokens({**_optional_json(folder / "special_tokens_map.json"), **settings})
    return TokenizerFiles(
        json=path.read_text(encoding="utf-8") if path.exists() else "",
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        generation={key: value for key, value in generation.items() if not key.startswith("_")},
    )


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    roles = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    found = {}
    for role in roles:
        value = settings.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[role] = value
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json (a list of named ones: ``default``)."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    value = _optional_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict) and "name" in entry}
        value = named.get("default")
    return value if isinstance(value, str) else None
