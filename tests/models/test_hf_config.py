"""config.json: what is read, what is assumed, and that everything unserved is refused by name."""

import math
from typing import Any

import pytest
from tiny_models import config_json

from relay.errors import CorruptModelError
from relay.models.hf_config import parse_config

WHERE = "/m/config.json"


def parse(family: str = "llama", generation: dict[str, Any] | None = None, **changes: Any):
    return parse_config({**config_json(family), **changes}, generation or {}, WHERE)


def test_llama() -> None:
    config = parse()
    assert (config.architecture, config.vocab, config.hidden, config.head_dim) == ("llama", 96, 64, 16)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (False, False, False)
    assert config.eos_token_ids == (2,)
    assert config.rope.kind == "default"


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("mistral", {"attention_bias": True}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"head_dim": 32}, (False, False, True)),
        ("qwen3", {"head_dim": 32, "attention_bias": True}, (True, True, True)),
    ],
)
def test_biases_and_norms_of_each_family(model_type: str, changes: dict[str, Any], expected: tuple[bool, ...]) -> None:
    config = parse(model_type, **changes)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == expected


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert parse(head_dim=32).head_dim == 32
    assert parse(head_dim=None).head_dim == 16
    assert parse("qwen3").head_dim == 128


def test_generation_config_eos_wins() -> None:
    assert parse(generation={"eos_token_id": [5, 9]}).eos_token_ids == (5, 9)
    assert parse(eos_token_id=[3, 4]).eos_token_ids == (3, 4)


def test_rope_forms_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}).rope
    new = parse(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}).rope
    assert old == new
    assert old.kind == "llama3"


def test_yarn_attention_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(rope_scaling=yarn).rope.attention_factor == 0.1 * math.log(4.0) + 1.0
    assert parse(rope_scaling={**yarn, "attention_factor": 2.0}).rope.attention_factor == 2.0


@pytest.mark.parametrize(
    ("model_type", "changes", "field"),
    [
        ("llama", {"model_type": "gemma2"}, "model_type 'gemma2'"),
        ("llama", {"model_type": None}, "model_type"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor must be"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": -4}, "hidden_size must be"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be"),
        ("llama", {"num_hidden_layers": 100000}, "num_hidden_layers must be an integer from 1 to 4096"),
        ("llama", {"max_position_embeddings": 1 << 22}, "max_position_embeddings must be"),
        ("llama", {"vocab_size": True}, "vocab_size must be"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ("llama", {"hidden_size": 66}, "does not divide hidden_size"),
        ("llama", {"head_dim": 15}, "head_dim must be even"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ],
)
def test_unserved_is_refused_by_name(model_type: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CorruptModelError) as refused:
        parse(model_type, **changes)
    text = str(refused.value)
    assert text.startswith(WHERE)
    assert field in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": 511}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        ("llama", {"sliding_window": 8}),
    ],
)
def test_sliding_window_in_effect_is_a_start_up_error(model_type: str, changes: dict[str, Any]) -> None:
    """B88: never silently full attention."""
    with pytest.raises(CorruptModelError, match=r"sliding_window .* not served"):
        parse(model_type, **changes)


def test_mistral_without_the_field_has_transformers_default_window() -> None:
    raw = config_json("mistral", max_position_embeddings=32768)
    del raw["sliding_window"]
    with pytest.raises(CorruptModelError, match="sliding_window 4096"):
        parse_config(raw, {}, WHERE)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 512}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("qwen2", {"sliding_window": 8, "layer_types": ["full_attention", "full_attention"]}),
    ],
)
def test_sliding_window_without_effect_is_served(model_type: str, changes: dict[str, Any]) -> None:
    assert parse(model_type, **changes).max_positions == 512
