"""The numpy sampler is what its definition says, and draws the distribution it should (property P5)."""

import math

import numpy as np
import pytest

from relay.kernels import sampler_math as sm
from relay.kernels.sampler import InvalidLogits, SlotState, draw, draw_rows
from relay.protocol.sampling import SamplingParams


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, **fields})


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def random_row(vocab: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * scale).astype(np.float32)


# --- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known-answer vectors of Random123
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    words = sm.philox4x32(tuple(np.uint64(c) for c in counter), key)
    assert [int(w[0]) for w in words] == [int(text, 16) for text in expected.split()]


def test_philox_words_place_seed_position_and_choice() -> None:
    seed = (0x299F31D0 << 32) | 0xA4093822
    words = sm.philox_words(np.array([0x243F6A88, 5]), 0x05A308D3, 0x13198A2E, seed)
    direct = sm.philox4x32(
        (np.array([0x243F6A88, 5], np.uint64), np.uint64(0x05A308D3), np.uint64(0x13198A2E), np.uint64(0)),
        (0xA4093822, 0x299F31D0),
    )
    assert words.tolist() == direct[0].tolist()


def test_log_and_weights_are_accurate() -> None:
    generator = np.random.default_rng(1)
    for x in (
        10 ** generator.uniform(-300, 300, 20000),
        generator.uniform(0.5, 2, 20000),
        1 + 10.0 ** np.arange(-15, 0),
    ):
        assert np.max(np.abs(sm.log(x) / np.log(x) - 1)) < 1e-14
    x = -generator.uniform(0, 30, 20000)
    assert np.max(np.abs(sm.weights(x) - np.floor(2.0**40 * np.exp(x)))) <= 1
    assert sm.weights(np.array([0.0, -0.0, -28.0, -30.0, -1e300, -np.inf])).tolist() == [1 << 40, 1 << 40, 0, 0, 0, 0]


def test_gumbel_is_finite_at_both_ends_and_below_its_bound() -> None:
    low, high = sm.gumbel(np.array([0, 0xFFFFFFFF], np.uint64)).tolist()
    assert low == pytest.approx(-math.log(33 * math.log(2)), rel=1e-12)
    assert high == pytest.approx(33 * math.log(2), abs=1e-9)
    assert high < sm.MAX_GUMBEL


# --- order of the steps ---------------------------------------------------------------------------------------------


def test_greedy_takes_the_highest_and_the_lowest_id_of_a_tie() -> None:
    state = SlotState(params(temperature=0.0), 0, [0])
    assert draw(row(1, 5, 5, -1), state).token_id == 1
    assert draw(row(-0.0, 0.0, -1), state).token_id == 0
    assert draw(row(-math.inf, -math.inf, -3), state).token_id == 2
    assert draw(row(1, 2), SlotState(params(temperature=0.99e-5), 0, [0])).token_id == 1


def test_penalties_count_what_they_should() -> None:
    logits = row(4, 3.5, -1, 0)
    repetition = SlotState(params(temperature=0.0, repetition_penalty=2.0), 0, [0])
    assert draw(logits, repetition).token_id == 1  # 4/2 < 3.5: prompt tokens count
    frequency = SlotState(params(temperature=0.0, frequency_penalty=0.3), 0, [0, 0, 0])
    assert draw(logits, frequency).token_id == 0  # prompt tokens do not count
    frequency.push(0)
    assert draw(logits, frequency).token_id == 0  # 3.7 > 3.5
    frequency.push(0)
    assert draw(logits, frequency).token_id == 1  # 3.4 < 3.5
    presence = SlotState(params(temperature=0.0, presence_penalty=0.4), 0, [1], [0, 0, 0, 0])
    assert draw(logits, presence).token_id == 0  # once, however often
    negative = SlotState(params(temperature=0.0, repetition_penalty=2.0), 0, [0, 1, 2])
    assert draw(row(-3, -2, -1, -1.9), negative).token_id == 3  # -1 * 2 < -1.9


def test_penalties_come_before_bias_and_bias_before_the_mask() -> None:
    biased = SlotState(params(temperature=0.0, repetition_penalty=2.0, logit_bias={0: 3.0}), 0, [0])
    assert draw(row(4, 4.5), biased).token_id == 0  # 4 / 2 + 3, not (4 + 3) / 2
    masked = SlotState(
        params(temperature=0.0, min_tokens=2, eos_token_ids=(0,), stop_token_ids=(1, 99), logit_bias={0: 100.0}), 0, [3]
    )
    logits = row(9, 8, 1)
    assert draw(logits, masked).token_id == 2
    masked.push(2)
    assert draw(logits, masked).token_id == 2
    masked.push(2)
    assert draw(logits, masked).token_id == 0


