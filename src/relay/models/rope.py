"""Tables of cos and sin for rotary embeddings, made once when a model is packed.

The definition is transformers': fp32 inverse frequencies, fp32 position × frequency, then cos and sin. Everything here is
integer arithmetic (``decimal``) or IEEE ``+ - * /``, with no library pow, sin or cos, so that every machine makes the same
table and packs made apart have the same digest.
"""

import math
from decimal import Decimal, localcontext

import numpy as np

from relay.models.config import ModelConfig, RopeConfig

_ROWS_AT_A_TIME = 4096

# pi/2 in two parts of 30 bits and a rest, so that k * part is exact for k < 2^23 (Cody and Waite's reduction).
_HALF_PI_HIGH = 1686629713 * 2.0**-30
_HALF_PI_MIDDLE = 70064198 * 2.0**-60
_HALF_PI_LOW = 5.170182981794105e-19
_SIN = tuple((-1.0) ** i / math.factorial(2 * i + 1) for i in range(9))
_COS = tuple((-1.0) ** i / math.factorial(2 * i) for i in range(9))


def rope_tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each fp32 [max_positions, head_dim / 2], scaled by yarn's attention factor."""
    frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
    shape = (config.max_positions, config.head_dim // 2)
    cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for start in range(0, config.max_positions, _ROWS_AT_A_TIME):
        stop = min(start + _ROWS_AT_A_TIME, config.max_positions)
        positions = np.arange(start, stop, dtype=np.float32)
        rows_cos, rows_sin = cos_sin(positions[:, None] * frequencies[None, :])
        cos[start:stop] = rows_cos * np.float32(scale)
        sin[start:stop] = rows_sin * np.float32(scale)
    return cos, sin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(fp32 [head_dim / 2], factor on cos and sin) of a variant; each follows transformers' order of fp32 operations."""
    powers = _powers(rope.theta, head_dim)
    inverse: np.ndarray = np.float32(1.0) / powers
    if rope.kind == "linear":
        inverse = inverse / np.float32(rope.factor)
    elif rope.kind == "llama3":
        inverse = _llama3(inverse, rope)
    elif rope.kind == "yarn":
        inverse = _yarn(powers, rope, head_dim)
    if rope.frequency_factors:
        inverse = inverse / np.array(rope.frequency_factors, np.float32)
    scale = 1.0
    if rope.kind == "yarn":
        scale = yarn_attention_factor(rope.factor) if rope.attention_factor is None else rope.attention_factor
    return inverse, scale


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Yarn's correction of the softmax temperature for a context stretched by ``factor``."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of fp32 ``angles`` (|angle| < 2^23), computed in fp64 and rounded once to fp32."""
    x = angles.astype(np.float64)
    quadrant = np.rint(x * (2.0 / math.pi))
    r = ((x - quadrant * _HALF_PI_HIGH) - quadrant * _HALF_PI_MIDDLE) - quadrant * _HALF_PI_LOW
    square = r * r
    sine = np.full_like(r, _SIN[-1])
    cosine = np.full_like(r, _COS[-1])
    for s, c in zip(_SIN[-2::-1], _COS[-2::-1], strict=True):
        sine = sine * square + s
        cosine = cosine * square + c
    sine = sine * r
    turn = quadrant.astype(np.int64) & 3
    odd = (turn & 1).astype(bool)
    cos = np.where(odd, sine, cosine) * np.where((turn == 1) | (turn == 2), -1.0, 1.0)
    sin = np.where(odd, cosine, sine) * np.where(turn >= 2, -1.0, 1.0)
    return cos.astype(np.float32), sin.astype(np.float32)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2i / head_dim) in fp32 [head_dim / 2]; the exponent is an fp32 quotient, the power correctly rounded."""
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    with localcontext() as context:
        context.prec = 40
        base = Decimal(float(np.float32(theta)))
        return np.array([np.float32(float(base ** Decimal(float(e)))) for e in exponents], np.float32)


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""
    one, factor = np.float32(1.0), np.float32(rope.factor)
    length = np.float32(rope.original_max_position)
    low = np.float32(rope.low_freq_factor)
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    longest = np.float32(rope.original_max_position / rope.low_freq_factor)
    shortest = np.float32(rope.original_max_position / rope.high_freq_factor)
    wavelength = (one / inverse) * np.float32(2 * math.pi)
    scaled = np.where(wavelength > longest, inverse / factor, inverse)
    smooth = ((one / wavelength) * length - low) / span
    between = (one - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(medium, between, scaled).astype(np.float32)


def _yarn(powers: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """NTK by parts: few rotations over the original context are interpolated, many kept, a linear ramp between."""

    def border(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = border(rope.beta_fast), border(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    one = np.float32(1.0)
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), np.float32(0), one)
    kept = one - ramp
    interpolated = one / (np.float32(rope.factor) * powers)
    mixed: np.ndarray = interpolated * (one - kept) + (one / powers) * kept
    return mixed
