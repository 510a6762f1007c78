"""All cells of a run, one after the other: for each seed the calm answers once, then a cluster of every shape."""

import asyncio
from collections.abc import Callable
from typing import Any

from relay.chaos.cell import Cell
from relay.chaos.client import Outcome
from relay.chaos.kept import Kept
from relay.chaos.oracle import Calm, calm_outcomes
from relay.chaos.requests import draw_requests
from relay.chaos.server import MODEL_NAME
from relay.chaos.settings import CellResult, ChaosSettings


async def run_chaos(
    settings: ChaosSettings,
    say: Callable[[str], None],
    after: Callable[[list[CellResult], list[Calm]], None] = lambda cells, calm: None,
) -> tuple[list[CellResult], list[Calm]]:
    """The result of every cell, and what prefill and steps cost in every calm run; ``after`` is told all so far after every cell.
    Raises StartupError when a server does not start or is wrong without faults."""
    surprises: list[str] = []

    def surprised(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        surprises.append(f"{context.get('message', '')}: {context.get('exception')!r}")
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(surprised)
    kept = Kept(settings.keep, settings)
    cells: list[CellResult] = []
    costs: list[Calm] = []
    for seed in settings.seeds:
        found = {shape: kept.find(shape, seed) for shape in settings.shapes}
        requests = draw_requests(
            seed,
            settings.requests,
            MODEL_NAME,
            longest_words=settings.longest_words,
            longest_answer=settings.longest_answer,
        )
        expected: list[Outcome] = []
        cost = next((cell.calm for cell in found.values() if cell is not None), None)
        if None in found.values():
            expected, cost = await calm_outcomes(settings, requests, say)
        assert cost is not None
        costs.append(cost)
        for shape, earlier in found.items():
            if earlier is not None:
                cells.append(earlier.result)
                say(f"{shape.name} seed {seed}: kept from an earlier run")
                after(cells, costs)
                continue
            result = await Cell(settings, shape, seed, requests, expected, say).run()
            result.problems += [f"chaos itself: {text}" for text in surprises]
            surprises.clear()
            cells.append(result)
            kept.keep(shape, seed, result, cost)
            say(
                f"{shape.name} seed {seed}: {result.identical} of {result.requests} identical, {result.failed} failed, "
                f"{result.leaked} leaked, {sum(result.faults.values())} faults, {result.seconds:.0f} s"
            )
            after(cells, costs)
    return cells, costs
