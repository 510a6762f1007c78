"""All tokens of one attempt with what was reported of them, for a gateway that takes the sequence over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from relay.ids import SequenceKey
from relay.protocol.messages import FinishReason, TokenEntry, Work


@dataclass(slots=True)
class TokenLog:
    """``position`` counts the generated tokens before the first: committed ones of earlier attempts, known by their ids alone."""

    position: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    logit_digests: list[bytes] | None = None
    kv_digests: list[bytes] | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0

    def add(self, entry: TokenEntry) -> None:
        """Append an entry of the attempt, in order."""
        if not self.token_ids:
            self.cached_tokens = entry.cached_tokens
        self.token_ids += entry.token_ids
        if entry.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += entry.logprobs
        if entry.logit_digests is not None:
            self.logit_digests = self.logit_digests or []
            self.logit_digests += entry.logit_digests
        self.kv_digests = entry.kv_digests
        self.finish = entry.finish

    def fits(self, old: Work, new: Work) -> bool:
        """Whether a sequence begun as ``old`` is the one ``new`` asks for, with everything ``new`` needs to hear of it."""
        if old.num_prompt != new.num_prompt or old.params != new.params or old.cache_salt != new.cache_salt:
            return False
        if old.capture != new.capture or old.choice != new.choice:
            return False
        ours, theirs = [*old.token_ids, *self.token_ids], new.token_ids
        wanted = len(theirs) - new.num_prompt
        if ours[: len(theirs)] != theirs:  # also if they know more than we do
            return False
        # Of tokens before this attempt only the ids are known.
        return wanted >= self.position or not (new.capture or new.params.logprobs is not None)

    def entry(self, name: SequenceKey, old: Work, position: int) -> TokenEntry | None:
        """What ``name``'s owner, which knows ``position`` generated tokens, has still to hear; None: nothing."""
        generated: Sequence[int] = [*old.token_ids[old.num_prompt :], *self.token_ids]
        first = max(0, position - self.position)
        if position >= len(generated) and self.finish is None:
            return None
        return TokenEntry(
            *name,
            position=position,
            token_ids=list(generated[position:]),
            finish=self.finish,
            logprobs=self.logprobs[first:] if self.logprobs is not None else None,
            cached_tokens=self.cached_tokens,
            logit_digests=self.logit_digests[first:] if self.logit_digests is not None else None,
            kv_digests=self.kv_digests,
        )
