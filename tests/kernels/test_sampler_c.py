"""The C sampler equals the numpy one bit for bit, on every instruction set this machine has."""

import ctypes
import math
import os
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.kernels import sampler_math as sm
from relay.kernels.backend import SampledToken
from relay.kernels.cpu import build, library
from relay.kernels.cpu.sampler import CSampler
from relay.kernels.sampler import InvalidLogits, SlotState, draw
from relay.protocol.sampling import SamplingParams

MATH = """
#include "sampler_math.h"
void test_log(const double *x, double *y, long n) { for (long i = 0; i < n; i++) y[i] = sm_log(x[i]); }
void test_weight(const double *x, int64_t *y, long n) { for (long i = 0; i < n; i++) y[i] = sm_weight(x[i]); }
void test_gumbel(const uint32_t *x, double *y, long n) { for (long i = 0; i < n; i++) y[i] = sm_gumbel(x[i]); }
void test_philox(const int32_t *x, uint32_t *y, long n, uint32_t p, uint32_t c, uint64_t s) {
    for (long i = 0; i < n; i += BLOCK) philox_block(x + i, p, c, s, y + i);
}
"""


@pytest.fixture(scope="module", params=library.available())
def sampler(request: pytest.FixtureRequest) -> CSampler:
    return CSampler(library.load(request.param))


