"""The requests of a chaos run, drawn from its seed: greedy and sampled, one word to some 600 tokens, shared prefixes, every
sampling parameter, stop strings, logprobs, several choices, both endpoints, streamed and whole. Pure."""

import random
from dataclasses import dataclass
from typing import Any

WORDS = (
    "harbour lamp ledger wind gull mast evening fog bell rope tide captain letter winter bridge copper garden window "
    "river engine valve pressure filter signal station platform ticket morning market bread salt number count seven "
    "three between under before quietly slowly always never because although while every other small heavy bright "
    "cold old new first last"
)
PREFIXES = 3
LONGEST_WORDS = 460  # about 600 tokens of these words
LONGEST_ANSWER = 48


@dataclass(frozen=True, slots=True)
class ChatOrCompletion:
    """One request: ``seed`` names it in every message about it."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def seed(self) -> int:
        seed: int = self.body["seed"]
        return seed

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])


def draw_requests(
    seed: int, count: int, model: str, *, longest_words: int = LONGEST_WORDS, longest_answer: int = LONGEST_ANSWER
) -> list[ChatOrCompletion]:
    """``count`` different requests; the same seed gives the same ones. Bounds: words of a prompt, tokens of an answer."""
    dice = random.Random(f"requests {seed}")
    prefixes = [_words(dice, dice.randrange(longest_words // 8, longest_words // 2)) for _ in range(PREFIXES)]
    base = dice.getrandbits(40) << 16
    return [_draw(dice, index, base + index, model, prefixes, longest_words, longest_answer) for index in range(count)]


def _draw(
    dice: random.Random,
    index: int,
    seed: int,
    model: str,
    prefixes: list[str],
    longest_words: int,
    longest_answer: int,
) -> ChatOrCompletion:
    body: dict[str, Any] = {
        "model": model,
        "seed": seed,
        "stream": index % 8 != 5,
        "max_tokens": max(1, int(longest_answer * dice.choice((0, 1 / 8, 1 / 4, 2 / 5, 2 / 3, 1)))),
        "return_token_ids": True,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    body |= _sampling(dice)
    if dice.random() < 0.15:
        body["n"] = dice.choice((2, 3))
    if dice.random() < 0.5:
        body["ignore_eos"] = True
    elif dice.random() < 0.3:
        body["min_tokens"] = dice.randrange(1, body["max_tokens"] + 1)
    if dice.random() < 0.25:
        body["stop"] = dice.sample([" the", "ing", "\n\n", ". ", "er", " and a"], k=2)
    prompt = _prompt(dice, prefixes, longest_words)
    chat = dice.random() < 0.4
    if dice.random() < 0.6:
        body |= {"logprobs": True, "top_logprobs": dice.choice((0, 3))} if chat else {"logprobs": dice.choice((1, 4))}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return ChatOrCompletion(f"request {index}", "/v1/chat/completions" if chat else "/v1/completions", body)


def _sampling(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.35:
        greedy: dict[str, Any] = {"temperature": 0}
        return greedy | ({"repetition_penalty": 1.2} if dice.random() < 0.3 else {})
    values: dict[str, Any] = {"temperature": dice.choice((0.5, 0.8, 1.0, 1.3))}
    values |= dice.choice(
        (
            {},
            {"top_p": 0.9, "top_k": 50},
            {"min_p": 0.05},
            {"frequency_penalty": 0.5, "presence_penalty": 0.4},
            {"repetition_penalty": 1.15, "frequency_penalty": 0.3},
            {"logit_bias": {"260": -4.0, "30": 1.5}},
        )
    )
    return values


def _prompt(dice: random.Random, prefixes: list[str], longest_words: int) -> str:
    draw = dice.random()
    if draw < 0.35:
        return dice.choice(prefixes) + " " + _words(dice, dice.randrange(3, 40))
    if draw < 0.7:
        return _words(dice, dice.randrange(1, 12))
    if draw < 0.9:
        return _words(dice, dice.randrange(longest_words // 12, longest_words // 3) + 1)
    return _words(dice, dice.randrange(longest_words // 3, longest_words) + 1)


def _words(dice: random.Random, count: int) -> str:
    words = WORDS.split()
    return " ".join(dice.choice(words) for _ in range(count)).capitalize() + "."


POISON_ID = 319  # any token: it takes four of them in a row to kill an engine that was told to die of it
POISON_RUN = 40  # however a prompt is cut into steps, four come together


def poison_requests(seed: int, count: int, model: str) -> list[ChatOrCompletion]:
    """Requests that crash every engine made to crash by ``POISON_ID``."""
    dice = random.Random(f"poison {seed}")
    requests = []
    for index in range(count):
        prompt = [dice.randrange(100, 300) for _ in range(dice.choice((4, 40, 120)))] + [POISON_ID] * POISON_RUN
        body = {"model": model, "prompt": prompt, "seed": (seed << 8) + index, "max_tokens": 8, "stream": False}
        requests.append(ChatOrCompletion(f"poison {index}", "/v1/completions", body))
    return requests
