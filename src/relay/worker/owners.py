"""The gateways a worker is connected to, by connection; an older life of one is fenced by its epoch."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Owners:
    """``alone_since_ns``: since when no gateway has been there; None while one is."""

    alone_since_ns: int | None = None
    _connected: dict[int, tuple[str, int]] = field(default_factory=dict)  # connection → (gateway, epoch)
    _epochs: dict[str, int] = field(default_factory=dict)  # newest life seen of each gateway

    def __contains__(self, connection: int) -> bool:
        return connection in self._connected

    def __len__(self) -> int:
        return len(self._connected)

    def connected(self, connection: int, gateway: str, epoch: int) -> tuple[bool, list[int]]:
        """(whether it counts, connections that are over by it): an old life has nothing to say, a new one ends the old."""
        if epoch < self._epochs.get(gateway, 0):
            return False, []
        self._epochs[gateway] = epoch
        over = [other for other, (name, _) in self._connected.items() if name == gateway and other != connection]
        self._connected[connection] = (gateway, epoch)
        self.alone_since_ns = None
        return True, over

    def lost(self, connection: int, now_ns: int) -> bool:
        """Whether it was connected."""
        was = self._connected.pop(connection, None) is not None
        if not self._connected and self.alone_since_ns is None:
            self.alone_since_ns = now_ns
        return was
