"""One choice of an answer while it grows: its text, finish reason and whatever else the client asked to see."""

from dataclasses import dataclass, field

from relay.api.detokenizer import Detokenizer
from relay.api.text import TextPath
from relay.api.types import Capture
from relay.control.contract import Delivery
from relay.protocol.sampling import SamplingParams

TokenLogprobs = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client asked to see besides text."""

    logprobs: int | None = None
    token_ids: bool = False
    capture: bool = False
    stops: tuple[str, ...] = ()
    include_stop: bool = False

    @property
    def details(self) -> bool:
        """Chunks carry more than text."""
        return self.logprobs is not None or self.token_ids


@dataclass(slots=True)
class Choice:
    """``index`` counts over prompts and choices. ``echo`` is shown before the text. ``shown`` tokens are already streamed."""

    index: int
    text: TextPath
    stop_token_ids: tuple[int, ...]
    prompt_ids: list[int]
    echo: str = ""
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logit_digests: list[bytes] = field(default_factory=list)
    kv_digests: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    numerics_id: str = ""
    shown: int = 0
    consumed: int = 0  # tokens the client has from before: their text is made again, and not shown
    last_ns: int = 0

    def accept(self, delivery: Delivery) -> str:
        """Add newly committed tokens; return the text to show now. Sets ``finish_reason`` when the choice is complete."""
        text = self.text
        before = text.num_tokens
        token_ids, last = delivery.token_ids, delivery.finish is not None
        known = max(0, self.consumed - before)
        if known:
            text.push(token_ids[:known], last=last and len(token_ids) <= known)
        delta = text.push(token_ids[known:], last=last) if len(token_ids) > known else ""
        count = text.num_tokens - before
        if before == 0:
            self.cached_tokens = delivery.cached_tokens
            self.numerics_id = delivery.numerics_id
        self.token_ids += delivery.token_ids[:count]
        if delivery.logprobs is not None:
            self.logprobs += delivery.logprobs[:count]
        if delivery.logit_digests is not None:
            self.logit_digests += delivery.logit_digests[:count]
        if delivery.kv_digests is not None:
            self.kv_digests = delivery.kv_digests
        if text.stop_matched is not None:
            self.finish_reason = "stop"
            self.stop_reason = text.stop_matched
        elif delivery.finish is not None:
            self.finish_reason = delivery.finish
            if delivery.finish == "stop" and self.token_ids and self.token_ids[-1] in self.stop_token_ids:
                self.stop_reason = self.token_ids[-1]
        return delta

    @property
    def num_shown(self) -> int:
        """Tokens the client has when all that was streamed has reached it."""
        return max(self.text.num_tokens, self.consumed)

    @property
    def behind(self) -> bool:
        """The client has all of this, and more or the end of it."""
        count = self.text.num_tokens
        return count < self.consumed or (count == self.consumed > 0)

    def so_far(self, index: int) -> Delivery:
        """All that was accepted, as one delivery of the request's choice ``index``."""
        ended = self.finish_reason in ("stop", "length") and self.text.stop_matched is None
        return Delivery(
            index,
            0,
            list(self.token_ids),
            ("stop" if self.finish_reason == "stop" else "length") if ended else None,
            list(self.logprobs) or None,
            self.cached_tokens,
            list(self.logit_digests) or None,
            self.kv_digests or None,
            self.numerics_id,
        )

    def capture(self) -> Capture:
        """The digests asked for with ``relay_capture``."""
        return Capture([digest.hex() for digest in self.logit_digests], [digest.hex() for digest in self.kv_digests])


def new_choice(
    index: int,
    prompt_ids: list[int],
    params: SamplingParams,
    wanted: Wanted,
    detokenizer: Detokenizer,
    echo: str = "",
    consumed: int = 0,
) -> Choice:
    """An empty choice for ``params``."""
    text = TextPath(
        detokenizer.decoder(),
        wanted.stops,
        include_stop=wanted.include_stop,
        min_tokens=params.min_tokens,
        hidden=frozenset(params.stop_token_ids + params.eos_token_ids),
        offsets=wanted.logprobs is not None,
    )
    return Choice(index, text, params.stop_token_ids, prompt_ids, echo, shown=consumed, consumed=consumed)
