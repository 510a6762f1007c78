"""The one text path: tokens of one choice → text, for streamed and plain answers alike.

The text after n tokens is a pure function of those n tokens: it does not depend on how they were grouped on their way here.
Stop strings are matched in the text, so token borders do not matter: the match that is complete first wins (of two
complete at the same character the one that began first), the text ends before it, and tokens after the one that
completed it are overshoot: not counted, not shown. While streaming, only a suffix that could begin a stop string is held back.
"""

from collections.abc import Sequence

from relay.api.detokenizer import TokenDecoder


class TextPath:
    """Text of one choice. ``hidden`` ids end a sequence and are counted but not shown (stop ids of the request)."""

    __slots__ = (
        "_decoder",
        "_held",
        "_hidden",
        "_include_stop",
        "_longest",
        "_min_tokens",
        "_offsets",
        "_stops",
        "decoded_chars",
        "num_tokens",
        "stop_matched",
    )

    def __init__(
        self,
        decoder: TokenDecoder,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        hidden: frozenset[int] = frozenset(),
        offsets: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._hidden = hidden
        self._held = ""  # decoded, not given out: may begin a stop string
        self._offsets: list[int] | None = [] if offsets else None
        self.num_tokens = 0
        self.decoded_chars = 0
        self.stop_matched: str | None = None

    @property
    def offsets(self) -> list[int]:
        """Where each token's text begins, in characters; only if asked for at construction."""
        return self._offsets if self._offsets is not None else []

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Add tokens; return the text to show now. ``last``: the sequence ends with them. Nothing is added after a match."""
        shown = ""
        for token_id in token_ids:
            if self.stop_matched is not None:
                return shown
            self.num_tokens += 1
            if self._offsets is not None:
                self._offsets.append(self.decoded_chars)
            if token_id in self._hidden:
                continue
            text = self._decoder.step(token_id)
            if text:
                shown += self._accept(text)
        if last and self.stop_matched is None:
            text = self._decoder.flush()
            if text:
                shown += self._accept(text)
            shown += self._held
            self._held = ""
        return shown

    def _accept(self, text: str) -> str:
        self.decoded_chars += len(text)
        if not self._stops:
            return text
        old = len(self._held)
        buffer = self._held + text
        if self.num_tokens > self._min_tokens:
            match = self._first_match(buffer, old)
            if match is not None:
                end, start, stop = match
                self.stop_matched = stop
                self._held = ""
                return buffer[: end if self._include_stop else start]
        hold = self._could_begin(buffer)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold]

    def _first_match(self, buffer: str, old: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the match complete first; matches that end within the first ``old`` characters are past."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _could_begin(self, buffer: str) -> int:
        """Length of the longest suffix that is a proper beginning of a stop string."""
        for size in range(min(self._longest - 1, len(buffer)), 0, -1):
            suffix = buffer[-size:]
            if any(len(stop) > size and stop.startswith(suffix) for stop in self._stops):
                return size
        return 0
