"""Per-slot sampling parameters on the device, as the sampler's kernels read them.

Set on the host, moved with the next ``flush`` in one copy from pinned memory, so that no binding waits for the steps that are
queued. Counts of tokens exist from the first sequence on that has penalties, lists of biases from the first that has any.
"""

import numpy as np
import torch

from relay.kernels import sampler_math as sm
from relay.kernels.cuda.staging import Staging
from relay.kernels.sampler import SlotState
from relay.protocol.sampling import SamplingParams

SEEN = 1 << 30  # in a token's count: it stands in prompt or output; the low bits count the output
_DOUBLES = ("temperatures", "log_min_ps", "top_ps", "repetitions", "frequencies", "presences")
_WORDS = ("choices", "top_ks", "masked_before", "penalised", "num_biases", "num_masked", "num_logprobs", "new_tokens")
KEPT = -1  # in ``new_tokens``: the slot's last token is the device's own


class SamplerTables:
    """Views of one buffer: fp64 [slots] and int32 [slots] by the names above, ``seeds`` int32 [slots, 2]; ``last_tokens`` and
    ``counted`` (position up to which output is counted, int32 [slots]) are the device's own."""

    temperatures: torch.Tensor
    log_min_ps: torch.Tensor
    top_ps: torch.Tensor
    repetitions: torch.Tensor
    frequencies: torch.Tensor
    presences: torch.Tensor
    choices: torch.Tensor
    top_ks: torch.Tensor
    masked_before: torch.Tensor
    penalised: torch.Tensor
    num_biases: torch.Tensor
    num_masked: torch.Tensor
    num_logprobs: torch.Tensor
    new_tokens: torch.Tensor

    def __init__(self, slots: int, device: str, staging: Staging | None = None) -> None:
        """Without ``staging`` a flush copies at once."""
        self._slots, self._device, self._staging = slots, device, staging
        slots += slots % 2  # doubles stay aligned
        words = slots * (2 * len(_DOUBLES) + 2 + len(_WORDS))
        self._host = np.zeros(words, np.int32)
        self._buffer = torch.zeros(words, dtype=torch.int32, device=device)
        self._views: dict[str, np.ndarray] = {}
        at = 0
        for name in _DOUBLES:
            self._views[name] = self._host[at : at + 2 * slots].view(np.float64)
            setattr(self, name, self._buffer[at : at + 2 * slots].view(torch.float64))
            at += 2 * slots
        self._views["seeds"] = self._host[at : at + 2 * slots].reshape(-1, 2)
        self.seeds = self._buffer[at : at + 2 * slots].view(-1, 2)
        at += 2 * slots
        for name in _WORDS:
            self._views[name] = self._host[at : at + slots]
            setattr(self, name, self._buffer[at : at + slots])
            at += slots
        self._views["new_tokens"][:] = KEPT
        self._views["log_min_ps"][:] = -np.inf
        self._views["top_ps"][:] = 1.0
        self._views["num_logprobs"][:] = -1
        self._buffer.copy_(torch.from_numpy(self._host))
        self._dirty = False
        self.last_tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self.counted = torch.zeros(slots, dtype=torch.int32, device=device)
        self.counts: torch.Tensor | None = None  # int32 [slots, vocab]
        self.list_ids = torch.zeros(slots, 0, dtype=torch.int32, device=device)  # biased ids, then masked ones
        self.list_values = torch.zeros(slots, 0, dtype=torch.float64, device=device)

    def set(self, slot: int, state: SlotState, vocab: int) -> None:
        """Parameters of one slot, and its counts and lists; on the current stream. Takes effect with ``flush``."""
        params, views = state.params, self._views
        views["temperatures"][slot] = params.temperature
        views["log_min_ps"][slot] = sm.log_of(params.min_p) if params.min_p > 0 else -np.inf
        views["seeds"][slot] = _signed(params.seed & 0xFFFFFFFF), _signed(params.seed >> 32)
        views["choices"][slot] = _signed(state.choice)
        views["top_ks"][slot] = min(params.top_k, (1 << 31) - 1)
        views["top_ps"][slot] = params.top_p
        views["repetitions"][slot] = params.repetition_penalty
        views["frequencies"][slot] = params.frequency_penalty
        views["presences"][slot] = params.presence_penalty
        views["penalised"][slot] = params.has_penalties
        views["masked_before"][slot] = masked_before(state)
        views["num_biases"][slot] = len(state.bias_ids)
        views["num_masked"][slot] = len(state.masked_ids)
        views["num_logprobs"][slot] = -1 if params.logprobs is None else params.logprobs
        views["new_tokens"][slot] = state.last_token
        self._dirty = True
        if params.has_penalties:
            self._set_counts(slot, state, vocab)
        if len(state.bias_ids) or len(state.masked_ids):
            self._set_lists(slot, state)

    def flush(self) -> None:
        """Move what was set, on the current stream."""
        if not self._dirty:
            return
        if self._staging is None:
            self._buffer.copy_(torch.from_numpy(self._host))
        else:
            words = len(self._host)
            packed, pair = self._staging.host(words)
            packed[:] = self._host
            self._staging.upload(pair, words, self._buffer)
        torch.where(self.new_tokens == KEPT, self.last_tokens, self.new_tokens, out=self.last_tokens)
        self._views["new_tokens"][:] = KEPT
        self._dirty = False

    def _set_counts(self, slot: int, state: SlotState, vocab: int) -> None:
        if self.counts is None:
            self.counts = torch.zeros(self._slots, vocab, dtype=torch.int32, device=self._device)
        ids = state.seen_ids[: state.num_seen]
        inside = (ids >= 0) & (ids < vocab)
        row = np.zeros(vocab, np.int32)
        row[ids[inside]] = state.output_counts[: state.num_seen][inside] + SEEN
        self._copy(self.counts[slot], row)
        self.counted[slot : slot + 1].fill_(state.position)

    def _set_lists(self, slot: int, state: SlotState) -> None:
        size = len(state.bias_ids) + len(state.masked_ids)
        width = self.list_ids.shape[1]
        if size > width:
            wider = 1 << (size - 1).bit_length()
            ids, values = self.list_ids, self.list_values
            self.list_ids = torch.zeros(len(ids), wider, dtype=torch.int32, device=self._device)
            self.list_values = torch.zeros(len(ids), wider, dtype=torch.float64, device=self._device)
            self.list_ids[:, :width] = ids
            self.list_values[:, :width] = values
        self._copy(self.list_ids[slot, :size], np.concatenate([state.bias_ids, state.masked_ids]))
        self._copy(self.list_values[slot, : len(state.bias_ids)], state.bias_values)

    def _copy(self, target: torch.Tensor, values: np.ndarray) -> None:
        """Queue a copy; the pinned source lives in torch's cache until it has been read."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        if self._staging is None:
            target.copy_(source)
        else:
            target.copy_(source.pin_memory(), non_blocking=True)


def masked_before(state: SlotState) -> int:
    """First position at which end-of-sequence and stop ids may be drawn."""
    return state.num_prompt + state.params.min_tokens if len(state.masked_ids) else 0


def has_limits(params: SamplingParams) -> bool:
    """Whether top-k or top-p can leave tokens out."""
    return not params.greedy and (params.top_k > 0 or params.top_p < 1)


def _signed(word: int) -> int:
    """A 32-bit word as int32 holds it."""
    return word - (1 << 32) if word >= 1 << 31 else word
