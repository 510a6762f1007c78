"""All cells of a run, one after the other: for each seed the calm answers once, then a cluster of every shape."""

import asyncio
from collections.abc import Callable
from typing import Any

from relay.chaos.cell import Cell
from relay.chaos.oracle import Calm, calm_outcomes
from relay.chaos.requests import draw_requests
from relay.chaos.server import MODEL_NAME
from relay.chaos.settings import CellResult, ChaosSettings


async def run_chaos(settings: ChaosSettings, say: Callable[[str], None]) -> tuple[list[CellResult], Calm | None]:
    """Raises StartupError when a server does not start or is wrong without faults."""
    surprises: list[str] = []

    def surprised(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        surprises.append(f"{context.get('message', '')}: {context.get('exception')!r}")
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(surprised)
    cells: list[CellResult] = []
    calm: Calm | None = None
    for seed in settings.seeds:
        requests = draw_requests(seed, settings.requests, MODEL_NAME, longest_words=settings.longest_words)
        expected, cost = await calm_outcomes(settings, requests, say)
        calm = calm or cost
        for shape in settings.shapes:
            result = await Cell(settings, shape, seed, requests, expected, say).run()
            result.problems += [f"chaos itself: {text}" for text in surprises]
            surprises.clear()
            cells.append(result)
            say(
                f"{shape.name} seed {seed}: {result.identical} of {result.requests} identical, {result.failed} failed, "
                f"{result.leaked} leaked, {sum(result.faults.values())} faults, {result.seconds:.0f} s"
            )
    return cells, calm
