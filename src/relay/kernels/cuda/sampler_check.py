"""A start-up test of the device's draws against the numpy definition, so that no compiler or driver can change a token unseen."""

from typing import Any

import torch

from relay.errors import StartupError
from relay.kernels.backend import SampledToken
from relay.kernels.cuda.drawing import Mode, Sampler
from relay.kernels.cuda.logprobs import HEAD, with_logprobs
from relay.kernels.cuda.sampler_tables import SamplerTables
from relay.kernels.cuda.step import Step
from relay.kernels.sampler import SlotState, draw
from relay.protocol.sampling import SamplingParams

_VOCAB = 5000


def kinds() -> list[SamplingParams]:
    """Parameters that together use every path of the device's sampler."""
    return [
        SamplingParams(max_tokens=1, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, seed=seed)
        for seed, (temperature, min_p, top_k, top_p) in enumerate(
            [
                (0.0, 0.0, 0, 1.0),
                (1.0, 0.0, 0, 1.0),
                (0.7, 0.05, 0, 1.0),
                (0.8, 0.0, 40, 1.0),
                (1.0, 0.0, 0, 0.9),
                (1.3, 0.0, 50, 0.5),
                (2.5, 0.01, 3, 0.99),
                (1.0, 0.0, 1, 1.0),
                (1.0, 0.0, 4999, 1e-6),
                (0.6, 0.2, 6000, 0.95),
                (1.7, 0.0, 0, 0.0),
                (1.0, 0.0, 700, 0.999),
            ],
            start=0x0123456789ABCDEF,
        )
    ]


def wide_kinds() -> list[SamplingParams]:
    """Penalties, biases, masks and log-probabilities, with and without limits."""
    common: dict[str, Any] = {"max_tokens": 40, "seed": 0xFEDCBA9876543210}
    bias = {index * 7: (-1.0) ** index * (index % 23) for index in range(300)}
    return [
        SamplingParams(**common, temperature=0.0, repetition_penalty=1.7, logprobs=0),
        SamplingParams(**common, temperature=0.8, frequency_penalty=0.9, presence_penalty=-0.4, top_k=40, top_p=0.8),
        SamplingParams(**common, temperature=1.2, repetition_penalty=0.6, presence_penalty=0.7, top_p=0.5, min_p=1e-4),
        SamplingParams(**common, temperature=0.9, logit_bias=bias, top_k=3, logprobs=5),
        SamplingParams(**common, temperature=1.0, logit_bias={3: 100.0, _VOCAB + 1: 5.0}, logprobs=2),
        SamplingParams(**common, temperature=0.0, min_tokens=30, eos_token_ids=tuple(range(0, _VOCAB, 2)), logprobs=1),
        SamplingParams(
            **common,
            temperature=0.7,
            min_tokens=3,
            stop_token_ids=tuple(range(40, 90)),
            logit_bias={41: 9.0},
            top_p=0.9,
        ),
        SamplingParams(**common, temperature=1.0, frequency_penalty=0.3, top_k=1, logprobs=20),
    ]


def check_draws(device: str, rounds: int = 4, dtype: torch.dtype = torch.bfloat16, vocab: int = _VOCAB) -> None:
    """Raises StartupError where a draw on the device is not the definition's. Compiles all that draws of ``vocab`` need."""
    generator = torch.Generator().manual_seed(1)
    plain = kinds()
    every = plain[4:6] + wide_kinds()
    unpenalised = [params for params in every if not params.has_penalties]  # before the first, no counts are kept
    wide = Mode(limits=True, wide=True, logprobs=20)
    for turn in range(rounds):
        logits = (torch.randn(len(plain), vocab, generator=generator) * (1.5 + turn)).to(dtype)
        if turn % 2:
            logits = (logits * 2).round() / 2  # few values: many ties at every limit
        logits[:, 17:40] = float("-inf")
        for params, mode in ((plain, Mode(limits=True)), (every, wide), (unpenalised, wide)):
            rows = len(params)
            states = [SlotState(kind, row, [1, 5] * (turn + 1), [5, 45, 46, 5]) for row, kind in enumerate(params)]
            got = _drawn(logits[:rows].to(device), states, mode)
            want = [draw(logits[row].float().numpy(), states[row], row) for row in range(rows)]
            if got != want:
                wrong = next(row for row in range(rows) if got[row] != want[row])
                raise StartupError(
                    f"draws on {device} differ from the definition for {params[wrong]}: {got[wrong]} {want[wrong]}"
                )


def _drawn(logits: torch.Tensor, states: list[SlotState], mode: Mode) -> list[SampledToken]:
    """One token for each row of ``logits``, drawn by the device for fresh slots that are as ``states``."""
    device, rows = str(logits.device), len(states)
    tables = SamplerTables(rows, device)
    sampler = Sampler(rows, logits.shape[1], device, tables)
    for row, state in enumerate(states):
        sampler.bind_state(row, state)
    tables.flush()
    index = torch.arange(rows, dtype=torch.int32, device=device)
    positions = torch.tensor([state.position - 1 for state in states], dtype=torch.int32, device=device)
    step = Step(
        rows, rows, index, positions, index, index, index.view(-1, 1), index, index, index, index, index.view(-1, 1), 1
    )
    details = sampler.draw(logits, step, mode)
    drawn = sampler.drawn.tolist()
    wanted = sampler.logprobs_of(list(range(rows)))
    found = [SampledToken(-1 if flags else token) for token, flags in drawn]
    if details is None:
        return found
    host = details.cpu().numpy()
    most = (host.shape[1] - HEAD) // 2
    return [
        token if wanted[row] < 0 else with_logprobs(token.token_id, wanted[row], host[row], most)
        for row, token in enumerate(found)
    ]
