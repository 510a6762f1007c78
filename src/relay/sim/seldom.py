"""Counts how often runs come through corners of the production cores that no counter of theirs tells of."""

from collections.abc import Callable
from typing import Any

from relay.control.attempts import Attempt
from relay.control.core import GatewayCore
from relay.control.workers import Worker
from relay.engine.scheduler import Scheduler
from relay.ids import SequenceKey
from relay.protocol.messages import TokenEntry, Work
from relay.sim.kernel import Kernel
from relay.worker.core import WorkerCore
from relay.worker.held import Held

BLOCK_ADOPTED = "a block published meanwhile is adopted"
ORPHANS_OF_ONE_KEY = "two orphans of one key on one worker"
ORPHAN_SUPERSEDES = "an orphan is taken over in place of an older attempt"
PARTLY_KNOWN = "a part of an entry with logprobs was known"


def watch_engine(kernel: Kernel, scheduler: Scheduler, core: WorkerCore) -> None:
    orphans, held, custody = core.orphans, core.held, core._custody

    def of_one_key(leaving: Held, until_ns: int) -> bool:
        return leaving.log is not None and (leaving.work.resume_key, leaving.work.choice) in orphans._all

    def supersedes(gateway: int, work: Work, name: SequenceKey) -> bool:
        orphan, before = orphans.find(work), held.attempt(name.request, name.choice)
        return orphan is not None and before is not None and before is not orphan.held

    _watch(kernel, scheduler.space, "adopt", BLOCK_ADOPTED, lambda *arguments: True)
    _watch(kernel, orphans, "add", ORPHANS_OF_ONE_KEY, of_one_key)
    _watch(kernel, custody, "adopt", ORPHAN_SUPERSEDES, supersedes)


def watch_gateway(kernel: Kernel, core: GatewayCore) -> None:
    def partly_known(attempt: Attempt, worker: Worker, entry: TokenEntry, now_ns: int) -> bool:
        known = len(attempt.choice.committed) - entry.position
        return entry.logprobs is not None and 0 < known < len(entry.token_ids)

    _watch(kernel, core._tokens, "_trim", PARTLY_KNOWN, partly_known)


def _watch(kernel: Kernel, owner: object, method: str, name: str, seldom: Callable[..., bool]) -> None:
    """Count ``name`` whenever ``owner.method`` is called with arguments that ``seldom`` is true of."""
    original = getattr(owner, method)

    def watched(*arguments: Any) -> Any:
        if seldom(*arguments):
            kernel.sometimes(name)
        return original(*arguments)

    setattr(owner, method, watched)
