"""A Hugging Face folder (config.json, safetensors in one file or shards, tokenizer.json) as a Checkpoint."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from relay.errors import CorruptModelError
from relay.kernels.packing import MatrixSource, from_bf16, from_f16, from_f32
from relay.models.checkpoint import TokenizerFiles
from relay.models.config import ModelConfig
from relay.models.hf_config import parse_config
from relay.models.hf_tokenizer import optional_json, read_json, read_tokenizer_files
from relay.models.layout import weight_items
from relay.models.safetensors_file import SafetensorsFile, TensorPlace

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
        generation = optional_json(folder / "generation_config.json")
        self._config = parse_config(read_json(folder / "config.json"), generation, str(folder / "config.json"))
        self._tokenizer = read_tokenizer_files(folder, generation)
        self._files = _open_files(folder)
        if self._config.tied_embeddings and self._has_its_own_head():
            self._config = replace(self._config, tied_embeddings=False)
        self._check_complete()

    @property
    def where(self) -> str:
        return str(self._folder)

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

    def place(self, name: str) -> TensorPlace:
        """Where ``matrix`` and ``vector`` read. Raises as they do."""
        return self._files[file_name(name)].place(file_name(name))

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


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name → the file that holds it."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CorruptModelError(f"{folder / INDEX}: weight_map is missing")
        paths = {tensor: _shard(folder, tensor, shard) for tensor, shard in weight_map.items()}
        files = {path.name: SafetensorsFile(path) for path in sorted(set(paths.values()))}
        for tensor, shard in weight_map.items():
            if tensor not in files[shard].names:
                raise CorruptModelError(f"{folder / shard}: tensor {tensor} is missing (the index says it is here)")
        return {tensor: files[shard] for tensor, shard in weight_map.items()}
    if not (folder / SINGLE).exists():
        raise CorruptModelError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
    file = SafetensorsFile(folder / SINGLE)
    return dict.fromkeys(file.names, file)


def _shard(folder: Path, tensor: str, name: object) -> Path:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise CorruptModelError(f"{folder / INDEX}: the shard of {tensor} is no file name: {name!r}")
    if Path(name).name != name or name == "..":
        raise CorruptModelError(f"{folder / INDEX}: shard {name!r} is outside the folder")
    return folder / name
