"""Draws that are queued on the device and not yet fetched, each with a pinned buffer of its own."""

from dataclasses import dataclass

import torch

from relay.kernels.backend import Batch, SampledToken
from relay.kernels.cuda.logprobs import HEAD, with_logprobs
from relay.kernels.cuda.sampler import reason_of
from relay.kernels.sampler import InvalidLogits

DEPTH = 4  # steps whose draws may be waiting at once


@dataclass(slots=True, eq=False)
class Draw:
    """One step's draw. ``host`` holds (token, flags) of each sampled row once ``event`` has passed, ``details`` what
    ``gather_logprobs`` found; ``logits`` are kept on the device where the caller wants them."""

    batch: Batch
    logprobs: list[int]  # wanted by each sampled row
    host: torch.Tensor  # int32 [sampled, 2], pinned
    details: torch.Tensor | None  # int32 [sampled, HEAD + 2 * most], pinned
    event: torch.cuda.Event
    logits: torch.Tensor | None  # bf16 [sampled, vocab]

    def tokens(self) -> list[SampledToken]:
        """Wait for the draw. Raises InvalidLogits."""
        self.event.synchronize()
        drawn = self.host.tolist()
        for row, (_, flags) in enumerate(drawn):
            if flags:
                raise InvalidLogits(row, reason_of(flags))
        if self.details is None:
            return [SampledToken(token) for token, _ in drawn]
        details = self.details.numpy()
        most = (details.shape[1] - HEAD) // 2
        return [
            SampledToken(token) if wanted < 0 else with_logprobs(token, wanted, details[row], most)
            for row, ((token, _), wanted) in enumerate(zip(drawn, self.logprobs, strict=True))
        ]


class Draws:
    """A ring of at most ``DEPTH`` waiting draws."""

    def __init__(self, max_rows: int) -> None:
        self._hosts = [torch.zeros(max_rows, 2, dtype=torch.int32).pin_memory() for _ in range(DEPTH)]
        self._waiting: list[Draw] = []
        self._next = 0

    def queue(
        self,
        batch: Batch,
        logprobs: list[int],
        drawn: torch.Tensor,
        details: torch.Tensor | None,
        logits: torch.Tensor | None,
    ) -> None:
        """Queue the copies to the host on the current stream. A step that ran again replaces its earlier draw."""
        self._waiting = [draw for draw in self._waiting if draw.batch is not batch][1 - DEPTH :]
        rows = len(logprobs)
        host = self._hosts[self._next][:rows]
        self._next = (self._next + 1) % DEPTH
        if rows:
            host.copy_(drawn[:rows], non_blocking=True)
        pinned = None
        if details is not None:
            pinned = torch.empty(details.shape, dtype=torch.int32).pin_memory()
            pinned.copy_(details, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._waiting.append(Draw(batch, logprobs, host, pinned, event, logits))

    def ended(self, batch: Batch) -> bool:
        """Whether the draw of ``batch`` is there to be taken. One without rows, which nobody takes, is forgotten then."""
        draw = next((draw for draw in self._waiting if draw.batch is batch), None)
        if draw is None:
            return True
        if not draw.event.query():
            return False
        if not draw.logprobs:
            self._waiting = [other for other in self._waiting if other is not draw]
        return True

    def forget(self) -> None:
        """Drop all that is waiting."""
        self._waiting.clear()

    def take(self, batch: Batch) -> Draw:
        """The draw of ``batch``, which must have been run to its last op."""
        for index, draw in enumerate(self._waiting):
            if draw.batch is batch:
                return self._waiting.pop(index)
        raise RuntimeError("sample() of a batch that was not run to the end")
