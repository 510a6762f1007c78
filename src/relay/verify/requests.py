"""The requests of ``relay verify``: greedy and sampled, short and long, shared prefixes, every sampling parameter."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from relay.protocol.sampling import SamplingParams

STORY = (
    "The lighthouse keeper had counted ships for thirty years, and in all that time no two evenings had been the same. "
    "Some nights the fog came in so thick that he could hear the bells before he saw a single lamp; on others the sea lay flat "
    "as slate and every mast on the horizon drew its own thin line. He wrote the names down in a ledger bound with tarred cloth, "
    "together with the hour, the wind and the number of gulls on the eastern rail. When the harbour master asked him why the "
    "gulls mattered, he answered that nothing which can be counted is quite without meaning, and went back to his lamp. "
)
MANUAL = (
    "To replace the filter, close the main valve and wait until the pressure gauge reads zero. Unscrew the housing with the "
    "supplied wrench, turning it against the clock. Remove the old cartridge, rinse the housing with water, inspect the seal for "
    "cracks. If the seal is damaged, replace it before you continue. Insert the new cartridge with the arrow pointing towards the "
    "outlet, screw the housing back on by hand, and open the valve slowly while you watch for leaks. "
)
QUESTIONS = [
    "What did the keeper write in his ledger?",
    "Why do you have to wait until the gauge reads zero?",
    "List three things that the keeper counted.",
    "Write a short poem about the harbour at night.",
]


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One request of the set. ``shared`` marks prompts that begin with the same long prefix."""

    name: str
    token_ids: list[int]
    params: SamplingParams
    n: int = 1
    shared: bool = False


def verify_requests(
    encode: Callable[[str], list[int]], eos: tuple[int, ...], max_model_len: int, *, quick: bool
) -> list[VerifyRequest]:
    """The set for a model: token ids by ``encode``, prompts cut to leave room for their answers in ``max_model_len``.

    ``quick`` keeps the prompts short and the answers shorter.
    """
    output = 12 if quick else 32
    repeats = 1 if quick else 4

    def params(**fields: object) -> SamplingParams:
        defaults = {"max_tokens": output, "temperature": 0.0, "seed": 7, "eos_token_ids": eos}
        return SamplingParams(**{**defaults, **fields})  # type: ignore[arg-type]

    story, manual = STORY * repeats, MANUAL * repeats
    short = encode("The capital of France is")
    some_id = encode(" the")[0]
    sampled = [
        ("sampled", params(temperature=0.9, seed=11)),
        ("top-k top-p", params(temperature=1.1, top_k=50, top_p=0.9, seed=12)),
        ("min-p", params(temperature=1.3, min_p=0.05, seed=13)),
        (
            "penalties",
            params(temperature=0.7, frequency_penalty=0.5, presence_penalty=0.4, repetition_penalty=1.1, seed=14),
        ),
        ("bias logprobs", params(temperature=0.8, logit_bias={some_id: -5.0}, logprobs=3, seed=15)),
    ]
    requests = [
        VerifyRequest("greedy one word", encode("Hello")[:1], params(eos_token_ids=())),
        VerifyRequest("greedy short", short, params()),
        VerifyRequest("greedy long", encode(story + manual + QUESTIONS[3]), params()),
        VerifyRequest("greedy penalties", encode(manual), params(repetition_penalty=1.3, presence_penalty=0.2)),
        VerifyRequest("min tokens", encode(QUESTIONS[0]), params(min_tokens=output // 2)),
        VerifyRequest("one token answer", encode(MANUAL), params(max_tokens=1)),
        VerifyRequest("two choices", encode(QUESTIONS[3]), params(temperature=1.0, seed=21), n=2),
    ]
    requests += [VerifyRequest(name, encode(QUESTIONS[i % 4] + " " + MANUAL), p) for i, (name, p) in enumerate(sampled)]
    requests += [
        VerifyRequest(
            f"shared prefix {i}", encode(story + question), params(temperature=0.6 * (i % 2), seed=30 + i), shared=True
        )
        for i, question in enumerate(QUESTIONS)
    ]
    return [replace(r, token_ids=r.token_ids[: max_model_len - r.params.max_tokens]) for r in requests]
