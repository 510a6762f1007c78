"""When K and V of each layer are in the cache: events that transfers wait for, instead of the whole step."""

import torch


class LayerEvents:
    """``at`` is the place in the program after which each layer's K and V are written (``Program.sink_points``)."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self._at = at
        first = torch.cuda.Event()
        self._events = [first] * len(at)

    def ran(self, start: int, stop: int) -> None:
        """Ops [start, stop) were queued on the current stream."""
        layers = [layer for layer, point in enumerate(self._at) if start < point <= stop]
        if layers:
            event = torch.cuda.Event()
            event.record()
            for layer in layers:
                self._events[layer] = event

    def of(self, layer: int) -> torch.cuda.Event:
        """Passed once all that was queued for ``layer`` is in the cache."""
        return self._events[layer]