@pytest.fixture(scope="module", params=library.available())
def arithmetic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The inline functions of sampler_math.h, compiled as build.py compiles the kernels."""
    directory = tmp_path_factory.mktemp("math")
    source, target = directory / "math.c", directory / "math.so"
    source.write_text(MATH)
    flags = [*build._FLAGS, *build.variants()[request.param], f"-I{build.FOLDER}", "-shared"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", target, source, "-lm"], check=True)
    return ctypes.CDLL(str(target))


def call(function: Callable[..., None], x: np.ndarray, dtype: type, *rest: object) -> np.ndarray:
    y = np.empty(len(x), dtype)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(len(x)), *rest)
    return y


def test_the_arithmetic_has_equal_bits(arithmetic: ctypes.CDLL) -> None:
    generator = np.random.default_rng(0)
    positive = np.concatenate(
        [10 ** generator.uniform(-300, 300, 30000), generator.uniform(0.5, 2, 30000), 1 + np.arange(-99, 99) * 2.0**-52]
    )
    assert np.array_equal(call(arithmetic.test_log, positive, np.float64), sm.log(positive))
    negative = np.concatenate(
        [-generator.uniform(0, 31, 60000), -(10 ** generator.uniform(-300, 300, 999)), [0.0, -0.0, -np.inf]]
    )
    assert np.array_equal(call(arithmetic.test_weight, negative, np.int64), sm.weights(negative))
    words = np.concatenate([generator.integers(0, 2**32, 60000), np.arange(300), 2**32 - 1 - np.arange(300)])
    noise = call(arithmetic.test_gumbel, words.astype(np.uint32), np.float64)
    assert np.array_equal(noise, sm.gumbel(words.astype(np.uint64)))
    assert noise.max() < sm.MAX_GUMBEL
    ids = generator.integers(0, 2**31, 6400).astype(np.int32)
    for position, choice, seed in ((0, 0, 0), (2**31 - 1, 7, 2**64 - 1), (17, 2**32 - 1, 0x0123456789ABCDEF)):
        extra = (ctypes.c_uint32(position), ctypes.c_uint32(choice), ctypes.c_uint64(seed))
        drawn = call(arithmetic.test_philox, ids, np.uint32, *extra)
        assert np.array_equal(drawn, sm.philox_words(ids.astype(np.int64), position, choice, seed))


def outcome(sample: Callable[[], SampledToken]) -> SampledToken | str:
    try:
        return sample()
    except InvalidLogits as error:
        return str(error)


ids = st.integers(-2, 320)
temperatures = st.one_of(
    st.sampled_from([0.0, 1e-6, 1e-5, 1.0001e-5, 0.7, 1.0, 2.0, 1e30, 1e300, 5e-324]),
    st.floats(0.05, 3.0),
    st.floats(0.0, 1e308),
)
all_params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    min_tokens=st.sampled_from([0, 0, 1, 4]),
    temperature=temperatures,
    top_k=st.one_of(st.just(0), st.integers(1, 330), st.just(2**40)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0), st.sampled_from([0.25, 0.5, 0.75, 1 - 2**-53])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1.0, 0.5, 5e-324])),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0, 1e308]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, -1.0, -1e308]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 1e-310, 1e300]),
    logit_bias=st.dictionaries(ids, st.one_of(st.floats(-100, 100), st.sampled_from([1e308, -1e308])), max_size=4),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.one_of(st.none(), st.integers(0, 330)),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    eos_token_ids=st.lists(ids, max_size=1).map(tuple),
)


@st.composite
def rows(draw_value: st.DrawFn) -> np.ndarray:
    """fp32 rows of 1..320 logits: smooth, full of ties, with -inf, and now and then NaN, +inf or nothing finite."""
    vocab = draw_value(st.integers(1, 320))
    generator = np.random.default_rng(draw_value(st.integers(0, 2**32)))
    scale = draw_value(st.sampled_from([0.1, 1.0, 5.0, 30.0, 1e30]))
    logits = (generator.normal(size=vocab) * scale).astype(np.float32)
    kind = draw_value(st.integers(0, 5))
    if kind == 1:
        logits = np.round(logits / np.float32(scale))
    elif kind == 2:
        logits = np.where(generator.random(vocab) < 0.5, np.float32(0.0), np.float32(-0.0))
    elif kind == 3:
        logits[generator.random(vocab) < 0.9] = -np.inf
    elif kind == 4 and draw_value(st.booleans()):
        logits[generator.integers(vocab)] = draw_value(st.sampled_from([np.nan, np.inf]))
    return logits.astype(np.float32)


@settings(max_examples=400, deadline=None)
@given(
    logits=rows(),
    params=all_params,
    choice=st.integers(0, 2**32 - 1),
    prompt=st.lists(st.integers(0, 330), min_size=1, max_size=150),
    outputs=st.lists(st.integers(0, 330), max_size=9),
)
def test_draws_have_equal_bits(
    sampler: CSampler, logits: np.ndarray, params: SamplingParams, choice: int, prompt: list[int], outputs: list[int]
) -> None:
    state = SlotState(params, choice, prompt, outputs)
    assert outcome(lambda: sampler.draw(logits, state)) == outcome(lambda: draw(logits, state))


VARIANTS: list[dict[str, object]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-4},
    {"top_k": 50},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"min_p": 0.02},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    {"temperature": 0.0, "logprobs": 20},
    {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "top_p": 0.8, "logprobs": 3},
]


@pytest.mark.parametrize("shape", ["peaked", "flat", "equal", "sorted"])
def test_whole_vocabularies_have_equal_bits(sampler: CSampler, shape: str) -> None:
    vocab = 49152 - 37
    generator = np.random.default_rng(len(shape))
    logits = generator.normal(size=vocab).astype(np.float32)
    if shape == "peaked":
        logits = (logits * 3 - 5).astype(np.float32)
        logits[generator.integers(0, vocab, 25)] += 14
    elif shape == "equal":
        logits[:] = 2.5
    elif shape == "sorted":
        logits = np.sort(logits)
    for index, fields in enumerate(VARIANTS):
        state = SlotState(
            SamplingParams(**{"max_tokens": 5, "seed": index, **fields}), index, list(range(90)), [3, 3, 8]
        )
        assert sampler.draw(logits, state) == draw(logits, state), fields


def test_errors_name_row_and_token(sampler: CSampler) -> None:
    state = SlotState(SamplingParams(max_tokens=1), 0, [0])
    logits = np.zeros((2, 70), np.float32)
    logits[1, 66] = math.nan
    with pytest.raises(InvalidLogits, match="logits row 1: the logit of token 66 is nan"):
        sampler.draw_rows(logits, [state, state])
    with pytest.raises(ValueError, match="contiguous"):
        sampler.draw(logits[:, 0], state)


def test_threads_share_the_rows(sampler: CSampler) -> None:
    handle = library.load(library.choose(None))
    pool = handle.pool_create(3)
    try:
        pooled = CSampler(handle, pool, 3)
        generator = np.random.default_rng(9)
        wide = (generator.normal(size=(24, 5000)) * 3).astype(np.float32)
        logits = wide[:, :4900]  # rows lie apart, as in a buffer with a padded stride
        states = [
            SlotState(
                SamplingParams(**{"max_tokens": 1, "seed": i, **VARIANTS[i % len(VARIANTS)]}), i, [i + 1] * (i + 1)
            )
            for i in range(24)
        ]
        expected = [draw(logits[i], state) for i, state in enumerate(states)]
        for _ in range(20):
            assert pooled.draw_rows(logits, states) == expected
        assert sampler.draw_rows(logits, states) == expected
        wide[[7, 20], 11] = np.nan
        with pytest.raises(InvalidLogits, match="logits row 7"):
            pooled.draw_rows(logits, states)
    finally:
        handle.pool_destroy(pool)
