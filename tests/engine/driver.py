"""Drives one scheduler and its runner over the hash backend, as an engine process would."""

from collections import deque
from dataclasses import dataclass, field

from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler, SchedulerLimits, SequenceUpdate
from relay.engine.step import StepPlan
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
    """``step()`` does one thing an engine loop does; ``run()`` repeats it until nothing is left. Checks invariants throughout."""

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
        self.plans: list[StepPlan] = []
        self.collected: dict[SequenceKey, Collected] = {}

    def step(self) -> bool:
        """Plan, run and take one step; with plan-ahead the next one is planned before. False if there was nothing to do."""
        while len(self.planned) < (2 if self.plan_ahead else 1):
            plan = self.scheduler.plan()
            self.scheduler.check()
            if plan is None:
                break
            self.planned.append(plan)
            self.plans.append(plan)
        if not self.planned:
            return False
        result = self.runner.execute(self.planned.popleft(), self.sink)
        self.take(self.scheduler.update(result))
        self.scheduler.check()
        return True

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
