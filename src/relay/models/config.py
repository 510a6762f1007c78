"""The sizes and variants of a decoder-only Llama-family model, whatever file it came from."""

from dataclasses import dataclass
from typing import Literal

# Bounds on what a model file may claim, checked before anything of that size is made.
MAX_SIZE = 1 << 24
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 21


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: ``theta`` plus the parameters of its scaling variant (names as in Hugging Face configs)."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True  # yarn: whole-numbered borders of the ramp
    frequency_factors: tuple[float, ...] = ()  # GGUF's rope_freqs: each inverse frequency is divided by its factor


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's architecture. ``architecture`` is the family's name, lower case."""

    architecture: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False  # bias on the attention output projection (Llama with attention_bias)
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
