"""The four workloads of docs/benchmarks.md, as prompts of exact token counts made of single-token words."""

import random
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Workload:
    """``prompts`` sent at once, each answered with ``output_tokens`` tokens, EOS ignored."""

    name: str
    prompts: list[str]
    prompt_tokens: int
    output_tokens: int


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words (with their leading space) that are one token alone and next to each other."""
    words = []
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        word = tokenizer.decode([token_id])
        if (
            token.startswith("Ġ")
            and word.startswith(" ")
            and word[1:].isalpha()
            and word[1:].islower()
            and 4 < len(word) < 9
        ):
            words.append(word)
    return words


def prompt_of(words: list[str], tokens: int, rng: random.Random, tokenizer: Tokenizer) -> str:
    """A prompt of exactly ``tokens`` tokens."""
    text = "".join(rng.choice(words) for _ in range(tokens))
    count = len(tokenizer.encode(text, add_special_tokens=False).ids)
    if count != tokens:
        raise AssertionError(f"prompt has {count} tokens instead of {tokens}")
    return text


def workloads(tokenizer: Tokenizer, seed: int) -> list[Workload]:
    """W1 one stream 512/128; W2 16 x 256/64; W3 16 x (1,024 shared + 32)/32; W4 one prompt of 2,048 (TTFT)."""
    rng = random.Random(seed)
    words = single_token_words(tokenizer)

    def prompt(tokens: int) -> str:
        return prompt_of(words, tokens, rng, tokenizer)

    shared = prompt(1024)
    return [
        Workload("W1", [prompt(512)], 512, 128),
        Workload("W2", [prompt(256) for _ in range(16)], 256, 64),
        Workload("W3", [shared + prompt(32) for _ in range(16)], 1056, 32),
        Workload("W4", [prompt(2048)], 2048, 4),
    ]
