"""The step contract between the scheduler (pure) and the runner (arithmetic)."""

from dataclasses import dataclass, field

from relay.kernels.backend import SampledToken
from relay.protocol.sampling import SamplingParams


@dataclass(slots=True)
class SlotBinding:
    """A sequence takes ``slot`` from this step on; the backend rebuilds its sampler state from these token ids."""

    slot: int
    params: SamplingParams
    choice: int
    prompt_ids: list[int]
    output_ids: list[int]
    capture: bool = False


@dataclass(slots=True)
class StepRow:
    """One sequence's part of a step.

    ``token_ids`` None means one token: the last one sampled for ``slot``, which the backend holds, so that a step can be
    planned before the result of the step before it is known.
    """

    slot: int
    start: int  # first position computed
    count: int  # tokens computed this step
    token_ids: list[int] | None
    sample: bool  # draw the next token from the last position's logits


@dataclass(slots=True)
class StepPlan:
    """What one step does, in this order: release slots, bind slots, copy blocks, set block table entries, compute rows.

    Block tables are kept by slot in the runner; ``new_blocks`` lists the (slot, index, block) entries that change.
    """

    step: int
    rows: list[StepRow]
    released: list[int] = field(default_factory=list)
    bound: list[SlotBinding] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """What one step drew: for each row with ``sample`` the 1..k tokens, in the order of the plan's rows."""

    step: int
    tokens: list[list[SampledToken]]
    logit_digests: list[bytes] | None = None  # BLAKE2b-16 of each sampled row's fp32 logits, where captured
    error: str | None = None  # the step raised; ``failed_slots`` names whom to blame (empty: all rows)
    failed_slots: list[int] = field(default_factory=list)
