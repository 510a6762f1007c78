"""When each step of a KV transfer happened at either end: stamps taken around a store and its channels.

Nothing of the package knows of it: ``noted_store`` and ``noted_wire`` stand between where they are asked for, and where they are
not, nothing is added. Both processes read CLOCK_MONOTONIC of one machine.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from relay.transfer.frame import Kind

PATIENCE_S = 5

Stamp = tuple[int, str, str]
"""(monotonic ns, what, of what)."""


class Stamps:
    """Taken while ``on``, from any thread."""

    def __init__(self) -> None:
        self.on = False
        self._taken: list[Stamp] = []

    def take(self, what: str, detail: str = "") -> None:
        if self.on:
            self._taken.append((time.monotonic_ns(), what, detail))

    def start(self) -> None:
        self._taken = []
        self.on = True

    def stop(self, last: str) -> list[Stamp]:
        """All, once there is one of ``last``."""
        deadline = time.monotonic() + PATIENCE_S
        while all(detail != last for _, _, detail in self._taken) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.on = False
        return self._taken


class _NotedCopying:
    def __init__(self, copying: Any, stamps: Stamps, what: str, detail: str) -> None:
        self._copying, self._stamps = copying, stamps
        self._what, self._detail = what, detail
        self.ended = copying.ended

    def wait(self) -> Any:
        self._stamps.take(f"{self._what}: wait called", self._detail)
        found = self._copying.wait()
        self._stamps.take(f"{self._what}: wait returned", self._detail)
        return found


class _NotedStore:
    def __init__(self, store: Any, stamps: Stamps) -> None:
        self._store, self._stamps = store, stamps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def stage(self, frames: Sequence[Any]) -> _NotedCopying:
        return self._noted("stage", self._store.stage, frames)

    def collect(self, frames: Sequence[Any]) -> _NotedCopying:
        return self._noted("collect", self._store.collect, frames)

    def _noted(self, what: str, call: Callable[[Sequence[Any]], Any], frames: Sequence[Any]) -> _NotedCopying:
        ranges = [one for one, _ in frames]
        layers = ", ".join(f"{one.layer}+{one.layers}" for one in ranges)
        detail = f"layers {layers}, tokens {ranges[0].first}+{ranges[0].count}"
        self._stamps.take(f"{what} called", detail)
        copying = call(frames)
        self._stamps.take(f"{what} returned", detail)
        return _NotedCopying(copying, self._stamps, what, detail)


def noted_store(store: Any, stamps: Stamps) -> Any:
    """``store``, whose copies are noted."""
    return _NotedStore(store, stamps)


def noted_wire(wire: Any, stamps: Stamps) -> Any:
    """``wire``, the headers of whose channels are noted when they have been sent and when they have been read."""
    upgrade = wire.upgrade

    def noting(*arguments: Any, **named: Any) -> Any:
        channel = upgrade(*arguments, **named)
        commit, receive_header = channel.commit, channel.receive_header

        def noted_commit(*raw_headers: bytes) -> None:
            commit(*raw_headers)
            for raw in raw_headers:
                stamps.take("header committed", _described(raw))

        def noted_receive() -> bytes:
            raw: bytes = receive_header()
            stamps.take("header read", _described(raw))
            return raw

        channel.commit, channel.receive_header = noted_commit, noted_receive
        return channel

    wire.upgrade = noting
    return wire


def _described(raw: bytes) -> str:
    kind = Kind(raw[5]).name
    if raw[5] != Kind.KV:
        return kind
    layer, more = (int.from_bytes(raw[at : at + 2], "little") for at in (28, 30))
    first, count = (int.from_bytes(raw[at : at + 4], "little") for at in (36, 40))
    return f"{kind} layers {layer}+{more + 1}, tokens {first}+{count}"


def merged(zero_ns: int, source: list[Stamp], target: list[Stamp]) -> list[list[Any]]:
    """[µs since ``zero_ns``, "P" or "D", what, of what], in the order of time."""
    both = [(ns, end, what, detail) for end, stamps in (("P", source), ("D", target)) for ns, what, detail in stamps]
    return [[round((ns - zero_ns) / 1e3, 1), end, what, detail] for ns, end, what, detail in sorted(both)]


def lines_of(rows: list[list[Any]]) -> str:
    """One line a stamp, with the time since the one before it at that end."""
    last: dict[str, float] = {}
    lines = [f"{'µs':>10} {'since':>8}"]
    for us, end, what, detail in rows:
        since = f"{us - last[end]:8.1f}" if end in last else " " * 8
        lines.append(
            f"{us:10.1f} {since} {'' if end == 'P' else ' ' * 4}{end} {what}{f' · {detail}' if detail else ''}"
        )
        last[end] = us
    return "\n".join(lines)