def test_ids_without_a_logit_change_nothing() -> None:
    state = SlotState(
        params(temperature=0.0, logit_bias={7: 50.0, 2**31 - 1: 9.0}, presence_penalty=1.0), 0, [77], [55]
    )
    assert draw(row(1, 2, 0), state).token_id == 1


def seen(logits: np.ndarray, draws: int = 300, **fields: object) -> set[int]:
    return {draw(logits, SlotState(params(seed=s, **fields), 0, [0])).token_id for s in range(draws)}


def test_top_k_keeps_the_lower_ids_of_a_tie() -> None:
    assert seen(row(1, 1, 1, 1, 0.5), top_k=2) == {0, 1}
    assert seen(row(0, 2, 1, 2, 1), top_k=3) == {1, 2, 3}
    assert seen(row(0, 0, 0), top_k=9) == {0, 1, 2}


def test_top_p_keeps_the_smallest_prefix_of_the_survivors() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.25, 0.15], np.float32))
    assert seen(logits, top_p=0.7) == {1, 2}
    assert seen(logits, top_p=0.8) == {1, 2, 3}
    assert seen(row(0, 0, 0, 0), top_p=0.5) == {0, 1}  # exactly half: ties by id
    assert seen(row(0, 0, 0, 0), top_p=0.51) == {0, 1, 2}
    assert seen(row(3, 0, 0, 0), top_p=0.0) == {0}
    # of the top-k survivors' sum, not of all: {1, 2} hold 2/3 and 1/3 of theirs
    assert seen(logits, top_p=0.7, top_k=2) == {1, 2}


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.04, 0.16], np.float32))
    assert seen(logits, min_p=0.1) == {0, 1, 3}
    assert seen(logits, min_p=1.0) == {0}
    assert seen(logits, min_p=0.1, temperature=3.0) == {0, 1, 2, 3}  # after the temperature


# --- extremes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-5, 1.1e-5, 1e-3, 1e30, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = row(3e38, -3e38, 1, 0)
    tokens = seen(logits, draws=50, temperature=temperature, top_p=0.99)
    assert tokens <= {0, 1, 2, 3}
    if temperature < 1:
        assert tokens == {0}


def test_bad_rows_are_named() -> None:
    states = [SlotState(params(), 0, [0]), SlotState(params(temperature=0.0), 0, [0])]
    with pytest.raises(InvalidLogits, match=r"logits row 1: the logit of token 2 is nan") as raised:
        draw_rows(np.stack([row(1, 2, 3), row(1, 2, math.nan)]), states)
    assert raised.value.row == 1
    with pytest.raises(InvalidLogits, match="the logit of token 0 is inf"):
        draw(row(math.inf, 0), states[0])
    with pytest.raises(InvalidLogits, match="no token is left to draw"):
        draw(row(-math.inf, -math.inf), states[1])
    with pytest.raises(InvalidLogits, match="no token is left to draw"):
        draw(row(1, 2), SlotState(params(min_tokens=1, stop_token_ids=(0, 1)), 0, [0]))
    with pytest.raises(InvalidLogits, match="overflowed when penalties"):
        draw(row(1, 2), SlotState(params(repetition_penalty=1e-320), 0, [0, 1]))
    with pytest.raises(InvalidLogits, match="overflowed when divided"):
        draw(row(1, 2), SlotState(params(logit_bias={0: 1e308}, temperature=1e-3), 0, [0, 1]))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"logit_bias": {1: math.inf}},
        {"repetition_penalty": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"seed": 1 << 64},
        {"top_k": -1},
    ],
)
def test_parameters_outside_their_domain_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SlotState(params(**fields), 0, [0])


# --- logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_row(500, 3)
    expected = logits - np.log(np.sum(np.exp(logits.astype(np.float64))))
    state = SlotState(
        params(temperature=0.3, top_k=5, logprobs=4, logit_bias={7: 100.0}, presence_penalty=2.0), 0, [1], [7]
    )
    sampled = draw(logits, state)
    assert sampled.token_id == 7
    assert sampled.logprob == pytest.approx(expected[7], abs=1e-9)
    assert [token for token, _ in sampled.top] == np.argsort(-logits, kind="stable")[:4].tolist()
    assert [value for _, value in sampled.top] == pytest.approx(np.sort(expected)[::-1][:4].tolist(), abs=1e-9)


