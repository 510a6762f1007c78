"""How many seeds it takes to find planted bugs, on several cores. The answer does not depend on how many."""

from collections.abc import Callable, Sequence

from relay.sim.mutants import SEEDS, Mutant
from relay.sim.pool import Order, Pool
from relay.sim.run import Run

ROUND = 8  # seeds at once for each process


def hunt(
    mutants: Sequence[Mutant], jobs: int, told: Callable[[str, int | None], None], seeds: int = SEEDS
) -> dict[str, int | None]:
    """Name → seeds needed, None where ``seeds`` were not enough. ``told`` hears of each mutant as it is decided."""
    needed: dict[str, int | None] = {}
    with Pool(jobs) as pool:
        for mutant in mutants:
            needed[mutant.name] = _first(pool, mutant.name, jobs * ROUND, seeds)
            told(mutant.name, needed[mutant.name])
    return needed


def _first(pool: Pool, name: str, size: int, seeds: int) -> int | None:
    """Whole rounds are played, so the smallest seed that fails is found whoever was faster."""
    for first in range(0, seeds, size):
        failed: list[int] = []

        def done(order: Order, run: Run, failed: list[int] = failed) -> None:
            if run.failure is not None:
                failed.append(order.seed)

        orders = (Order(seed, mutant=name) for seed in range(first, min(first + size, seeds)) if not failed)
        pool.each(orders, done)
        if failed:
            return min(failed) + 1
    return None
