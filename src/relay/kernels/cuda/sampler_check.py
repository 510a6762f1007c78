"""A start-up test of the device's draws against the numpy definition, so that no compiler or driver can change a token unseen."""

import torch

from relay.errors import StartupError
from relay.kernels.cuda.sampler import SamplerScratch, SamplerTables, sample_rows
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


def check_draws(device: str, rounds: int = 4) -> None:
    """Raises StartupError where a draw on the device is not the definition's."""
    generator = torch.Generator().manual_seed(1)
    params = kinds()
    rows = len(params)
    tables, scratch = SamplerTables(rows, device), SamplerScratch(rows, _VOCAB, device)
    drawn = torch.zeros(rows, 2, dtype=torch.int32, device=device)
    index = torch.arange(rows, dtype=torch.int32, device=device)
    for turn in range(rounds):
        logits = (torch.randn(rows, _VOCAB, generator=generator) * (1.5 + turn)).to(torch.bfloat16)
        if turn % 2:
            logits = (logits * 2).round() / 2  # few values: many ties at every limit
        logits[:, 17:40] = float("-inf")
        states = [SlotState(kind, row, [1] * (turn + 1)) for row, kind in enumerate(params)]
        for row, kind in enumerate(params):
            tables.set(row, kind, row, 1)
        positions = torch.full((rows,), turn, dtype=torch.int32, device=device)
        sample_rows(logits.to(device), positions, index, index, tables, scratch, drawn, True)
        got = drawn.cpu().tolist()
        want = [[draw(logits[row].float().numpy(), states[row], row).token_id, 0] for row in range(rows)]
        if got != want:
            wrong = [row for row in range(rows) if got[row] != want[row]]
            raise StartupError(
                f"draws on {device} differ from the definition for {params[wrong[0]]}: {got[wrong[0]]} {want[wrong[0]]}"
            )