def test_logprob_ties_go_by_id_and_masked_logits_are_left_out() -> None:
    sampled = draw(row(1, 2, 2, 1, 2, -math.inf), SlotState(params(temperature=0.0, logprobs=4), 0, [0]))
    assert [token for token, _ in sampled.top] == [1, 2, 4, 0]
    assert len(draw(row(1, -math.inf), SlotState(params(logprobs=5), 0, [0])).top) == 1
    chosen_only = draw(row(1, 2), SlotState(params(logprobs=0), 0, [0]))
    assert chosen_only.top == []
    assert chosen_only.logprob is not None
    assert draw(row(1, 2), SlotState(params(), 0, [0])).logprob is None


# --- P5: resume, batch order, independence --------------------------------------------------------------------------

STREAM_PARAMS = params(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    min_tokens=6,
    eos_token_ids=(2,),
    logprobs=2,
    seed=2**63 + 12345,
)


def stream(prompt: list[int], outputs: list[int], total: int) -> list[int]:
    """Tokens up to ``total`` from a toy model whose logits depend on the last two tokens."""
    state = SlotState(STREAM_PARAMS, 1, prompt, outputs)
    tokens = list(outputs)
    while len(tokens) < total:
        context = prompt + tokens
        token = draw(random_row(120, context[-1] * 1000 + context[-2]), state).token_id
        tokens.append(token)
        state.push(token)
    return tokens


def test_the_stream_is_the_same_from_every_resume_point() -> None:
    whole = stream([5, 6, 7, 6], [], 14)
    assert len(set(whole)) > 5
    for cut in range(14):
        assert stream([5, 6, 7, 6], whole[:cut], 14) == whole


def test_rows_do_not_influence_each_other() -> None:
    logits = np.stack([random_row(200, seed) for seed in range(9)])
    states = [
        SlotState(params(seed=seed, top_p=0.9, logprobs=1), seed % 3, [seed + 1] * (seed + 1)) for seed in range(9)
    ]
    whole = draw_rows(logits, states)
    assert whole == [draw_rows(logits[i : i + 1], [states[i]])[0] for i in range(9)]
    order = np.random.default_rng(0).permutation(9)
    assert [whole[i] for i in order] == draw_rows(logits[order], [states[i] for i in order])


def test_seed_choice_and_position_each_change_the_draw() -> None:
    logits = np.zeros(1 << 15, np.float32)
    tokens = {
        (seed, choice, length): draw(logits, SlotState(params(seed=seed), choice, [0] * length)).token_id
        for seed in (0, 1, 1 << 32)
        for choice in (0, 1)
        for length in (1, 2)
    }
    assert len(set(tokens.values())) == len(tokens)


@pytest.mark.parametrize("vary", ["seed", "position", "choice"])
def test_draws_follow_the_softmax(vary: str) -> None:
    """Chi-square of 4,000 draws at temperature 0.8 over 12 tokens, each of the three counters moving by itself."""
    logits = random_row(12, 11, scale=1.0)
    probabilities = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    counts = np.zeros(12)
    draws = 4000
    state = SlotState(params(seed=77, temperature=0.8), 0, [0])
    for i in range(draws):
        if vary == "position":
            state.num_outputs = i
        else:
            seed, choice = (i, 0) if vary == "seed" else (77, i)
            state = SlotState(params(seed=seed, temperature=0.8), choice, [0])
        counts[draw(logits, state).token_id] += 1
    statistic = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    assert statistic < 31.3  # 11 degrees of freedom, p = 0.001; deterministic


def test_draws_follow_the_truncated_softmax() -> None:
    logits = random_row(40, 5, scale=1.5)
    kept = np.argsort(-logits, kind="stable")[:6]
    probabilities = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
    counts = dict.fromkeys(kept.tolist(), 0)
    for seed in range(3000):
        counts[draw(logits, SlotState(params(seed=seed, top_k=6), 0, [0])).token_id] += 1
    observed = np.array([counts[token] for token in kept.tolist()])
    statistic = float(((observed - 3000 * probabilities) ** 2 / (3000 * probabilities)).sum())
    assert statistic < 20.5  # 5 degrees of freedom, p = 0.001
