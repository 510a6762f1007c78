"""Random model folders for tests, written without torch: config.json and safetensors as transformers would save them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from relay.models.config import ModelConfig
from relay.models.hf_config import parse_config
from relay.models.layout import weight_items
from relay.models.safetensors_source import file_name

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_json(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A small config.json; a change to None removes the field."""
    config = {**BASE, "model_type": model_type, "architectures": [CLASS_NAMES[model_type]]}
    if model_type == "mistral":
        config["sliding_window"] = None
    config.update(changes)
    return config


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """fp32 tensors under the file's names: norms near 1, everything else small and random."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for item in weight_items(config):
        if hasattr(item, "rows"):
            for part, rows in zip(item.parts, item.rows, strict=True):
                tensors[file_name(part)] = (rng.standard_normal((rows, item.k)) * 0.2).astype(np.float32)
        else:
            for part, size in zip(item.parts, item.sizes, strict=True):
                near = 1.0 if "norm" in part else 0.0
                tensors[file_name(part)] = (near + rng.standard_normal(size) * 0.2).astype(np.float32)
    return tensors


def write_folder(
    folder: Path, raw: dict[str, Any], *, tensors: dict[str, np.ndarray] | None = None, seed: int = 0
) -> Path:
    """A model folder from a config.json; random tensors unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors is None:
        tensors = random_tensors(parse_config(raw, {}, "config.json"), seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
