"""A pure model of a worker for tests of the gateway's core: tokens are a hash of everything before them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from relay.ids import SequenceKey, WorkerKey
from relay.protocol.messages import (
    Accept,
    Cancel,
    ComputedRow,
    Drain,
    Hello,
    Load,
    Message,
    Prefill,
    Refuse,
    Reserve,
    Run,
    TokenEntry,
    Tokens,
    Work,
)
from relay.protocol.sampling import SamplingParams

VOCAB = 1000
STOP_EVERY = 29


def next_token(token_ids: list[int], params: SamplingParams, choice: int) -> int:
    text = f"{token_ids}|{params.seed}|{choice}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % VOCAB


def finish_of(token: int, generated: int, params: SamplingParams) -> str | None:
    if token % STOP_EVERY == 0 and generated >= params.min_tokens:
        return "stop"
    return "length" if generated >= params.max_tokens else None


def oracle(prompt: list[int], params: SamplingParams, choice: int) -> list[int]:
    """What an undisturbed run gives."""
    tokens: list[int] = []
    while True:
        tokens.append(next_token(prompt + tokens, params, choice))
        if finish_of(tokens[-1], len(tokens), params):
            return tokens


@dataclass
class Sequence:
    work: Work
    tokens: list[int]
    runnable: bool
    transfer: int = 0
    parks: bool = False  # ends with the first token, which is kept


@dataclass
class FakeWorker:
    """One life of one worker. ``out`` holds what it said and the gateway has not read yet."""

    key: WorkerKey
    role: str
    kv_blocks: int = 64
    block_size: int = 16
    max_num_seqs: int = 8
    alive: bool = True
    out: list[Message] = field(default_factory=list)
    sequences: dict[SequenceKey, Sequence] = field(default_factory=dict)
    prefills: dict[SequenceKey, Prefill] = field(default_factory=dict)
    draining: bool = False
    numerics: str = "numerics"

    def works(self) -> list[tuple[Work, int]]:
        """(work, position after the next step's last) of everything that computes."""
        found = [(s.work, s.work.num_prompt + len(s.tokens)) for s in self.sequences.values() if s.runnable]
        return found + [(order.work, len(order.work.token_ids)) for order in self.prefills.values()]

    def manifest(self, guilty: Callable[[Work], bool]) -> tuple[list[ComputedRow], bool]:
        """The step that a row of a ``guilty`` work is in: alone if it is suspected, else with all others that are not."""
        works = self.works()
        alone = [row for row in works if row[0].solo_until >= row[1] and guilty(row[0])][:1]
        rows = alone or [row for row in works if row[0].solo_until < row[1]]
        named = [ComputedRow(work.request, work.choice, work.attempt, end) for work, end in rows]
        return named, len({work.request for work, _ in rows}) == 1

    def hello(self, process: str) -> Hello:
        return Hello(
            process=process,
            worker=self.key.worker,
            incarnation=self.key.incarnation,
            pid=1000 + self.key.incarnation,
            role=self.role,
            kv_addresses=[f"tcp://{self.key.worker}.{self.key.incarnation}:1"],
            model_digest="digest",
            numerics_id=self.numerics,
            kv_blocks=self.kv_blocks,
            block_size=self.block_size,
            max_model_len=512,
            max_num_seqs=self.max_num_seqs,
        )

    @property
    def used_blocks(self) -> int:
        size = self.block_size
        return sum(-(-(len(s.work.token_ids) + 8) // size) for s in self.sequences.values())

    def receive(self, message: Message) -> None:
        if self.draining and isinstance(message, Run | Reserve | Prefill):
            work = message.work
            self.out.append(Refuse(work.request, work.choice, work.attempt, "draining"))
        elif isinstance(message, Run):
            work = message.work
            generated = list(work.token_ids[work.num_prompt :])
            self._forget_older(work)
            self.sequences[self._key(work)] = Sequence(work, generated, runnable=True, parks=message.park_ms > 0)
        elif isinstance(message, Reserve):
            work = message.work
            blocks = -(-(len(work.token_ids) + 8) // self.block_size)
            if self.used_blocks + blocks > self.kv_blocks:
                self.out.append(Refuse(work.request, work.choice, work.attempt, "full"))
                return
            generated = list(work.token_ids[work.num_prompt :])
            self.sequences[self._key(work)] = Sequence(work, generated, runnable=False, transfer=message.transfer)
            self.out.append(Accept(work.request, work.choice, work.attempt, message.transfer, 0))
        elif isinstance(message, Prefill):
            self._forget_older(message.work)
            self.prefills[self._key(message.work)] = message
        elif isinstance(message, Cancel):
            for table in (self.sequences, self.prefills):
                for key in [
                    k for k in table if k[:2] == (message.request, message.choice) and k.attempt <= message.attempt
                ]:
                    del table[key]
                    self.out.append(self.load())
        elif isinstance(message, Drain):
            self.draining = True
            for key in [key for key, sequence in self.sequences.items() if sequence.parks and not sequence.runnable]:
                del self.sequences[key]

    def _forget_older(self, work: Work) -> None:
        """An older attempt of the same choice, parked here."""
        for key in [key for key in self.sequences if key[:2] == self._key(work)[:2]]:
            del self.sequences[key]

    def load(self) -> Load:
        return Load(self.used_blocks, self.kv_blocks, len(self.sequences), 0, 0)

    def step(self) -> None:
        """One token for every runnable sequence."""
        entries = []
        for key, sequence in list(self.sequences.items()):
            if sequence.runnable:
                entries.append(self._advance(key, sequence))
                sequence.runnable = not sequence.parks
        if entries:
            self.out.append(Tokens(entries))
            self.out.append(self.load())

    def prefill(self, key: SequenceKey) -> Prefill:
        """P finishes one prompt: reports the first token; the caller carries the handoff to D."""
        order = self.prefills.pop(key)
        sequence = Sequence(order.work, list(order.work.token_ids[order.work.num_prompt :]), runnable=True)
        self.out.append(Tokens([self._advance(key, sequence)]))
        return order

    def handoff(self, key: SequenceKey, transfer: int) -> None:
        """D gets everything of ``key``: KV and first token, which it reports too."""
        sequence = self.sequences.get(key)
        if sequence is None or sequence.transfer != transfer or sequence.runnable:
            return
        sequence.runnable = True
        self.out.append(Tokens([self._advance(key, sequence)]))

    def _advance(self, key: SequenceKey, sequence: Sequence) -> TokenEntry:
        work = sequence.work
        position = len(sequence.tokens)
        token = next_token(work.token_ids[: work.num_prompt] + sequence.tokens, work.params, work.choice)
        sequence.tokens.append(token)
        finish = finish_of(token, len(sequence.tokens), work.params)
        if finish:
            self.sequences.pop(key, None)
        return TokenEntry(work.request, work.choice, work.attempt, position, [token], finish)

    @staticmethod
    def _key(work: Work) -> SequenceKey:
        return SequenceKey(work.request, work.choice, work.attempt)
