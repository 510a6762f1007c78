"""Writes a loaded model as a Hugging Face folder in fp32, for peers that can not serve a GGUF."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from relay.kernels.packing import unpack_matrix
from relay.models.config import ModelConfig


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """The shape of ``config`` in Hugging Face's names for a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
    }


def export(model: Any, target: Path) -> None:
    """Write config.json, model.safetensors and tokenizer.json of ``model`` (a LoadedModel of Llama shape) into ``target``."""
    config, pack = model.config, model.pack
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": unpack_matrix(pack.matrix("embed")),
        "model.norm.weight": pack.vector("final_norm"),
    }
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        qkv = unpack_matrix(pack.matrix(ours + "qkv"))
        gate_up = unpack_matrix(pack.matrix(ours + "gate_up"))
        tensors |= {
            theirs + "self_attn.q_proj.weight": qkv[:q],
            theirs + "self_attn.k_proj.weight": qkv[q : q + kv],
            theirs + "self_attn.v_proj.weight": qkv[q + kv :],
            theirs + "self_attn.o_proj.weight": unpack_matrix(pack.matrix(ours + "o")),
            theirs + "mlp.gate_proj.weight": gate_up[: config.intermediate],
            theirs + "mlp.up_proj.weight": gate_up[config.intermediate :],
            theirs + "mlp.down_proj.weight": unpack_matrix(pack.matrix(ours + "down")),
            theirs + "input_layernorm.weight": pack.vector(ours + "attn_norm"),
            theirs + "post_attention_layernorm.weight": pack.vector(ours + "mlp_norm"),
        }
    target.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, str(target / "model.safetensors"), {"format": "pt"}
    )
    extra = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "hidden_act": "silu",
        "dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps({**config_fields(config), **extra}, indent=1))
    (target / "tokenizer.json").write_text(model.tokenizer_files.json)
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
