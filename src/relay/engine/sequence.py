"""One sequence: the tokens of one attempt at one choice, and how far the engine has come with them."""

from dataclasses import dataclass, field
from enum import Enum

from relay.engine.limits import SchedulerLimits
from relay.ids import SequenceKey
from relay.kernels.backend import SampledToken
from relay.protocol.block_hash import UNIT_TOKENS, root_hash, unit_hashes
from relay.protocol.messages import FinishReason, Work
from relay.protocol.sampling import SamplingParams

PartKey = (
    bytes | tuple[bytes, tuple[int, ...]]
)  # a full unit's hash, or (hash before it, tokens) of a partial last unit


class SequenceState(Enum):
    """Where a sequence is. Blocks are held in all states but WAITING and DONE, a slot in RUNNING only."""

    WAITING = "waiting"  # queued for local compute, new or preempted
    RUNNING = "running"  # prefilling or decoding
    RESERVED = "reserved"  # D: KV comes from elsewhere
    HELD = "held"  # P: prompt computed, blocks pinned until ``release``
    DONE = "done"  # finished, cancelled or failed


@dataclass(slots=True)
class SequenceUpdate:
    """What one step (or an activation) brought one sequence."""

    key: SequenceKey
    position: int  # generated tokens before the first of ``tokens``, committed ones of earlier attempts included
    tokens: list[SampledToken]
    finish: FinishReason | None = None
    cached_tokens: int = 0  # on the first update of an attempt: tokens that were not computed
    logit_digests: list[bytes] | None = None  # one a token, where captured
    block_table: list[int] | None = None  # on the finish of a capturing sequence; content is valid until the next call
    num_computed: int = 0  # positions whose KV is in the blocks
    failed: str | None = None  # the sequence ended because its rows raised


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room on D: KV of positions ``cached_tokens``.. is to be written into ``block_table``, then ``activate`` called."""

    key: SequenceKey
    cached_tokens: int
    block_table: list[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one sequence. 0 ≤ num_computed ≤ num_planned; tokens only grow.

    A running sequence is prefilling until positions 0..prefill_end-1 are planned, then decoding: its next row's input is the
    last token drawn. ``num_planned`` runs ahead of ``num_computed`` by the steps in flight.
    """

    key: SequenceKey
    params: SamplingParams
    token_ids: list[int]
    num_prompt: int
    arrival: int  # order of ``add`` and ``reserve``; kept over preemption
    max_len: int  # the sequence ends when it has this many tokens
    stop_at: int  # positions 0..stop_at-1 are the most it ever computes here
    stop_ids: frozenset[int]
    parent_hash: bytes  # of the first unit
    prefill_only: bool = False
    capture: bool = False
    solo_until: int = 0  # rows that start before this position have their step for themselves
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    bound: bool = False  # the backend knows the slot's sampler state (or will, by a planned step)
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0  # positions the blocks hold
    target_blocks: int = 0  # blocks it is expected to need
    num_computed: int = 0
    num_planned: int = 0
    prefill_end: int = 0
    num_published: int = 0  # blocks offered to the prefix cache
    hashes: list[bytes] = field(default_factory=list)  # of the full units of token_ids, grown on demand
    waits_for: PartKey | None = None  # what another sequence was computing at the last look
    tail_key: bytes | None = None  # under which ``KvSpace`` lists its partly filled block
    cached_tokens: int = 0
    high_water: int = 0  # most positions ever computed: recomputing them is not a cache hit
    reported: bool = False
    starved: bool = False  # found no blocks when it was to start: those behind it wait too

    @property
    def alone(self) -> bool:
        """Its next row shares a step with nobody."""
        return self.num_planned < self.solo_until

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def unit_hash(self, unit: int) -> bytes:
        """Hash of full unit ``unit`` of the tokens known; unit -1 is the root."""
        if unit < 0:
            return self.parent_hash
        hashes = self.hashes
        if unit >= len(hashes):
            known = len(hashes) * UNIT_TOKENS
            parent = hashes[-1] if hashes else self.parent_hash
            hashes += unit_hashes(parent, self.token_ids[known:])
        return hashes[unit]

    def part_at(self, position: int) -> PartKey:
        """Names the unit that starts at ``position`` (a multiple of the unit, below the number of tokens)."""
        unit = position // UNIT_TOKENS
        if position + UNIT_TOKENS <= len(self.token_ids):
            return self.unit_hash(unit)
        return self.unit_hash(unit - 1), tuple(self.token_ids[position:])

    def append(self, token: int) -> FinishReason | None:
        """Add a drawn token; the finish check of every path: decode, P's first token, D's activation.

        EOS and stop ids end the sequence once ``min_tokens`` came before them (the sampler masks them until then).
        """
        num_outputs = len(self.token_ids) - self.num_prompt
        self.token_ids.append(token)
        if token in self.stop_ids and num_outputs >= self.params.min_tokens:
            return "stop"
        if len(self.token_ids) >= self.max_len:
            return "length"
        return None


class CannotFit(ValueError):
    """The work can never run on this engine; the text holds the numbers."""


class QueueFull(Exception):
    """The work fits, but not now: too many sequences wait already."""


def sequence_of(work: Work, limits: SchedulerLimits, namespace: str, arrival: int, prefill_only: bool) -> Sequence:
    """The sequence of ``work``. Raises CannotFit."""
    length = len(work.token_ids)
    max_len = min(work.num_prompt + work.params.max_tokens, limits.max_model_len)
    if not 0 < work.num_prompt <= length:
        raise CannotFit(f"num_prompt {work.num_prompt} does not fit {length} tokens")
    if length >= max_len:
        raise CannotFit(f"{length} tokens leave nothing to generate below the limit of {max_len}")
    stop_at = length if prefill_only else max_len - 1
    if limits.blocks_for(stop_at) > limits.num_blocks:
        raise CannotFit(
            f"{stop_at} positions need {limits.blocks_for(stop_at)} blocks, the pool has {limits.num_blocks}"
        )
    return Sequence(
        key=SequenceKey(work.request, work.choice, work.attempt),
        params=work.params,
        token_ids=list(work.token_ids),
        num_prompt=work.num_prompt,
        arrival=arrival,
        max_len=max_len,
        stop_at=stop_at,
        stop_ids=frozenset(work.params.eos_token_ids) | frozenset(work.params.stop_token_ids),
        parent_hash=root_hash(namespace, work.cache_salt),
        prefill_only=prefill_only,
        capture=work.capture,
        solo_until=work.solo_until,
    )
