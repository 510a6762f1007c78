"""Drives one scheduler and its runner over the hash backend, as an engine process would."""

from collections import deque
from dataclasses import dataclass, field

from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler, SchedulerLimits, SequenceUpdate
from relay.engine.step import StepPlan, StepResult
from relay.ids import SequenceKey
from relay.kernels.backend import LayerSink, SampledToken
from relay.protocol.messages import FinishReason, Work
from relay.protocol.sampling import SamplingParams
from tests.engine.hash_backend import HashBackend, program


def limits(**changes: int) -> SchedulerLimits:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16, "num_blocks": 64, "max_model_len": 256}
    return SchedulerLimits(**{**values, **changes})


def work(
    request: int, tokens: list[int], max_tokens: int = 8, *, num_prompt: int | None = None, choice: int = 0, **params
) -> Work:
    salt, capture, attempt = params.pop("salt", ""), params.pop("capture", False), params.pop("attempt", 1)
    return Work(
        request=request,
        choice=choice,
        attempt=attempt,
        token_ids=tokens,
        num_prompt=len(tokens) if num_prompt is None else num_prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),
        cache_salt=salt,
        capture=capture,
    )


def key_of(item: Work) -> SequenceKey:
    return SequenceKey(item.request, item.choice, item.attempt)


@dataclass
class Collected:
    """All that was reported of one sequence."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    failed: str | None = None
    cached_tokens: int = 0
    logit_digests: list[bytes] = field(default_factory=list)
    kv_digests: list[bytes] | None = None


class Engine:
    """One engine loop in three parts (``plan``, ``execute``, ``land``); ``run`` goes on until nothing is left.

    Invariants are checked after every part.
    """

    def __init__(
        self,
        bounds: SchedulerLimits,
        *,
        plan_ahead: bool = False,
        sink: LayerSink | None = None,
        poison: int | None = None,
    ):
        self.backend = HashBackend(poison)
        self.backend.allocate_kv(bounds.num_blocks, bounds.block_size)
        self.scheduler = Scheduler(bounds, "hash")
        self.runner = Runner(self.backend, program(), bounds)
        self.plan_ahead = plan_ahead
        self.sink: LayerSink | None = None
        self.planned: deque[StepPlan] = deque()
        self.executed: deque[StepResult] = deque()
        self.keys: deque[list[SequenceKey]] = deque()  # of the planned steps' rows
        self.plans: list[StepPlan] = []
        self.collected: dict[SequenceKey, Collected] = {}

    def plan(self) -> bool:
        """Plan one more step if the scheduler has one and fewer than two are in flight."""
        if len(self.planned) + len(self.executed) > 1:
            return False
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            return False
        self._check_plan(plan)
        self.planned.append(plan)
        self.plans.append(plan)
        self.keys.append([self.scheduler.key_of_slot(row.slot) for row in plan.rows])
        return True

    def execute(self) -> bool:
        """Run the oldest planned step."""
        if not self.planned:
            return False
        plan = self.planned.popleft()
        assert self.keys.popleft() == [self.scheduler.key_of_slot(row.slot) for row in plan.rows], (
            "a slot in flight was given away"
        )
        self.executed.append(self.runner.execute(plan, self.sink))
        return True

    def land(self) -> bool:
        """Give the oldest result to the scheduler."""
        if not self.executed:
            return False
        self.take(self.scheduler.update(self.executed.popleft()))
        self.scheduler.check()
        return True

    def step(self) -> bool:
        """Plan (one more where planning ahead), execute and land. False if there was nothing to do."""
        self.plan()
        if self.plan_ahead:
            self.plan()
        self.execute()
        return self.land()

    def _check_plan(self, plan: StepPlan) -> None:
        """No row writes a block that anybody else can read; slots and budget are respected."""
        bounds = self.scheduler.limits
        assert sum(row.count for row in plan.rows) == plan.num_tokens <= bounds.max_num_batched_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        decodes = [row.token_ids is None for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True), "a decode row comes after a prefill row"
        written: set[int] = {target for _, target in plan.block_copies}
        assert len(written) == len(plan.block_copies)
        assert not written & {source for source, _ in plan.block_copies}
        for row in plan.rows:
            table = self.scheduler.block_table(self.scheduler.key_of_slot(row.slot))
            blocks = table[row.start // bounds.block_size : (row.start + row.count - 1) // bounds.block_size + 1]
            assert all(block not in self.scheduler.space.cache for block in blocks), "a row writes a published block"
            assert all(self.scheduler.space.pool.references(block) == 1 for block in blocks), (
                "a row writes a shared block"
            )

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            mine = self.collected.setdefault(update.key, Collected())
            assert mine.finish is None, "an update after the finish"
            assert mine.failed is None, "an update after the failure"
            if update.tokens:
                mine.positions.append(update.position)
            mine.tokens += [token.token_id for token in update.tokens]
            mine.finish, mine.failed = update.finish, update.failed
            mine.cached_tokens += update.cached_tokens
            mine.logit_digests += update.logit_digests or []
            if update.block_table is not None:
                mine.kv_digests = self.runner.kv_digests(update.block_table, update.num_computed)

    def run(self, steps: int = 2000) -> None:
        while self.step():
            steps -= 1
            assert steps, "the engine does not come to an end"

    def serve(self, *items: Work) -> list[Collected]:
        for item in items:
            self.scheduler.add(item)
        self.run()
        return [self.collected[key_of(item)] for item in items]


def move(source: Engine, target: Engine, item: Work, first_token: SampledToken, cached_tokens: int) -> None:
    """Copy KV of positions ``cached_tokens``.. from P to D."""
    count = len(item.token_ids) - cached_tokens
    data = memoryview(bytearray(16 * count))
    for layer in range(2):
        if count:
            source.backend.read_kv(layer, source.scheduler.block_table(key_of(item)), cached_tokens, count, data)
            target.backend.write_kv(layer, target.scheduler.block_table(key_of(item)), cached_tokens, count, data)
    target.take(target.scheduler.activate(key_of(item), first_token))
