"""Random histories of two engines, every token compared with the plain oracle."""

import os
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from relay.engine.scheduler import SchedulerLimits
from relay.ids import SequenceKey
from relay.kernels.backend import SampledToken
from relay.protocol.messages import Work
from tests.engine.driver import Engine, key_of, move, work
from tests.engine.hash_backend import oracle


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


POISON = 77
PREFIXES = [[(i * k) % 50 for i in range(100)] for k in (1, 1, 3)]  # the first two are equal
MAX_MODEL_LEN = 160


class Histories(RuleBasedStateMachine):
    """Two engines, P and D; both also run work of their own. Everything an engine process may do, at any moment."""

    @initialize(
        block_size=st.sampled_from([16, 16, 32, 64]),
        seats=st.integers(1, 6),
        budget=st.sampled_from([3, 16, 24, 64, 200]),
        spare_tokens=st.sampled_from([0, 64, 300, 2000]),
        growth=st.sampled_from([0, 0, 20]),
    )
    def start(self, block_size: int, seats: int, budget: int, spare_tokens: int, growth: int) -> None:
        num_blocks = -(-(MAX_MODEL_LEN + spare_tokens) // block_size)
        self.bounds = SchedulerLimits(seats, budget, block_size, num_blocks, MAX_MODEL_LEN, growth_tokens=growth)
        self.engines = [Engine(self.bounds, poison=POISON), Engine(self.bounds, poison=POISON)]
        self.requests = 0
        self.work: dict[tuple[int, SequenceKey], Work] = {}  # by engine
        self.cancelled: set[tuple[int, SequenceKey]] = set()
        self.reserved: dict[SequenceKey, int] = {}  # on D → cached tokens
        self.injected = [False, False]

    prompts = st.tuples(st.integers(0, 2), st.integers(0, 100), st.lists(st.integers(0, 49), min_size=1, max_size=20))
    lengths = st.integers(1, 30)
    which = st.integers(0, 1)

    def _work(self, prompt, max_tokens: int, committed: int, choices: int) -> list[Work]:
        prefix, length, suffix = prompt
        tokens = PREFIXES[prefix][:length] + suffix
        self.requests += 1
        items = []
        for choice in range(choices):
            stops = (tokens[0] % 50, 7) if max_tokens % 2 else ()
            extra = {"eos_token_ids": stops, "min_tokens": max_tokens % 5, "frequency_penalty": float(max_tokens % 3)}
            item = work(self.requests, tokens, max_tokens, choice=choice, seed=max_tokens, capture=True, **extra)
            done = oracle(tokens, len(tokens), item.params, choice, MAX_MODEL_LEN)[0][:-1][:committed]
            item.token_ids = tokens + done
            items.append(item)
        return items

    @rule(
        e=which,
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        committed=st.sampled_from([0, 0, 3, 25]),
        choices=st.integers(1, 3),
    )
    def add(self, e: int, prompt, max_tokens: int, committed: int, choices: int) -> None:
        for item in self._work(prompt, max_tokens, committed, choices):
            self.engines[e].scheduler.add(item)
            self.work[e, key_of(item)] = item

    @rule(e=which)
    def add_poison(self, e: int) -> None:
        self.requests += 1
        item = work(self.requests, [1, 2, POISON], 3)
        self.engines[e].scheduler.add(item)
        self.work[e, key_of(item)] = item

    @rule(prompt=prompts, max_tokens=lengths, committed=st.sampled_from([0, 0, 5]))
    def split(self, prompt, max_tokens: int, committed: int) -> None:
        """D reserves; if it has room, P prefills."""
        (item,) = self._work(prompt, max_tokens, committed, 1)
        reservation = self.engines[1].scheduler.reserve(item)
        self.engines[1].scheduler.check()
        if reservation is None:
            return
        key = key_of(item)
        assert reservation.block_table == self.engines[1].scheduler.block_table(key)
        self.reserved[key] = reservation.cached_tokens
        self.work[1, key] = self.work[0, key] = item
        self.engines[0].scheduler.add(item, prefill_only=True)

    @rule(pick=st.integers(0, 50))
    def hand_off(self, pick: int) -> None:
        ready = [key for key in self.reserved if self._first_token(key) is not None]
        if ready:
            self._hand_off(ready[pick % len(ready)])

    def _first_token(self, key: SequenceKey) -> int | None:
        got = self.engines[0].collected.get(key)
        return got.tokens[0] if got is not None and got.tokens and (0, key) not in self.cancelled else None

    def _hand_off(self, key: SequenceKey) -> None:
        source, target = self.engines
        first = self._first_token(key)
        assert first is not None
        move(source, target, self.work[1, key], SampledToken(first), self.reserved.pop(key))
        source.scheduler.release(key)
        source.scheduler.release(key)
        source.scheduler.check()
        target.scheduler.check()

    @rule(e=which, pick=st.integers(0, 50))
    def cancel(self, e: int, pick: int) -> None:
        keys = [key for engine, key in self.work if engine == e]
        if not keys:
            return
        key = keys[pick % len(keys)]
        self.engines[e].scheduler.cancel(key)
        self.engines[e].scheduler.check()
        self.cancelled.add((e, key))
        if e == 1:
            self.reserved.pop(key, None)

    @rule(e=which, late=st.booleans())
    def inject(self, e: int, late: bool) -> None:
        """The next step raises; a row alone is blamed for it, others must not notice."""
        setattr(self.engines[e].backend, "raises_late" if late else "raises", 1)
        self.injected[e] = True

    @rule(e=which)
    def plan(self, e: int) -> None:
        self.engines[e].plan()

    @rule(e=which)
    def execute(self, e: int) -> None:
        self.engines[e].execute()

    @rule(e=which)
    def land(self, e: int) -> None:
        self.engines[e].land()
        self._check_prefixes()

    @rule(e=which, steps=st.integers(1, 20))
    def several(self, e: int, steps: int) -> None:
        for _ in range(steps):
            self.engines[e].plan()
            self.engines[e].execute()
            self.engines[e].land()

    # --- what must hold

    def _expected(self, item: Work) -> tuple[list[int], str, list[bytes], list[bytes]]:
        outputs, finish, rows, units = oracle(item.token_ids, item.num_prompt, item.params, item.choice, MAX_MODEL_LEN)
        return outputs[len(item.token_ids) - item.num_prompt :], finish, rows, units

    def _check_prefixes(self) -> None:
        for (e, key), item in self.work.items():
            got = self.engines[e].collected.get(key)
            if got is not None and got.tokens:
                outputs = self._expected(item)[0]
                skip = 1 if e == 1 and self._is_split(key) else 0  # P reported D's first token
                assert got.tokens == outputs[skip : skip + len(got.tokens)]
                committed = len(item.token_ids) - item.num_prompt + skip
                assert got.positions == list(range(committed, committed + len(got.tokens)))

    def _is_split(self, key: SequenceKey) -> bool:
        return (0, key) in self.work and (1, key) in self.work

    def teardown(self) -> None:
        """Heal, let everything finish, then nothing may be held and every request must have its exact end."""
        if not hasattr(self, "engines"):
            return
        for engine in self.engines:
            engine.backend.raises = engine.backend.raises_late = 0
            while engine.execute() or engine.land():
                pass
        moved = True
        while moved:
            for engine in self.engines:
                engine.run()
            moved = False
            for key in list(self.reserved):
                moved = True
                if self._first_token(key) is not None:
                    self._hand_off(key)
                elif (0, key) in self.cancelled or key in self.engines[0].collected:
                    del self.reserved[key]
                    self.cancelled.add((1, key))
                    self.engines[1].scheduler.cancel(key)
            for engine, key in list(self.cancelled):
                if engine == 1 and (0, key) in self.work:  # P learns that nobody takes its blocks
                    moved |= (0, key) not in self.cancelled
                    self.engines[0].scheduler.release(key)
                    self.cancelled.add((0, key))
        self._check_prefixes()
        for (e, key), item in self.work.items():
            if (e, key) not in self.cancelled:
                self._check_end(e, key, item)
            self.engines[e].scheduler.cancel(key)
        for engine in self.engines:
            engine.scheduler.check()
            assert engine.scheduler.load().kv_used == 0, "blocks are held by nobody"
            assert not engine.scheduler.has_work()

    def _check_end(self, e: int, key: SequenceKey, item: Work) -> None:
        got = self.engines[e].collected[key]
        if POISON in item.token_ids:
            assert got.failed is not None
            assert "poison" in got.failed or "injected" in got.failed
            return
        if got.failed is not None:
            assert self.injected[e], got.failed
            assert "injected" in got.failed
            return
        outputs, finish, rows, units = self._expected(item)
        split = self._is_split(key)
        if split and e == 0:
            assert got.tokens == outputs[:1]
            assert got.finish == (finish if len(outputs) == 1 else None)
            return
        assert got.tokens == outputs[1 if split else 0 :]
        assert got.finish == finish
        assert got.kv_digests == [digest(unit) for unit in units]
        assert got.logit_digests == [digest(row) for row in rows[1 if split else 0 :]]


@pytest.mark.parametrize("profile", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_random_histories_end_exactly(profile: str) -> None:
    long = profile == "long"
    if long and not os.environ.get("RELAY_SLOW_TESTS"):
        pytest.skip("set RELAY_SLOW_TESTS to a number of long histories")
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=int(os.environ["RELAY_SLOW_TESTS"]) if long else 60,
            stateful_step_count=80 if long else 40,
            deadline=None,
            derandomize=not long,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if long else [Phase.generate],
        ),
    )
