"""The Llama family as a program: one builder for Llama, Mistral, Qwen2 and Qwen3, which differ in biases, norms and sizes."""

import math

from relay.kernels.program import (
    Attend,
    Buffer,
    Embed,
    Geometry,
    HeadNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeWriteKv,
    SelectRows,
    SiluMul,
)
from relay.models.config import ModelConfig


def build_program(config: ModelConfig) -> Program:
    """The op records of ``config`` in execution order; weight names are those of ``layout.py``."""
    ops: list[Op] = [Embed("embed")]
    for layer in range(config.num_layers):
        ops += _layer(config, layer)
    head = "embed" if config.tied_embeddings else "lm_head"
    ops += [
        SelectRows(Buffer.X, Buffer.S),
        RmsNorm(Buffer.S, Buffer.S, "final_norm", config.rms_eps),
        Linear(Buffer.S, Buffer.L, head),
    ]
    return Program(tuple(ops), geometry(config))


def geometry(config: ModelConfig) -> Geometry:
    """The sizes of ``config`` as a backend needs them."""
    return Geometry(
        num_layers=config.num_layers,
        hidden=config.hidden,
        intermediate=config.intermediate,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        max_positions=config.max_positions,
    )


def _layer(config: ModelConfig, layer: int) -> list[Op]:
    name = f"layers.{layer}."
    ops: list[Op] = [
        RmsNorm(Buffer.X, Buffer.H, name + "attn_norm", config.rms_eps),
        Linear(Buffer.H, Buffer.QKV, name + "qkv", bias=name + "qkv_bias" if config.attention_bias else None),
    ]
    if config.qk_norm:
        ops.append(HeadNorm(name + "q_norm", name + "k_norm", config.rms_eps))
    output_bias = name + "o_bias" if config.output_bias else None
    return [
        *ops,
        RopeWriteKv(layer),
        Attend(layer, 1.0 / math.sqrt(config.head_dim)),
        Linear(Buffer.A, Buffer.X, name + "o", bias=output_bias, accumulate=True),
        RmsNorm(Buffer.X, Buffer.H, name + "mlp_norm", config.rms_eps),
        Linear(Buffer.H, Buffer.G, name + "gate_up"),
        SiluMul(),
        Linear(Buffer.U, Buffer.X, name + "down", accumulate=True),
    ]
