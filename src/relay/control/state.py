"""The gateway's whole state, shared by the parts of the core, and the commands collected during one event."""

from collections import Counter
from collections.abc import Sequence

from relay.control.breaker import Breakers
from relay.control.budget import TokenBucket
from relay.control.commands import Command
from relay.control.contract import ModelInfo
from relay.control.queue import WaitQueue
from relay.control.requests import Choice, Request
from relay.control.story import Story
from relay.control.transitions import WorkerState
from relay.control.workers import Worker
from relay.control_config import ControlConfig
from relay.ids import WorkerKey, first_id
from relay.protocol.messages import Role

LIVE = (WorkerState.READY, WorkerState.DRAINING)


class ClusterState:
    """Requests, workers, queue and counters. Holds no logic beyond look-ups."""

    def __init__(self, config: ControlConfig, model: ModelInfo, slots: Sequence[tuple[str, Role]]) -> None:
        self.config = config
        self.model = model
        self.workers: dict[str, Worker] = {worker: Worker(worker, role) for worker, role in slots}
        self.requests: dict[int, Request] = {}
        self.queue = WaitQueue()
        self.story = Story(config.story_entries)
        self.commands: list[Command] = []
        self.counters: Counter[str] = Counter()
        self.breakers = Breakers(config.breaker, list(self.workers))
        self.hedge_budget = TokenBucket(config.hedge.budget_per_mille, config.hedge.burst_tokens)
        retry = config.retry
        self.retry_budget = TokenBucket(
            retry.budget_per_mille, retry.budget_burst_tokens, per_second=retry.budget_tokens_per_s, full=True
        )
        self.resumes_wait_until_ns = 0  # the retry budget is used up until then
        self.alarm = ""  # the last disagreement of workers: health tells it until the gateway restarts
        self.next_transfer = first_id(config.epoch)
        self.parked: dict[Choice, None] = {}  # whose KV waits on P for room on D
        self.rollout: list[str] = []  # workers still to be restarted, in order; the first may be on its way
        self.rollout_problem = ""  # why the last rolling restart ended early
        self.was_complete = config.was_complete
        self.draining = False
        self.stopped = False
        self.changed = False  # something happened that may let a waiting choice go
        self.no_worker_since_ns: int | None = None

    def current(self, key: WorkerKey) -> Worker | None:
        """The worker of ``key`` if that incarnation is the present, unfenced one."""
        worker = self.workers.get(key.worker)
        if worker is None or worker.incarnation != key.incarnation:
            return None
        return None if worker.state in (WorkerState.LOST, WorkerState.STOPPED) else worker

    def ready_workers(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.state is WorkerState.READY]

    def last_of_their_kind(self) -> list[Worker]:
        """Workers that leave by order and still take streams begun with their numerics, which no ready worker has."""
        ready = [worker.numerics_id for worker in self.ready_workers()]
        return [
            worker
            for worker in self.workers.values()
            if worker.state is WorkerState.DRAINING and not worker.refuses and worker.numerics_id not in ready
        ]

    def coming(self, worker: Worker) -> bool:
        """Not ready, but on its way (back) and not in a crash loop."""
        if worker.gave_up or worker.failures >= self.config.restart.crash_loop_failures:
            return False
        if worker.stay_out:
            return False
        return worker.state in (WorkerState.STARTING, WorkerState.LOST, WorkerState.DRAINING)
