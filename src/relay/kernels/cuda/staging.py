"""Pinned host buffers for the integers of a step, and their device copies, reused in turn."""

import numpy as np
import torch

SLOTS = 4


class Staging:
    """``SLOTS`` pairs of pinned and device buffers; a pair is reused only when its last copy has been read."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._host: list[torch.Tensor] = [torch.zeros(0, dtype=torch.int32)] * SLOTS
        self._target: list[torch.Tensor] = [torch.zeros(0, dtype=torch.int32)] * SLOTS
        self._events: list[torch.cuda.Event | None] = [None] * SLOTS
        self._next = 0

    def host(self, words: int) -> tuple[np.ndarray, int]:
        """A pinned int32 array of ``words``, and the number of its pair. The copies of the pair's last use have ended."""
        slot = self._next
        self._next = (slot + 1) % SLOTS
        event = self._events[slot]
        if event is not None:
            event.synchronize()
        if self._host[slot].numel() < words:
            size = max(4096, 2 * words)
            self._host[slot] = torch.zeros(size, dtype=torch.int32).pin_memory()
            self._target[slot] = torch.zeros(size, dtype=torch.int32, device=self._device)
        return self._host[slot].numpy()[:words], slot

    def upload(self, slot: int, words: int, target: torch.Tensor | None = None) -> torch.Tensor:
        """Queue the copy to ``target`` (or the pair's own device buffer) on the current stream."""
        into = self._target[slot] if target is None else target
        into[:words].copy_(self._host[slot][:words], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._events[slot] = event
        return into
