"""config.json of a Hugging Face folder → ModelConfig. What cannot be served exactly is refused by name, never approximated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from relay.errors import CorruptModelError
from relay.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, ModelConfig, RopeConfig
from relay.models.rope import yarn_attention_factor

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What transformers assumes for a family where config.json is silent."""

    class_name: str
    num_kv_heads: int | None  # None: as many as heads
    head_dim: int | None  # None: hidden / heads
    max_positions: int
    sliding_window: int | None
    windows_switch: bool  # the window counts only with use_sliding_window
    bias: Literal["never", "qkv", "by attention_bias"]
    qk_norm: bool = False
    bos: int | None = None
    eos: int | None = None


_FAMILIES: dict[str, _Defaults] = {
    "llama": _Defaults("LlamaForCausalLM", None, None, 2048, None, False, "by attention_bias", bos=1, eos=2),
    "mistral": _Defaults("MistralForCausalLM", 8, None, 131072, 4096, False, "never", bos=1, eos=2),
    "qwen2": _Defaults("Qwen2ForCausalLM", 32, None, 32768, 4096, True, "qkv"),
    "qwen3": _Defaults("Qwen3ForCausalLM", 32, 128, 32768, 4096, True, "by attention_bias", qk_norm=True),
}


class _Fields:
    """Typed access to a JSON object; every complaint names file and field."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def refuse(self, field: str, why: str) -> NoReturn:
        raise CorruptModelError(f"{self.where}: {field} {why}")

    def integer(self, field: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            self.refuse(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            self.refuse(field, f"must be an integer from 1 to {most}, not {value!r}")
        return value

    def number(self, field: str, default: float | None = None, *, least: float = 0.0) -> float:
        value = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            self.refuse(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            self.refuse(field, f"must be a number of at least {least:g}, not {value!r}")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.raw.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(field, f"must be true or false, not {value!r}")
        return value


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """``raw`` is config.json, ``generation`` generation_config.json (its EOS wins), ``where`` the file named in errors.

    Raises CorruptModelError for a missing or impossible value and for every feature outside the family served.
    """
    fields = _Fields(raw, where)
    family, defaults = _family(fields)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads if defaults.num_kv_heads is None else defaults.num_kv_heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if raw.get("head_dim") is None and defaults.head_dim is None and hidden % heads:
        fields.refuse("num_attention_heads", f"{heads} does not divide hidden_size {hidden}, and head_dim is missing")
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden // heads)
    if head_dim % 2:
        fields.refuse("head_dim", f"must be even, not {head_dim}")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    max_positions = fields.integer("max_position_embeddings", defaults.max_positions, MAX_POSITIONS)
    _refuse_unserved(fields, defaults, num_layers, max_positions)
    biased = defaults.bias == "by attention_bias" and fields.flag("attention_bias")
    return ModelConfig(
        architecture=family,
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        rope=_rope(fields, max_positions),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=biased or defaults.bias == "qkv",
        output_bias=biased,
        qk_norm=defaults.qk_norm,
        eos_token_ids=_eos(fields, generation, defaults.eos),
        bos_token_id=_bos(fields, defaults.bos),
    )


def _family(fields: _Fields) -> tuple[Family, _Defaults]:
    model_type = fields.raw.get("model_type")
    served = ", ".join(_FAMILIES)
    if not isinstance(model_type, str):
        fields.refuse("model_type", f"is missing (served: {served})")
    if model_type not in _FAMILIES:
        fields.refuse("model_type", f"{model_type!r} is not served (served: {served})")
    defaults = _FAMILIES[model_type]
    names = fields.raw.get("architectures")
    if names and defaults.class_name not in names:
        fields.refuse("architectures", f"{names} is not served ({defaults.class_name} is)")
    return cast(Family, model_type), defaults


def _refuse_unserved(fields: _Fields, defaults: _Defaults, num_layers: int, max_positions: int) -> None:
    raw = fields.raw
    if raw.get("quantization_config") is not None:
        fields.refuse("quantization_config", "is not served; use the unquantised checkpoint or a GGUF file")
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(field):
            fields.refuse(field, "is set: mixtures of experts are not served")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.refuse("hidden_act", f"{activation!r} is not served (silu is)")
    if fields.flag("mlp_bias"):
        fields.refuse("mlp_bias", "true is not served")
    window = raw.get("sliding_window", defaults.sliding_window)
    if defaults.windows_switch and not fields.flag("use_sliding_window"):
        window = None
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        for kind in layer_types:
            if kind not in ("full_attention", "sliding_attention"):
                fields.refuse("layer_types", f"{kind!r} is not served")
        if "sliding_attention" in layer_types and window is None:
            window = raw.get("sliding_window", defaults.sliding_window) or 0
        elif "sliding_attention" not in layer_types and defaults.windows_switch:
            window = None
    elif defaults.windows_switch and window is not None:
        # Only layers from max_window_layers on slide.
        window = window if num_layers > fields.number("max_window_layers", 28) else None
    if window is not None and window < max_positions:
        fields.refuse("sliding_window", f"{window} is shorter than the context of {max_positions}: not served")


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    """Reads both forms: ``rope_theta`` with ``rope_scaling``, and the newer ``rope_parameters``."""
    raw = fields.raw
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    source = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        fields.refuse(source, "must be one flat object for all layers")
    rope = _Fields(parameters, f"{fields.where}: {source}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_KINDS:
        rope.refuse("rope_type", f"{kind!r} is not served (served: {', '.join(_ROPE_KINDS)})")
    for owner in (fields, rope):
        if owner.raw.get("partial_rotary_factor") not in (None, 1, 1.0):
            owner.refuse("partial_rotary_factor", f"{owner.raw['partial_rotary_factor']} is not served")
    if parameters.get("mrope_section") is not None:
        rope.refuse("mrope_section", "is not served")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1.0:
        rope.refuse("rope_theta", f"must be over 1, not {theta:g}")
    if kind == "default":
        return RopeConfig(theta)
    original = fields.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "yarn":
        return _yarn(rope, theta, original, max_positions)
    factor = rope.number("factor", least=1e-6)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    low, high = rope.number("low_freq_factor", least=1e-6), rope.number("high_freq_factor", least=1e-6)
    if high <= low:
        rope.refuse("high_freq_factor", f"{high:g} must be over low_freq_factor {low:g}")
    return RopeConfig(theta, "llama3", factor, low, high, original)


def _yarn(rope: _Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    factor = rope.number("factor", max_positions / original, least=1e-6)
    mscale, mscale_all = rope.raw.get("mscale"), rope.raw.get("mscale_all_dim")
    if rope.raw.get("attention_factor") is not None:
        attention = rope.number("attention_factor")
    elif mscale and mscale_all:
        attention = yarn_attention_factor(factor, rope.number("mscale")) / yarn_attention_factor(
            factor, rope.number("mscale_all_dim")
        )
    else:
        attention = yarn_attention_factor(factor)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=attention,
        truncate=rope.flag("truncate", True),
    )


def _eos(fields: _Fields, generation: Mapping[str, Any], default: int | None) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = fields.raw.get("eos_token_id", default)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        fields.refuse("eos_token_id", f"must be token ids, not {value!r}")
    return tuple(ids)


def _bos(fields: _Fields, default: int | None) -> int | None:
    value = fields.raw.get("bos_token_id", default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        fields.refuse("bos_token_id", f"must be a token id, not {value!r}")
    return value
