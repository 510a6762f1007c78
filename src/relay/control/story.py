"""The last decisions about every request, for debugging. Bounded; tokens are not decisions and are not recorded."""

from collections import deque


class Story:
    """A ring of (time, request, choice, text)."""

    def __init__(self, entries: int) -> None:
        self._ring: deque[tuple[int, int, int, str]] = deque(maxlen=entries)

    def tell(self, now_ns: int, request: int, choice: int, text: str) -> None:
        self._ring.append((now_ns, request, choice, text))

    def everything(self) -> list[tuple[int, str]]:
        """All lines with the clock's time in ns, oldest first."""
        return [(at, f"request {request}.{choice}: {text}") for at, request, choice, text in self._ring]

    def of(self, request: int) -> list[str]:
        """Lines for one request, oldest first; times are relative to its first line."""
        found = [entry for entry in self._ring if entry[1] == request]
        if not found:
            return []
        start = found[0][0]
        return [f"+{(at - start) / 1e6:.1f} ms choice {choice}: {text}" for at, _, choice, text in found]
