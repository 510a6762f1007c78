"""Draws that are queued on the device and not yet fetched, each with a pinned buffer of its own."""

from dataclasses import dataclass

import torch

from relay.kernels.backend import Batch, SampledToken
from relay.kernels.sampler import SlotState

DEPTH = 4  # steps whose draws may be waiting at once


@dataclass(slots=True)
class Draw:
    """One step's draw. ``host`` holds (token, flags) of each sampled row once ``event`` has passed."""

    batch: Batch
    slots: list[int]
    states: list[SlotState]
    host: torch.Tensor  # int32 [sampled, 2], pinned
    event: torch.cuda.Event
    on_host: bool  # some row is drawn by the host
    logits: torch.Tensor | None  # bf16 [sampled, vocab] on the device, where the host needs them
    tokens: list[SampledToken] | None = None


class Draws:
    """A ring of at most ``DEPTH`` waiting draws."""

    def __init__(self, max_rows: int) -> None:
        self._hosts = [torch.zeros(max_rows, 2, dtype=torch.int32).pin_memory() for _ in range(DEPTH)]
        self._waiting: list[Draw] = []
        self._next = 0

    def queue(
        self,
        batch: Batch,
        slots: list[int],
        states: list[SlotState],
        drawn: torch.Tensor,
        on_host: bool,
        logits: torch.Tensor | None,
    ) -> None:
        """Queue the copy of ``drawn`` on the current stream. A step that ran again replaces its earlier draw."""
        self._waiting = [draw for draw in self._waiting if draw.batch is not batch][1 - DEPTH :]
        host = self._hosts[self._next][: len(slots)]
        self._next = (self._next + 1) % DEPTH
        if slots:
            host.copy_(drawn[: len(slots)], non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._waiting.append(Draw(batch, slots, states, host, event, on_host, logits))

    def waiting(self) -> list[Draw]:
        """Draws not yet taken, oldest first. At most DEPTH - 1 are kept: a caller that never samples loses the oldest."""
        return list(self._waiting)

    def ended(self, batch: Batch) -> bool:
        """Whether the draw of ``batch`` is there to be taken. One without rows, which nobody takes, is forgotten then."""
        draw = next((draw for draw in self._waiting if draw.batch is batch), None)
        if draw is None:
            return True
        if not draw.event.query():
            return False
        if not draw.slots:
            self._waiting.remove(draw)
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
