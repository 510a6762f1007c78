"""What slots ask of the sampler, and the launches that give it to them."""

from dataclasses import dataclass

import numpy as np
import torch

from relay.kernels.backend import Batch
from relay.kernels.cuda.launch import launch_options, pdl_enabled
from relay.kernels.cuda.logprobs import gather_logprobs
from relay.kernels.cuda.sampler import SamplerScratch, find_tops, pick, sample_rows
from relay.kernels.cuda.sampler_tables import SEEN, SamplerTables, has_limits, masked_before
from relay.kernels.cuda.sampler_wide import WideScratch, adjust_rows, count_drawn_kernel
from relay.kernels.cuda.staging import Staging
from relay.kernels.cuda.step import Step
from relay.kernels.sampler import SlotState
from relay.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Mode:
    """What some row of a step needs: top-k or top-p; fp64 logits (penalties, bias, mask); the ``logprobs`` best (-1: none)."""

    limits: bool = False
    wide: bool = False
    logprobs: int = -1


PLAIN = Mode()


@dataclass(frozen=True, slots=True)
class _Slot:
    limits: bool
    wide: bool
    masked_before: int
    logprobs: int


class Sampler:
    """Draws on the current stream; every draw is ``relay.kernels.sampler.draw``'s, bit for bit."""

    def __init__(self, max_rows: int, vocab: int, device: str, tables: SamplerTables) -> None:
        self._tables, self._vocab, self._device = tables, vocab, device
        self._slots: dict[int, _Slot] = {}
        self._scratch = SamplerScratch(max_rows, vocab, device)
        self._wide: WideScratch | None = None
        self.drawn = torch.zeros(max_rows, 2, dtype=torch.int32, device=device)  # token, flags of each sampled row

    def bind(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """Give ``slot`` to a sequence, from the next ``flush`` on. Raises ValueError for parameters outside their domain."""
        self.bind_state(slot, SlotState(params, choice, prompt_ids, output_ids))

    def bind_state(self, slot: int, state: SlotState) -> None:
        """``bind`` from a state."""
        params = state.params
        self._slots[slot] = _Slot(
            has_limits(params),
            params.has_penalties or len(state.bias_ids) > 0,
            masked_before(state),
            -1 if params.logprobs is None else params.logprobs,
        )
        self._tables.set(slot, state, self._vocab)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def logprobs_of(self, slots: list[int]) -> list[int]:
        """How many best tokens each slot wants; -1: no log-probability at all."""
        return [self._slots[slot].logprobs for slot in slots]

    def mode(self, batch: Batch) -> Mode:
        """What drawing the sampled rows of ``batch`` takes."""
        sampled = batch.sampled_rows
        slots = [self._slots[slot] for slot in batch.slots[sampled].tolist()]
        if not any(slot.limits or slot.wide or slot.masked_before or slot.logprobs >= 0 for slot in slots):
            return PLAIN
        drawn_at = batch.positions[batch.row_starts[sampled + 1] - 1] + 1
        masked = np.array([slot.masked_before for slot in slots]) > drawn_at
        return Mode(
            any(slot.limits for slot in slots),
            any(slot.wide for slot in slots) or bool(masked.any()),
            max(slot.logprobs for slot in slots),
        )

    def draw(self, logits: torch.Tensor, step: Step, mode: Mode) -> torch.Tensor | None:
        """Fill ``drawn`` and every slot's last token; details of log-probabilities where ``mode`` asks for them."""
        tables, scratch = self._tables, self._scratch
        rows, slots = step.sampled, step.sampled_slots
        if mode.wide:
            if self._wide is None or self._wide.rows < rows:
                self._wide = WideScratch(rows, self._vocab, scratch.chunks, self._device)
            find_tops(logits, scratch)
            adjust_rows(logits, step.positions, step.sampled_tokens, slots, tables, scratch, self._wide, mode.limits)
            pick(self._wide.tops, self._wide.ids, slots, tables, scratch, self.drawn, self._vocab)
            if tables.counts is not None:
                pdl = pdl_enabled()
                count_drawn_kernel[(rows,)](
                    self.drawn, slots, step.positions, step.sampled_tokens, tables.penalised, tables.counted,
                    tables.counts, self._vocab, SEEN=SEEN, PDL=pdl, **launch_options(pdl),
                )  # fmt: skip
        else:
            sample_rows(logits, step.positions, step.sampled_tokens, slots, tables, scratch, self.drawn, mode.limits)
        if mode.logprobs < 0:
            return None
        return gather_logprobs(logits, self.drawn, slots, tables, scratch, mode.logprobs)


def new_tables(max_rows: int, device: str, staging: Staging | None) -> SamplerTables:
    """Tables for ``max_rows`` slots and one more, which padding rows draw for."""
    return SamplerTables(max_rows + 1, device, staging)
