"""RoPE tables: against exact values, against transformers, and bit for bit against themselves."""

import hashlib
from decimal import Decimal, getcontext

import numpy as np
import pytest
from tiny_models import config_json

from relay.models.config import RopeConfig
from relay.models.hf_config import parse_config
from relay.models.rope import cos_sin, inverse_frequencies, rope_tables

VARIANTS = {
    "default": {},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "yarn": {
        "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    },
    "yarn-ramp": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.5,
            "original_max_position_embeddings": 1024,
            "beta_fast": 24,
            "beta_slow": 2,
            "truncate": False,
        },
    },
}


def test_cos_sin_are_correctly_rounded_over_the_whole_range() -> None:
    rng = np.random.default_rng(1)
    angles = np.concatenate(
        [
            np.array([0.0, 1e-30, 0.5, np.pi / 4, np.pi / 2, np.pi, 1.0, 8191.0, 131071.0], np.float32),
            rng.uniform(0, 7, 300).astype(np.float32),
            rng.uniform(0, 131072, 300).astype(np.float32),
        ]
    )
    cos, sin = cos_sin(angles)
    for angle, c, s in zip(angles, cos, sin, strict=True):
        exact_cos, exact_sin = exact_cos_sin(float(angle))
        assert c == np.float32(exact_cos), angle
        assert s == np.float32(exact_sin), angle


def exact_cos_sin(x: float) -> tuple[float, float]:
    """By Taylor series in 60 digits after reduction by 2 pi."""
    getcontext().prec = 60
    two_pi = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    r = Decimal(x) % two_pi
    cos, sin, term = Decimal(0), Decimal(0), Decimal(1)
    for n in range(90):
        sign = -1 if n % 4 >= 2 else 1
        if n % 2 == 0:
            cos += sign * term
        else:
            sin += sign * term
        term = term * r / (n + 1)
    return float(cos), float(sin)


def test_tables_are_the_same_on_every_machine() -> None:
    """The digest of SmolLM2's own table, made with integer and IEEE basic operations only; a change of it is a new canon."""
    config = parse_config(config_json(hidden_size=256, rope_theta=100000.0, max_position_embeddings=8192), {}, "")
    cos, sin = rope_tables(config)
    assert cos.shape == sin.shape == (8192, 32)
    digest = hashlib.blake2b(cos.tobytes() + sin.tobytes(), digest_size=16).hexdigest()
    assert digest == "a200000206dc150547fe759da3423018"


def test_frequency_factors_divide() -> None:
    plain, _ = inverse_frequencies(RopeConfig(10000.0), 8)
    divided, _ = inverse_frequencies(RopeConfig(10000.0, frequency_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    np.testing.assert_array_equal(divided, plain / np.array([1, 2, 4, 8], np.float32))


def test_first_row_is_no_rotation() -> None:
    cos, sin = rope_tables(parse_config(config_json(), {}, ""))
    assert np.all(cos[0] == 1)
    assert np.all(sin[0] == 0)
    np.testing.assert_allclose(cos.astype(np.float64) ** 2 + sin.astype(np.float64) ** 2, 1, atol=2e-7)


@pytest.mark.peers
@pytest.mark.parametrize("name", VARIANTS)
def test_tables_equal_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = config_json(hidden_size=256, max_position_embeddings=4096, **VARIANTS[name])
    ours = parse_config(raw, {}, "")
    rotary = LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**raw))
    frequencies, scale = inverse_frequencies(ours.rope, ours.head_dim)
    theirs = rotary.inv_freq.numpy()
    ulps = np.abs(frequencies.view(np.int32) - theirs.view(np.int32))
    assert ulps.max() <= 2
    assert abs(scale - rotary.attention_scaling) < 1e-12
    cos, sin = rope_tables(ours)
    their_cos, their_sin = rotary(torch.zeros(1), torch.arange(4096)[None])
    # One ulp of a frequency moves the angle at the last position by 4096 * 2^-24.
    tolerance = (2e-7 + 4096 * 2.0**-23 * ulps)[None, :] * max(1.0, scale)
    assert np.all(np.abs(cos - their_cos[0, :, :32].numpy()) <= tolerance)
    assert np.all(np.abs(sin - their_sin[0, :, :32].numpy()) <= tolerance)
