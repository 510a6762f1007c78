"""Small GGUF files for tests: a model folder's tensors written as llama.cpp's converter would write them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from relay.models.config import ModelConfig
from relay.models.gguf_source import _file_name as gguf_name
from relay.models.layout import weight_items
from relay.models.safetensors_source import file_name as hf_name

TOKENS = ["<|end|>", *(chr(0x21 + i) for i in range(90)), "Ġ", "Ċ", "ab", "Ġab", "abc"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the halves of each head's rows: the order in which llama files store q and k."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """``tensors`` has Hugging Face names; matrices are quantised to ``kind``, vectors stay fp32."""
    arch = config.architecture
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope.theta)
    add_tokenizer(writer)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for item in weight_items(config):
        for part in item.parts:
            values = tensors[hf_name(part)]
            role = part.rsplit(".", 1)[-1]
            if arch == "llama" and role in ("q", "k", "q_bias", "k_bias"):
                values = permuted(values, config.num_heads if role.startswith("q") else config.num_kv_heads)
            if values.ndim == 2 and kind is not gguf.GGMLQuantizationType.F32:
                writer.add_tensor(gguf_name(part), gguf.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(gguf_name(part), np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "Ġ ab", "ab c"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|end|>{{ m.content }}{% endfor %}")
