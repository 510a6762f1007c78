"""P4: on a real (tiny, random) model every way to the same tokens gives the same tokens, logits bits and KV bytes."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from relay.engine.runner import Runner
from relay.engine.scheduler import Reservation, Scheduler, SchedulerLimits, SequenceUpdate
from relay.engine.step import StepPlan
from relay.kernels.backend import Backend, SampledToken
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.perturbed import NudgedWeights
from relay.kernels.reference.backend import ReferenceBackend
from relay.kernels.reference.products import ChainProducts
from relay.protocol.messages import Work
from relay.protocol.sampling import SamplingParams
from tests.engine.driver import key_of
from tests.kernels.tiny_programs import Weights, build_program

PROGRAM = build_program()
WEIGHTS = Weights(PROGRAM)
LAYERS = PROGRAM.geometry.num_layers
GENERATOR = np.random.default_rng(5)
MODEL_LEN = 200
NUM_OUTPUT = 24


def prompt(length: int) -> list[int]:
    return GENERATOR.integers(0, PROGRAM.geometry.vocab, length).tolist()


GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 30.0, "top_k": 40, "top_p": 0.95, "seed": 3}
PENALTIES = {"temperature": 20.0, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "seed": 4}
SHARED = prompt(70)
PROMPTS = [(prompt(1), GREEDY), (prompt(15), SAMPLED), (SHARED + prompt(27), PENALTIES), (SHARED + prompt(58), GREEDY)]


def requests() -> list[Work]:
    return [
        Work(r, 0, 1, tokens, len(tokens), SamplingParams(max_tokens=NUM_OUTPUT, **params), capture=True)
        for r, (tokens, params) in enumerate(PROMPTS)
    ]


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    kv: list[bytes] = field(default_factory=list)


def make_backend(name: str) -> Backend:
    return CpuBackend(1, max_tokens=256, max_sampled=16) if name == "cpu" else ReferenceBackend(ChainProducts())


class Engine:
    """Scheduler, runner and one backend of the tiny model; free blocks hold NaN."""

    def __init__(self, backend: str, *, plan_ahead: bool = False, weights=WEIGHTS, **bounds: int) -> None:
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 16, "num_blocks": 64} | bounds
        self.limits = SchedulerLimits(**sizes, max_model_len=MODEL_LEN)
        self.backend = make_backend(backend)
        self.backend.load(PROGRAM, weights)
        self.backend.allocate_kv(self.limits.num_blocks, self.limits.block_size, "float32")
        self.scheduler = Scheduler(self.limits, "tiny")
        self.runner = Runner(self.backend, PROGRAM, self.limits)
        self.plan_ahead = plan_ahead
        self.outputs: dict[tuple, Output] = {}
        self.fill_with_nan()

    def fill_with_nan(self) -> None:
        tokens = self.limits.num_blocks * self.limits.block_size
        table = np.arange(self.limits.num_blocks, dtype=np.int32)
        nan = np.full(tokens * self.backend.kv_bytes_per_token_layer() // 4, np.nan, np.float32)
        for layer in range(LAYERS):
            self.backend.write_kv(layer, table, 0, tokens, memoryview(nan.tobytes()))

    def serve(self, items: list[Work]) -> list[Output]:
        for item in items:
            self.scheduler.add(item)
        self.run()
        return [self.outputs[key_of(item)] for item in items]

    def run(self) -> None:
        planned: deque[StepPlan] = deque()
        while True:
            while len(planned) < 1 + self.plan_ahead and (plan := self.scheduler.plan()) is not None:
                planned.append(plan)
            if not planned:
                return
            result = self.runner.execute(planned.popleft())
            assert result.error is None, result.error
            self.take(self.scheduler.update(result))
            self.scheduler.check()

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            output = self.outputs.setdefault(update.key, Output())
            output.tokens += [token.token_id for token in update.tokens]
            output.logits += update.logit_digests or []
            if update.finish is not None:
                output.kv = self.runner.kv_digests(update.block_table, update.num_computed)


@pytest.fixture(scope="module")
def alone() -> list[Output]:
    """Each request by itself, whole prompt in one step, on the CPU backend."""
    outputs = [Engine("cpu").serve([item])[0] for item in requests()]
    for (tokens, _), output in zip(PROMPTS, outputs, strict=True):
        assert len(output.tokens) == len(output.logits) == NUM_OUTPUT
        assert len(output.kv) == (len(tokens) + NUM_OUTPUT - 1) // 16
    assert len(set(outputs[1].tokens)) > 10, "the sampled request hardly samples"
    return outputs


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("budget", "plan_ahead"), [(8, True), (37, False), (64, True), (256, False)])
def test_batched_and_chunked(alone, block_size, budget, plan_ahead):
    engine = Engine("cpu", plan_ahead=plan_ahead, block_size=block_size, max_num_batched_tokens=budget, num_blocks=32)
    assert engine.serve(requests()) == alone


def test_prefix_hit(alone):
    engine = Engine("cpu")
    engine.serve(requests())
    before = engine.scheduler.load().counters["prefill_tokens"]
    again = requests()
    for item in again:
        item.attempt = 2
    assert engine.serve(again) == alone
    assert engine.scheduler.load().counters["prefill_tokens"] - before < 30


def test_copied_tail(alone):
    """Three equal requests at once: the last two copy what the first has computed of its last block."""
    engine = Engine("cpu", block_size=64)
    copies = [requests()[2] for _ in range(3)]
    for attempt, item in enumerate(copies):
        item.attempt = attempt
    assert engine.serve(copies) == [alone[2]] * 3
    assert engine.scheduler.load().counters["copied_blocks"] == 2


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_preempted(alone, plan_ahead):
    engine = Engine("cpu", plan_ahead=plan_ahead, num_blocks=11, growth_tokens=0)
    assert engine.serve(requests()) == alone
    assert engine.scheduler.load().counters["preemptions"] > 0


@pytest.mark.parametrize("committed", [1, 9, 23])
def test_resumed(alone, committed):
    resumed = requests()
    for item, whole in zip(resumed, alone, strict=True):
        item.token_ids = item.token_ids + whole.tokens[:committed]
    outputs = Engine("cpu", max_num_batched_tokens=48).serve(resumed)
    for output, whole in zip(outputs, alone, strict=True):
        assert output == Output(whole.tokens[committed:], whole.logits[committed:], whole.kv)


@pytest.mark.parametrize("target_block_size", [16, 64])
def test_split(alone, target_block_size):
    """P computes prompts and draws the first tokens; KV moves as bytes; D computes the rest, others running beside."""
    source = Engine("cpu", max_num_batched_tokens=50)
    target = Engine("cpu", plan_ahead=True, block_size=target_block_size, num_blocks=32)
    items = requests()
    reservations: list[Reservation] = []
    for item in items:
        reservation = target.scheduler.reserve(item)
        assert reservation is not None
        reservations.append(reservation)
        source.scheduler.add(item, prefill_only=True)
    source.run()
    for item, reservation in zip(items, reservations, strict=True):
        key = key_of(item)
        first, count = reservation.cached_tokens, len(item.token_ids) - reservation.cached_tokens
        data = memoryview(bytearray(count * source.backend.kv_bytes_per_token_layer()))
        for layer in range(LAYERS):
            source.backend.read_kv(layer, np.array(source.scheduler.block_table(key), np.int32), first, count, data)
            target.backend.write_kv(layer, np.array(reservation.block_table, np.int32), first, count, data)
        source.scheduler.release(key)
        target.take(target.scheduler.activate(key, SampledToken(source.outputs[key].tokens[0])))
    target.run()
    for item, whole in zip(items, alone, strict=True):
        drawn, rest = source.outputs[key_of(item)], target.outputs[key_of(item)]
        assert Output(drawn.tokens + rest.tokens, drawn.logits + rest.logits, rest.kv) == whole


def test_the_reference_backend_gives_the_same_bits():
    """It computes the canon in numpy, op by op; on every path its bits are the kernels'."""
    items = requests()[1:3]
    for item in items:
        item.params = SamplingParams(max_tokens=6, temperature=30.0, seed=item.request)
    expected = Engine("cpu").serve(items)
    assert Engine("reference", max_num_batched_tokens=24, plan_ahead=True).serve(items) == expected


def test_one_weight_one_ulp_off_is_seen(alone):
    """The test of these tests: digests part although the tokens may not."""
    outputs = Engine("cpu", weights=NudgedWeights(WEIGHTS, "0.norm1", coarse=False)).serve(requests())
    for output, whole in zip(outputs[1:], alone[1:], strict=True):
        assert output.logits != whole.logits
        assert output.kv != whole.kv
