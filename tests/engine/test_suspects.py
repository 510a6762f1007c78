"""Sequences that may be what kills engines: their rows before ``solo_until`` share neither step nor pipeline with others."""

import pytest

from relay.engine.scheduler import SequenceUpdate
from relay.ids import SequenceKey
from relay.protocol.messages import Work
from tests.engine.driver import Engine, key_of, limits, work
from tests.engine.hash_backend import oracle


def suspect(request: int, tokens: list[int], solo_until: int, max_tokens: int = 8) -> Work:
    item = work(request, tokens, max_tokens)
    item.solo_until = solo_until
    return item


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7 + i * i) % 50 for i in range(length)]


class Watching(Engine):
    """Asserts at every plan that suspects are alone; keeps the order of ends."""

    def __init__(self, *arguments, **values) -> None:
        super().__init__(*arguments, **values)
        self.works: dict[SequenceKey, Work] = {}
        self.finished: list[int] = []
        self.solo_steps = 0
        self.last_alone = False

    def watch(self, *items: Work) -> "Watching":
        self.works.update({key_of(item): item for item in items})
        self.serve(*items)
        return self

    def plan(self) -> bool:
        beside_a_suspect = self.last_alone and len(self.planned) + len(self.executed) == 1
        if not super().plan():
            return False
        alone = self.last_alone = self._alone(self.plans[-1], self.keys[-1])
        self.solo_steps += alone
        if alone:
            assert len(self.plans[-1].rows) == 1, "a suspect's row is not alone in its step"
            assert len(self.planned) + len(self.executed) == 1, "a suspect's step begins with another in flight"
        assert not beside_a_suspect, "a step begins beside a suspect's"
        return True

    def _alone(self, plan, keys: list[SequenceKey]) -> bool:
        return any(row.start < self.works[key].solo_until for row, key in zip(plan.rows, keys, strict=True))

    def take(self, updates: list[SequenceUpdate]) -> None:
        super().take(updates)
        self.finished += [update.key.request for update in updates if update.finish]


@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("chunk", [16, 64])
def test_suspects_run_alone_and_everybody_runs_exactly(plan_ahead: bool, chunk: int) -> None:
    items = [work(1, prompt(1, 40), 12), suspect(2, prompt(2, 70), 75, 12), work(3, prompt(3, 20), 12)]
    items += [suspect(4, prompt(4, 33), 33, 4), work(5, prompt(2, 70), 6)]
    engine = Watching(limits(max_num_batched_tokens=chunk), plan_ahead=plan_ahead).watch(*items)
    for key, item in engine.works.items():
        tokens, finish, *_ = oracle(item.token_ids, item.num_prompt, item.params, item.choice, 256)
        assert engine.collected[key].tokens == tokens
        assert engine.collected[key].finish == finish
    assert engine.solo_steps >= 5 + 5 if chunk == 16 else engine.solo_steps >= 2 + 5 + 1
    assert not engine.scheduler.has_work()


def test_a_suspect_without_blocks_is_not_overtaken_for_ever() -> None:
    items = [work(1, prompt(1, 60), 8), suspect(2, prompt(2, 80), 80, 4)]
    items += [work(number, prompt(number, 60), 8) for number in range(3, 9)]
    engine = Watching(limits(num_blocks=8, max_num_seqs=2, max_model_len=128)).watch(*items)
    assert engine.finished.index(2) <= 2
    assert len(engine.finished) == len(items)


def test_reserved_and_handed_off_suspects_hold_nobody_up() -> None:
    """Their rows are over or not due, though ``solo_until`` is ahead of what they have."""
    engine = Watching(limits(), plan_ahead=True)
    reserved, held = suspect(1, prompt(1, 20), 60), suspect(2, prompt(2, 20), 60)
    engine.works = {key_of(item): item for item in (reserved, held)}
    assert engine.scheduler.reserve(reserved)
    engine.scheduler.add(held, prefill_only=True)
    engine.run()
    other = work(3, prompt(3, 20), 6)
    engine.works[key_of(other)] = other
    engine.scheduler.add(other)
    depth = 0
    while engine.plan() or engine.planned:
        engine.plan()
        depth = max(depth, len(engine.planned))
        engine.execute()
        engine.land()
    assert engine.finished == [3]
    assert depth == 2, "nobody plans ahead any more"
